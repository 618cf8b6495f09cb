"""The coordinator's tables, and the layout number of a database.

The ledger is the record; the other tables are sums over it, kept for speed. Times are seconds since 1970 by the coordinator's
clock. Keys, digests and ids are lower-case hex.
"""

from sqlalchemy import BigInteger as Integer  # INTEGER of PostgreSQL is too small for bytes
from sqlalchemy import (
    Column,
    Connection,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    select,
    text,
)

SCHEMA_VERSION = 6
"""The layout of release 0.2.0. Raise it in the release that changes a table; other layouts are refused."""

metadata = MetaData()

WITHOUT_VERDICT = text("state IN ('issued', 'uploading', 'submitted', 'checking')")
"""As text: SQLite uses a partial index only for a query that has the same constants."""

run = Table(
    "run",
    metadata,
    Column("name", String, primary_key=True),
    Column("run_key", String, nullable=False),
    Column("schema_version", Integer, nullable=False),
    Column("spec", Text, nullable=False),
    # The settings that the ledger's sums depend on.
    Column("terms", Text, nullable=False),
    # 1 while the operator has paused it: no leases are issued.
    Column("paused", Integer, nullable=False),
    # The last version of a run that is over. A run resumed with a higher last version is not over.
    Column("finished_version", Integer),
)

