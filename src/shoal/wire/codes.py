"""Every refusal Shoal can utter: a stable code, whose doing it was, what it means, what to do next.

Three families:
    request.*  an HTTP request was refused; nothing changed
    reject.*   a submission was refused, and it is the contributor's doing
    void.*     a submission does not count, and it is nobody's doing: no blame, no credit
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code says to a person, and the HTTP status it travels with (0: never an HTTP error)."""

    status: int
    meaning: str
    remedy: str


CODES: dict[str, Meaning] = {
    # -- requests ---------------------------------------------------------------------------------------
    "request.malformed": Meaning(
        422, "the body is not what this route takes", "see docs/wire; update the client"
    ),
    "request.unsigned": Meaning(401, "the request carries no signature", "sign it with an enrolled key"),
    "request.bad_signature": Meaning(
        401, "the signature does not fit the request", "check the key and the URL; sign every component"
    ),
    "request.expired": Meaning(
        401, "the signature is outside its time window", "set the clock; compare with server_time_s"
    ),
    "request.replayed": Meaning(401, "this nonce was used before", "sign each request anew"),
    "request.wrong_digest": Meaning(
        401, "the body does not hash to its content-digest", "send the body that was signed"
    ),
    "request.unknown_key": Meaning(
        401,
        "the key is not enrolled",
        "a node enrols first (POST /v1/enrol); a role takes its key from this run's keys folder",
    ),
    "request.not_allowed": Meaning(
        403,
        "this key does not hold the role the route needs",
        "use the role's key from the run's keys folder",
    ),
    "request.banned": Meaning(
        403, "the node was ejected from this run", "the ledger names the verdicts that led to it"
    ),
    "request.not_admitted": Meaning(
        403,
        "this run does not take every key",
        "the detail says what it asks for: an invitation, work, a stake",
    ),
    "request.unfit": Meaning(
        403,
        "the machine is not what this run needs",
        "the detail says what is missing; GET /v1/runs lists other runs",
    ),
    "request.revoked": Meaning(
        403, "the node's key was revoked, or its delegation has ended", "have the owner delegate a key anew"
    ),
    "request.paused": Meaning(425, "the operator has paused the run", "wait retry_after_s, then ask again"),
    "request.not_yours": Meaning(
        403, "the lease belongs to another node", "submit only on leases issued to this key"
    ),
    "request.not_found": Meaning(404, "there is no such thing", "check the id in the request"),
    "request.stale_epoch": Meaning(
        409, "a newer session of this node exists", "stop the other process that uses this key"
    ),
    "request.conflict": Meaning(
        409, "it contradicts what is already recorded", "ask for the current state first"
    ),
    "request.lease_closed": Meaning(
        410, "the lease is past its deadline or already ended", "ask for a new lease"
    ),
    "request.too_large": Meaning(
        413, "more bytes than the limit allows", "stay within the lease's max_bytes"
    ),
    "request.bad_range": Meaning(
        416, "the range is not one range inside the file", "ask for one range of bytes within its size"
    ),
    "request.too_early": Meaning(
        425, "what was asked for is not there yet", "wait retry_after_s, then ask again"
    ),
    "request.outdated": Meaning(
        426, "client and server speak different protocol versions", "install the version the server names"
    ),
    "request.too_many": Meaning(429, "too many requests", "wait retry_after_s"),
    "request.not_ready": Meaning(
        503, "a part of the server stands still", "the operator must look; its log says what"
    ),
    "request.no_space": Meaning(
        503,
        "the server's disk is full",
        "the operator makes room; wait retry_after_s, then send it again: nothing was lost",
    ),
    "request.failed": Meaning(
        500, "the server failed to handle it", "try again; the server's log has the reason"
    ),
    # -- the contributor's doing ------------------------------------------------------------------------
    "reject.malformed_file": Meaning(
        0, "the file is not a rollout table of this version", "write it with shoal.wire.rollouts"
    ),
    "reject.oversized_table": Meaning(
        0, "the file decodes to more than the lease allows", "send only the leased rows"
    ),
    "reject.wrong_digest": Meaning(
        0, "the stored bytes are not the submitted ones", "upload the file that was submitted"
    ),
    "reject.replayed": Meaning(0, "this node submitted the same file before", "generate each lease anew"),
    "reject.copied": Meaning(0, "another node submitted the same file before", "generate each lease anew"),
    "reject.wrong_lease": Meaning(
        0, "the file was made for another lease or policy version", "submit a lease's own file"
    ),
    "reject.incomplete_group": Meaning(
        0, "rows are missing, doubled or surplus", "send every sample of every prompt once"
    ),
    "reject.edited_prompt": Meaning(
        0, "a prompt differs from the leased one", "use the lease's prompts unchanged"
    ),
    "reject.other_prompts": Meaning(0, "none of the prompts is a leased one", "use the lease's prompts"),
    "reject.bad_values": Meaning(
        0, "a value is outside its range", "tokens within the vocabulary, log-probs finite and not positive"
    ),
    "reject.early_stop": Meaning(
        0, "an answer ends where the model would not have ended it", "stop at an end token or at the cap"
    ),
    "reject.malformed_proof": Meaning(
        0, "a proof has the wrong count, length or modulus", "build proofs with shoal.toploc"
    ),
    "reject.forged_proof": Meaning(
        0, "a proof was not made from any hidden states", "build proofs from the decode states"
    ),
    "reject.wrong_computation": Meaning(
        0, "the proofs do not fit the leased model on these tokens", "run the leased policy version unchanged"
    ),
    "reject.wrong_logprobs": Meaning(
        0, "the log-probs are not the model's", "report the log-probs of the sampling policy"
    ),
    "reject.wrong_sampling": Meaning(
        0, "the tokens are not the draw that the lease's seed gives", "sample as docs/wire/draw.md says"
    ),
    # -- nobody's doing ---------------------------------------------------------------------------------
    "void.stale": Meaning(0, "the policy moved on before the work was used", "nothing to do"),
    "void.expired": Meaning(
        0, "the lease ran out before a submission came", "nothing to do; a smaller lease may fit better"
    ),
    "void.abandoned": Meaning(0, "the node gave the lease back", "nothing to do"),
    "void.operator": Meaning(0, "the operator ended it", "nothing to do; the ledger has the reason"),
    "void.infra": Meaning(0, "the swarm's own side failed to check it", "nothing to do"),
    "void.uncertain": Meaning(
        0, "suspicious, but not certain", "nothing to do; more of this node's work is checked"
    ),
}

ACCEPTED = "accepted"
UNCERTAIN = "void.uncertain"


class CorruptData(Exception):
    """Stored or downloaded data does not verify: a ledger, a delta, a file of a version. No request was refused."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Rejected(Exception):
    """A request or a submission was refused. Carries the stable code and a detail that names the wrong value."""

    def __init__(self, code: str, detail: str, *, retry_after_s: float | None = None) -> None:
        assert code in CODES, f"unknown refusal code {code!r}: add it to wire/codes.py"
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


def in_words(code: str) -> str:
    """One sentence for a person: `reject.early_stop` -> "an answer ends where the model would ..."."""
    return CODES[code].meaning if code in CODES else code
