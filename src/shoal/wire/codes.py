"""Lists every refusal code with its HTTP status, its meaning and its remedy. Codes are stable.

Three families:
    request.*  an HTTP request was refused; nothing changed
    reject.*   a submission was refused because of what the contributor did; it costs trust
    void.*     a submission does not count, and the contributor is not blamed: no credit, no loss of trust
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """The explanation of a code, and its HTTP status (0: never sent as an HTTP error)."""

    status: int
    meaning: str
    remedy: str


CODES: dict[str, Meaning] = {
    # -- requests ---------------------------------------------------------------------------------------
    "request.malformed": Meaning(
        422, "the request is not in the format of this route", "see `shoal docs wire/api`; update the client"
    ),
    "request.unsigned": Meaning(401, "the request has no signature", "sign it with an enrolled key"),
    "request.bad_signature": Meaning(
        401, "the signature does not match the request", "check the key and the URL; sign every component"
    ),
    "request.expired": Meaning(
        401, "the signature is outside its time window", "correct the clock; compare it with server_time_s"
    ),
    "request.replayed": Meaning(
        401, "this nonce was used before", "sign every request with a new nonce, retries too"
    ),
    "request.wrong_digest": Meaning(
        401, "the body does not hash to its content-digest", "send the body that was signed"
    ),
    "request.incomplete": Meaning(
        400, "the upload ended before all declared bytes had come", "send the whole upload again"
    ),
    "request.unknown_key": Meaning(
        401,
        "the key is not enrolled",
        "a node must enrol first (POST /v1/enrol); a role needs its key from this run's keys folder",
    ),
    "request.not_allowed": Meaning(
        403,
        "this key does not have the role that the route needs",
        "use the role's key from the run's keys folder",
    ),
    "request.banned": Meaning(
        403, "the node was ejected from this run", "read the ledger: it names the verdicts that led to it"
    ),
    "request.not_admitted": Meaning(
        403,
        "this run does not admit every key",
        "the detail says what the run asks for: an invitation, a listed key, a proof of work or a stake",
    ),
    "request.unfit": Meaning(
        403,
        "the machine does not meet the requirements of this run",
        "the detail says what is missing; GET /v1/runs lists other runs",
    ),
    "request.revoked": Meaning(
        403,
        "the node's key was revoked, or its delegation has expired",
        "ask the owner for a new delegation",
    ),
    "request.paused": Meaning(425, "the operator has paused the run", "wait retry_after_s, then retry"),
    "request.not_yours": Meaning(
        403, "the lease belongs to another node", "submit only on leases issued to this key"
    ),
    "request.not_found": Meaning(404, "not found", "check the path and the id in the request"),
    "request.stale_epoch": Meaning(
        409, "a newer session of this node exists", "stop the other process that uses this key"
    ),
    "request.conflict": Meaning(
        409, "the request contradicts what is already recorded", "read the current state first"
    ),
    "request.lease_closed": Meaning(
        410, "the lease has passed its deadline or has already ended", "ask for a new lease"
    ),
    "request.too_large": Meaning(
        413, "the body has more bytes than the limit", "send less; a lease's limit is its max_bytes"
    ),
    "request.bad_range": Meaning(
        416, "the Range header is not one range inside the file", "ask for one range of bytes within its size"
    ),
    "request.too_early": Meaning(
        425, "what was asked for is not available yet", "wait retry_after_s, then retry"
    ),
    "request.outdated": Meaning(
        426,
        "the client is too old, or speaks another protocol version than the server",
        "install the version that the server names",
    ),
    "request.too_many": Meaning(429, "too many requests", "wait retry_after_s, then retry"),
    "request.not_ready": Meaning(
        503, "a part of the server has stopped working", "the operator must read the server's log"
    ),
    "request.no_space": Meaning(
        503,
        "the server's disk is full",
        "wait retry_after_s, then retry; nothing was lost, and the operator must free some space",
    ),
    "request.failed": Meaning(
        500, "the server failed to handle the request", "retry; the server's log has the reason"
    ),
    # -- submissions: the contributor is responsible ----------------------------------------------------
    "reject.malformed_file": Meaning(
        0, "the file is not a rollout table of this version", "write it with shoal.wire.rollouts"
    ),
    "reject.oversized_table": Meaning(
        0, "the file decodes to more than the lease allows", "send only the leased rows"
    ),
    "reject.wrong_digest": Meaning(
        0, "the stored bytes differ from the submitted ones", "upload the file that was submitted"
    ),
    "reject.replayed": Meaning(
        0,
        "the file was made for another lease of this node and accepted there",
        "generate new rollouts for each lease",
    ),
    "reject.copied": Meaning(
        0,
        "the file was made for a lease of another node and accepted there",
        "generate new rollouts for each lease",
    ),
    "reject.wrong_lease": Meaning(
        0, "the file was made for another lease or policy version", "submit the file made for the lease"
    ),
    "reject.incomplete_group": Meaning(
        0, "rows are missing, duplicated or too many", "send every sample of every prompt once"
    ),
    "reject.edited_prompt": Meaning(
        0, "a prompt differs from the leased one", "use the lease's prompts unchanged"
    ),
    "reject.other_prompts": Meaning(0, "none of the prompts is from the lease", "use the lease's prompts"),
    "reject.bad_values": Meaning(
        0,
        "a value is outside its range",
        "send tokens within the vocabulary, and log-probs that are finite and not positive",
    ),
    "reject.early_stop": Meaning(
        0,
        "an answer ends where the model would not have ended it",
        "stop at an end token or at max_new_tokens",
    ),
    "reject.malformed_proof": Meaning(
        0, "a proof has the wrong count, length or modulus", "build proofs with shoal.toploc"
    ),
    "reject.forged_proof": Meaning(
        0, "a proof was not made from any hidden states", "build proofs from the decode states"
    ),
    "reject.wrong_computation": Meaning(
        0,
        "the proofs do not match the leased model on these tokens",
        "run the leased policy version unchanged, in the run's compute_dtype, without quantisation or edited weights; if you did, "
        "`shoal check-local` shows by how much this machine differs: try another --device or --engine, update Shoal and the "
        "drivers, or appeal",
    ),
    "reject.weights_not_admitted": Meaning(
        0,
        "the file declares weights in a format that the run does not admit for this work",
        "start the worker without --weights, or with a format in the run's admitted_weights; held-out work needs exact weights",
    ),
    "reject.wrong_logprobs": Meaning(
        0, "the log-probs are not the model's", "report the log-probs of the sampling policy"
    ),
    "reject.wrong_sampling": Meaning(
        0, "the tokens are not those that the lease's seed draws", "sample as `shoal docs wire/draw` says"
    ),
    "reject.accumulated_evidence": Meaning(
        0,
        "all submissions of the node or its owner together are further off than honest work ever is",
        "run the leased version unchanged and take the tokens that its seed draws; the detail names what is off",
    ),
    # -- submissions: the contributor is not blamed -----------------------------------------------------
    "void.stale": Meaning(0, "newer policy versions came before the work was used", "nothing to do"),
    "void.expired": Meaning(
        0,
        "the lease expired before a submission arrived",
        "nothing to do; the node gets smaller leases for a while",
    ),
    "void.abandoned": Meaning(0, "the node gave the lease back", "nothing to do"),
    "void.operator": Meaning(0, "the operator ended the lease", "nothing to do; the ledger has the reason"),
    "void.infra": Meaning(0, "the swarm itself failed to check the submission", "nothing to do"),
    "void.unchecked": Meaning(
        0,
        "validators ran out of time twice while they checked the submission",
        "nothing to do; more of this node's work is checked",
    ),
    "void.uncertain": Meaning(
        0,
        "the submission is suspicious, but not certainly wrong",
        "nothing to do; more of this node's work is checked",
    ),
    "void.recalibrating": Meaning(
        0,
        "the submission is further off than the calibration expects of a correct one, but the model's own noise may have risen since; "
        "the run measures it again",
        "nothing to do; it does not count against the node",
    ),
}

ACCEPTED = "accepted"
ACCUMULATED = "reject.accumulated_evidence"
UNCERTAIN = "void.uncertain"
UNCHECKED = "void.unchecked"
RECALIBRATING = "void.recalibrating"


class CorruptData(Exception):
    """Stored or downloaded data does not verify: a ledger, a delta, a file of a version. No request was refused."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Rejected(Exception):
    """A request or a submission was refused. Carries the stable code and a detail that names the wrong value."""

    def __init__(self, code: str, detail: str, *, retry_after_s: float | None = None) -> None:
        assert code in CODES, f"unknown refusal code {code!r}; add it to wire/codes.py"
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


def explain_code(code: str) -> str:
    """Returns a code's meaning as a sentence: "an answer ends where ..." for `reject.early_stop`. `accepted` is returned as it is."""
    return CODES[code].meaning if code in CODES else code