ledger = Table(
    "ledger",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("time_s", Float, nullable=False),
    Column("type", String, nullable=False),
    Column("actor", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("prev", String, nullable=False),
    Column("hash", String, nullable=False),
)

nonces = Table(
    "nonces",
    metadata,
    Column("key", String, primary_key=True),
    Column("nonce", String, primary_key=True),
    Column("seen_at_s", Float, nullable=False, index=True),
    sqlite_with_rowid=False,
)

nodes = Table(
    "nodes",
    metadata,
    Column("node", String, primary_key=True),
    Column("enrolled_at_s", Float, nullable=False),
    Column("software", String, nullable=False),
    # Who delegated its key, until when; NULL for a node that is its own owner.
    Column("owner", String, index=True),
    Column("delegated_until_s", Float),
    Column("trust", String, nullable=False),
    Column("trust_reason", String, nullable=False),
    Column("trust_since_s", Float, nullable=False),
    Column("streak", Integer, nullable=False),
    Column("lapses", Integer, nullable=False),
    Column("lapsed_s", Float, nullable=False),
    Column("outdated_at_s", Float),
    Column("session_epoch", Integer, nullable=False),
    Column("last_seen_s", Float),
    # 0 from the round of housekeeping that finds it offline until its next request.
    Column("live", Integer, nullable=False),
    # Rows per second as measured (rules/node_status.py); 0 before the first measurement.
    Column("rows_per_s", Float, nullable=False),
    Column("phase", String, nullable=False),
    Column("policy_version", Integer),
    Column("tokens_per_s", Float, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("rejected", Integer, nullable=False),
    Column("void", Integer, nullable=False),
    Column("credit", Integer, nullable=False),
    Column("last_code", String),
    Column("last_detail", String),
)

epochs = Table(
    "epochs",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("secret", String, nullable=False),
    Column("commitment", String, nullable=False),
    Column("num_leases", Integer, nullable=False),
    Column("revealed_at_s", Float),
)

policies = Table(
    "policies",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("weights_digest", String, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("origin_url", String, nullable=False),
    Column("report", Text),
    Column("num_bytes", Integer, nullable=False),
    Column("published_at_s", Float, nullable=False),
    Column("seq", Integer, nullable=False),
)

# The calibrations that were repeated during the run; the ledger has them too.
calibrations = Table(
    "calibrations",
    metadata,
    # Not unique: a version may be calibrated by an earlier one first, and then by itself.
    Column("from_version", Integer, nullable=False),
    # wire/proof_noise.py LaterNoise
    Column("body", Text, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", String, primary_key=True),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    # Network prefix that its request came from; empty if it is not known.
    Column("network", String, nullable=False),
    # The first lease of the same work; itself, unless an earlier one was let go.
    Column("unit", String, nullable=False),
    Column("purpose", String, nullable=False),
    # Label of the task, or of the evaluation.
    Column("task", String, nullable=False),
    Column("epoch", ForeignKey("epochs.epoch"), nullable=False),
    Column("session_epoch", Integer, nullable=False),
    # The version an eval lease is pinned to; NULL for train.
    Column("eval_version", Integer),
    Column("chunk", Integer, nullable=False),
    Column("num_prompts", Integer, nullable=False),
    Column("samples_per_prompt", Integer, nullable=False),
    Column("max_bytes", Integer, nullable=False),
    Column("sealed", Text, nullable=False),
    Column("issued_at_s", Float, nullable=False),
    Column("deadline_s", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("code", String),
    Column("detail", String),
    Column("ended_at_s", Float),
    Column("credit", Integer, nullable=False),
    Index("leases_by_state", "state", "deadline_s"),
    Index("leases_by_code", "code"),
    Index("leases_by_issue", "issued_at_s"),
    Index("leases_by_node", "node", "state"),
    Index("leases_by_epoch", "epoch", "state"),
    Index("leases_by_evaluation", "eval_version", "state"),
    Index("leases_by_network", "network", sqlite_where=WITHOUT_VERDICT, postgresql_where=WITHOUT_VERDICT),
)

# Lost leases and evidence by node, owner and network (rules/lease_account.py, rules/cumulative_evidence.py).
accounts = Table(
    "accounts",
    metadata,
    # "node KEY", "owner KEY" or "network PREFIX"; "run" has the baseline of the evidence.
    Column("name", String, primary_key=True),
    # Both decayed until `at_s`.
    Column("lost", Float, nullable=False),
    Column("delivered", Float, nullable=False),
    Column("at_s", Float, nullable=False),
    # The sums of the tests as JSON; empty if all are 0.
    Column("evidence", Text, nullable=False),
)

# Train work that a node was leased and did not deliver: its next train leases repeat it.
debts = Table(
    "debts",
    metadata,
    # The first lease of the work.
    Column("unit", ForeignKey("leases.lease_id"), primary_key=True),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    # The epoch that the seed comes from: its secret is not revealed while the work is owed.
    Column("epoch", ForeignKey("epochs.epoch"), nullable=False, index=True),
    # When the work was first leased, and when it was last let go.
    Column("issued_at_s", Float, nullable=False),
    Column("owed_at_s", Float, nullable=False),
    Index("debts_by_node", "node", "owed_at_s"),
)

uploads = Table(
    "uploads",
    metadata,
    Column("lease_id", ForeignKey("leases.lease_id"), primary_key=True),
    Column("token", String, nullable=False, unique=True),
    Column("sha256", String, nullable=False, index=True),
    Column("num_bytes", Integer, nullable=False),
    # When the node had finished generating, and when all bytes had come.
    Column("asked_at_s", Float),
    Column("expires_at_s", Float, nullable=False),
    Column("stored_at_s", Float),
)

submissions = Table(
    "submissions",
    metadata,
    Column("lease_id", ForeignKey("leases.lease_id"), primary_key=True),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    Column("sha256", String, nullable=False, index=True),
    Column("num_bytes", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("received_at_s", Float, nullable=False),
    # The ledger's number of its receipt: the order in which submissions came.
    Column("seq", Integer, nullable=False),
    Column("receipt", Text, nullable=False),
    # "full" or "rewards", as drawn at receipt with that epoch's secret at that rate.
    Column("checks", String, nullable=False),
    Column("draw_epoch", ForeignKey("epochs.epoch"), nullable=False),
    Column("draw_rate", Float, nullable=False),
    Column("claimed_by", String),
    Column("claimed_at_s", Float, index=True),
    Column("claimed_until_s", Float),
    # Claims of it that ran out.
    Column("lapsed_claims", Integer, nullable=False),
    Index("submissions_by_node", "node", "seq"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("lease_id", ForeignKey("leases.lease_id"), primary_key=True),
    Column("validator", String, nullable=False),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    Column("code", String, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("checks", String, nullable=False),
    Column("credit", Integer, nullable=False),
    # Rows that the validator graded, and those of them that gave no answer at all.
    Column("graded", Integer, nullable=False),
    Column("unparseable", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Column("given_at_s", Float, nullable=False, index=True),
    # The lease whose rejection took this one's credit back.
    Column("revoked_for", String),
    Index("verdicts_by_node", "node", "given_at_s"),
)

# Answers of accepted submissions as text, for the rollout viewer. The oldest are deleted when they take too much room.
transcripts = Table(
    "transcripts",
    metadata,
    Column("lease_id", ForeignKey("leases.lease_id"), primary_key=True),
    # The ledger's number of its verdict.
    Column("seq", Integer, nullable=False),
    Column("purpose", String, nullable=False),
    Column("task", String, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("node", String, nullable=False),
    Column("reward_min", Float, nullable=False),
    Column("reward_max", Float, nullable=False),
    Column("num_bytes", Integer, nullable=False),
    # wire/transcript.py, compressed. The last column, so that a search by the others need not read it.
    Column("body", LargeBinary, nullable=False),
    Index("transcripts_by_seq", "purpose", "seq"),
    Index("transcripts_by_version", "policy_version", "purpose", "seq"),
    Index("transcripts_by_node", "node", "purpose", "seq"),
    Index("transcripts_by_task", "task", "purpose", "seq"),
)

appeals = Table(
    "appeals",
    metadata,
    Column("lease_id", ForeignKey("leases.lease_id"), primary_key=True),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    Column("text", Text, nullable=False),
    Column("filed_at_s", Float, nullable=False),
    # NULL until the operator has decided; then 1 (the rejection was wrong) or 0.
    Column("upheld", Integer),
    Column("reason", String),
)

revoked_keys = Table(
    "revoked_keys",
    metadata,
    Column("node", String, primary_key=True),
    Column("reason", String, nullable=False),
    Column("revoked_at_s", Float, nullable=False),
)

admissions = Table(
    "admissions",
    metadata,
    # "invite": SHA-256 of the code; "allow": a node's or an owner's key; "stake": likewise.
    Column("kind", String, primary_key=True),
    Column("subject", String, primary_key=True),
    # Uses left of an invitation, units of a stake.
    Column("amount", Integer, nullable=False),
    Column("expires_at_s", Float),
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", String, primary_key=True),
    Column("task", String, nullable=False),
    Column("lease_id", ForeignKey("leases.lease_id"), nullable=False),
    Column("prompt_index", Integer, nullable=False),
    Column("sha256", String, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("rewards", Text, nullable=False),
    Column("reward_mean", Float, nullable=False),
    Column("state", String, nullable=False),
    # 1 if its submission was accepted without every check.
    Column("unchecked", Integer, nullable=False),
    Column("batch_version", ForeignKey("batches.version")),
    # Ledger numbers of its verdict and of the event that made it stale.
    Column("accepted_seq", Integer, nullable=False, index=True),
    Column("stale_seq", Integer, index=True),
    Index("groups_by_state", "state", "policy_version", "accepted_seq"),
)

batches = Table(
    "batches",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("num_groups", Integer, nullable=False),
    # The body of the answer, so that every later request gets the same bytes.
    Column("body", Text, nullable=False),
    Column("formed_at_s", Float, nullable=False),
    Column("seq", Integer, nullable=False),
)

# The pass rates that difficulty sampling uses (rules/difficulty.py).
pass_rates = Table(
    "pass_rates",
    metadata,
    Column("task", String, primary_key=True),
    Column("problem", Integer, primary_key=True),
    Column("rate", Float, nullable=False),
    sqlite_with_rowid=False,
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    # Label of the evaluation.
    Column("task", String, primary_key=True),
    # As planned: a changed configuration must not change an evaluation that has begun.
    Column("num_prompts", Integer, nullable=False),
    Column("chunk_prompts", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("completed_at_s", Float),
)

evaluation_chunks = Table(
    "evaluation_chunks",
    metadata,
    Column("version", Integer, primary_key=True),
    Column("task", String, primary_key=True),
    Column("chunk", Integer, primary_key=True),
    Column("lease_id", ForeignKey("leases.lease_id"), nullable=False),
    Column("reward_sum", Float, nullable=False),
    Column("rollouts", Integer, nullable=False),
    # Number of right answers; of prompts; of prompts with a right answer; and of prompts whose most frequent answer is right.
    Column("right", Integer, nullable=False),
    Column("prompts", Integer, nullable=False),
    Column("passed", Integer, nullable=False),
    Column("majority", Integer, nullable=False),
    ForeignKeyConstraint(["version", "task"], ["evaluations.version", "evaluations.task"]),
)

relays = Table(
    "relays",
    metadata,
    Column("url", String, primary_key=True),
    # The key that the operator delegated for this URL, and when.
    Column("key", String, nullable=False, index=True),
    Column("delegated_at_s", Float, nullable=False),
    Column("versions", Text, nullable=False),
    Column("bytes_sent", Integer, nullable=False),
    Column("last_seen_s", Float, nullable=False),
    # Why leases do not name it; empty if they do.
    Column("problem", String, nullable=False),
    # NULL before the first trial.
    Column("tried_at_s", Float),
)


def open_layout(db: Connection) -> None:
    """Creates the tables in a new database; raises ValueError if an existing one has another layout.

    Runs in the transaction that opens the database, so that of several coordinators that start at once only one creates them.
    """
    if inspect(db).has_table(run.name):
        found = db.execute(select(run.c.schema_version)).scalar_one_or_none()
        if found is not None and found != SCHEMA_VERSION:
            raise ValueError(
                f"the database has layout {found}, this software reads layout {SCHEMA_VERSION}; "
                "finish the run with the version of shoal that began it, or begin a new run in another folder"
            )
    metadata.create_all(db)
