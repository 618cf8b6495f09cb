-- The tables as layout 1 had them, for the test of migrations.
CREATE TABLE batches (
	version INTEGER NOT NULL, 
	num_groups INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	formed_at_s FLOAT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
CREATE TABLE epochs (
	epoch INTEGER NOT NULL, 
	secret VARCHAR NOT NULL, 
	commitment VARCHAR NOT NULL, 
	num_leases INTEGER NOT NULL, 
	revealed_at_s FLOAT, 
	PRIMARY KEY (epoch)
);
CREATE TABLE evaluations (
	version INTEGER NOT NULL, 
	num_prompts INTEGER NOT NULL, 
	chunk_prompts INTEGER NOT NULL, 
	completed_at_s FLOAT, 
	PRIMARY KEY (version)
);
CREATE TABLE ledger (
	seq INTEGER NOT NULL, 
	time_s FLOAT NOT NULL, 
	type VARCHAR NOT NULL, 
	actor VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	prev VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE TABLE nodes (
	node VARCHAR NOT NULL, 
	enrolled_at_s FLOAT NOT NULL, 
	software VARCHAR NOT NULL, 
	trust VARCHAR NOT NULL, 
	trust_reason VARCHAR NOT NULL, 
	accepted_in_a_row INTEGER NOT NULL, 
	session_epoch INTEGER NOT NULL, 
	last_seen_s FLOAT, 
	phase VARCHAR NOT NULL, 
	policy_version INTEGER, 
	tokens_per_s FLOAT NOT NULL, 
	accepted INTEGER NOT NULL, 
	rejected INTEGER NOT NULL, 
	void INTEGER NOT NULL, 
	credit INTEGER NOT NULL, 
	last_code VARCHAR, 
	last_detail VARCHAR, 
	PRIMARY KEY (node)
);
CREATE TABLE nonces (
	"key" VARCHAR NOT NULL, 
	nonce VARCHAR NOT NULL, 
	seen_at_s FLOAT NOT NULL, 
	PRIMARY KEY ("key", nonce)
)
 WITHOUT ROWID;
CREATE INDEX ix_nonces_seen_at_s ON nonces (seen_at_s);
CREATE TABLE policies (
	version INTEGER NOT NULL, 
	weights_digest VARCHAR NOT NULL, 
	manifest TEXT NOT NULL, 
	origin_url VARCHAR NOT NULL, 
	report TEXT, 
	num_bytes INTEGER NOT NULL, 
	published_at_s FLOAT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
CREATE TABLE relays (
	url VARCHAR NOT NULL, 
	versions TEXT NOT NULL, 
	bytes_sent INTEGER NOT NULL, 
	last_seen_s FLOAT NOT NULL, 
	PRIMARY KEY (url)
);
CREATE TABLE run (
	name VARCHAR NOT NULL, 
	run_key VARCHAR NOT NULL, 
	schema_version INTEGER NOT NULL, 
	spec TEXT NOT NULL, 
	finished_version INTEGER, 
	PRIMARY KEY (name)
);
CREATE TABLE leases (
	lease_id VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	purpose VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	session_epoch INTEGER NOT NULL, 
	eval_version INTEGER, 
	chunk INTEGER NOT NULL, 
	num_prompts INTEGER NOT NULL, 
	samples_per_prompt INTEGER NOT NULL, 
	max_bytes INTEGER NOT NULL, 
	sealed TEXT NOT NULL, 
	issued_at_s FLOAT NOT NULL, 
	deadline_s FLOAT NOT NULL, 
	state VARCHAR NOT NULL, 
	code VARCHAR, 
	detail VARCHAR, 
	ended_at_s FLOAT, 
	credit INTEGER NOT NULL, 
	PRIMARY KEY (lease_id), 
	FOREIGN KEY(node) REFERENCES nodes (node), 
	FOREIGN KEY(epoch) REFERENCES epochs (epoch)
);
CREATE INDEX leases_by_code ON leases (code);
CREATE INDEX leases_by_epoch ON leases (epoch, state);
CREATE INDEX leases_by_evaluation ON leases (eval_version, state);
CREATE INDEX leases_by_node ON leases (node, state);
CREATE INDEX leases_by_state ON leases (state, deadline_s);
CREATE TABLE evaluation_chunks (
	version INTEGER NOT NULL, 
	chunk INTEGER NOT NULL, 
	lease_id VARCHAR NOT NULL, 
	reward_sum FLOAT NOT NULL, 
	rollouts INTEGER NOT NULL, 
	PRIMARY KEY (version, chunk), 
	FOREIGN KEY(version) REFERENCES evaluations (version), 
	FOREIGN KEY(lease_id) REFERENCES leases (lease_id)
);
CREATE TABLE groups (
	group_id VARCHAR NOT NULL, 
	lease_id VARCHAR NOT NULL, 
	prompt_index INTEGER NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	policy_version INTEGER NOT NULL, 
	rewards TEXT NOT NULL, 
	reward_mean FLOAT NOT NULL, 
	state VARCHAR NOT NULL, 
	batch_version INTEGER, 
	accepted_seq INTEGER NOT NULL, 
	stale_seq INTEGER, 
	PRIMARY KEY (group_id), 
	FOREIGN KEY(lease_id) REFERENCES leases (lease_id), 
	FOREIGN KEY(batch_version) REFERENCES batches (version)
);
CREATE INDEX groups_by_state ON groups (state, policy_version, accepted_seq);
CREATE INDEX ix_groups_accepted_seq ON groups (accepted_seq);
CREATE INDEX ix_groups_stale_seq ON groups (stale_seq);
CREATE TABLE submissions (
	lease_id VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	num_bytes INTEGER NOT NULL, 
	policy_version INTEGER NOT NULL, 
	received_at_s FLOAT NOT NULL, 
	seq INTEGER NOT NULL, 
	receipt TEXT NOT NULL, 
	claimed_by VARCHAR, 
	claimed_at_s FLOAT, 
	claimed_until_s FLOAT, 
	PRIMARY KEY (lease_id), 
	FOREIGN KEY(lease_id) REFERENCES leases (lease_id), 
	FOREIGN KEY(node) REFERENCES nodes (node)
);
CREATE INDEX ix_submissions_claimed_at_s ON submissions (claimed_at_s);
CREATE INDEX ix_submissions_sha256 ON submissions (sha256);
CREATE TABLE uploads (
	lease_id VARCHAR NOT NULL, 
	token VARCHAR NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	num_bytes INTEGER NOT NULL, 
	expires_at_s FLOAT NOT NULL, 
	stored_at_s FLOAT, 
	PRIMARY KEY (lease_id), 
	FOREIGN KEY(lease_id) REFERENCES leases (lease_id), 
	UNIQUE (token)
);
CREATE INDEX ix_uploads_sha256 ON uploads (sha256);
CREATE TABLE verdicts (
	lease_id VARCHAR NOT NULL, 
	validator VARCHAR NOT NULL, 
	code VARCHAR NOT NULL, 
	output_tokens INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	given_at_s FLOAT NOT NULL, 
	PRIMARY KEY (lease_id), 
	FOREIGN KEY(lease_id) REFERENCES leases (lease_id)
);
CREATE INDEX ix_verdicts_given_at_s ON verdicts (given_at_s);
