"""`shoal audit`: check a sample of a run's accepted submissions again, by a validator's own code, against the published weights.

Needs validator.key, because files are not public. What can be checked again is what was made by versions that relays still hold.
"""

import argparse
import json
import random
import secrets
import threading
from contextlib import closing
from functools import partial

import httpx

from shoal.cli.ledger import TIMEOUT_S, fetch_ledger
from shoal.cli.reaching import ask_info, reaching
from shoal.cli.supervise import EXIT_FAILED, EXIT_OK
from shoal.model.load import DTYPES, load_decoder
from shoal.net.client import SignedClient
from shoal.net.deadline import Stopped
from shoal.swarm.coordinator.replay import replay, seed_of
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.policies import PolicyShelf
from shoal.swarm.validator.reader import Reader
from shoal.swarm.validator.recompute import CannotCheck
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import Claim, Stats
from shoal.wire.run import RunSpec

FETCH_S = 120.0
GONE = "no relay holds its version any more"


def audit(options: argparse.Namespace, stop: threading.Event) -> int:
    log = Log("audit")
    key = Key.load(options.key)
    with httpx.Client(base_url=options.url, timeout=TIMEOUT_S) as http, reaching(options.url):
        info = ask_info(http)
        stats = Stats.parse(http.get("/v1/stats").raise_for_status().content)
        events = fetch_ledger(http, info.run_key, stop)
    books = replay(events)
    held = {version for relay in stats.relays for version in relay.versions}
    chosen = choose(events, held, options.sample, random.Random(options.seed))
    say = (lambda words: None) if options.json else print
    say(f"the ledger is good: {len(events)} events; checking {len(chosen)} accepted submissions again")
    found: dict[str, str | None] = {}
    with (
        closing(SignedClient(options.url, key, log=log, stop=stop)) as client,
        Reader() as reader,
    ):
        shelf = PolicyShelf(
            options.dir / "policies",
            client,
            run_key=info.run_key,
            load=partial(load_decoder, dtype=DTYPES[info.spec.compute_dtype], device="cpu"),
            max_loaded=2,
            fetch_s=FETCH_S,
            log=log,
        )
        issued = {event.body["lease_id"]: event for event in events if event.type == "lease.issued"}
        for verdict in chosen:
            if stop.is_set():
                raise Stopped("stopped between two submissions")
            lease_id = verdict.body["lease_id"]
            words = check_again(client, shelf, reader, info.spec, verdict, issued[lease_id])
            found[lease_id] = words
            say(f"  {lease_id}: {in_words(words, seed_of(books, lease_id))}")
    good = sum(words is None for words in found.values())
    gone = sum(words == GONE for words in found.values())
    say(
        f"{good} of {len(chosen)} as the ledger says"
        + (f", {gone} of versions that are gone" if gone else "")
    )
    if options.json:
        print(
            json.dumps(
                {"events": len(events), "checked": len(chosen), "good": good, "gone": gone, "found": found}
            )
        )
    return EXIT_OK if good + gone == len(chosen) else EXIT_FAILED


def in_words(words: str | None, seed: str | None) -> str:
    if words == GONE:
        return f"cannot be checked: {words}"
    if words is not None:
        return f"NOT GOOD: {words}"
    return "as the ledger says; " + (
        "its seed is not out yet" if seed is None else "its seed is the one committed to"
    )


def choose(events: list[LedgerEvent], held: set[int], sample: int, rng: random.Random) -> list[LedgerEvent]:
    """Verdicts to check again, among those whose version can still be had."""
    versions = {
        event.body["lease_id"]: event.body["policy_version"]
        for event in events
        if event.type == "submission.received"
    }
    accepted = [
        event
        for event in events
        if event.type == "verdict.given"
        and event.body["code"] == ACCEPTED
        and versions[event.body["lease_id"]] in held
    ]
    return sorted(rng.sample(accepted, min(sample, len(accepted))), key=lambda event: event.seq)


def check_again(
    client: SignedClient,
    shelf: PolicyShelf,
    reader: Reader,
    spec: RunSpec,
    verdict: LedgerEvent,
    issued: LedgerEvent,
) -> str | None:
    """What is wrong with an accepted submission; None if nothing is."""
    claim = client.call("GET", f"/v1/checks/{verdict.body['lease_id']}", None, Claim)
    if claim.lease.digest() != issued.body["lease_digest"]:
        return "the lease is not the one whose digest the ledger has"
    if not claim.relays:
        return GONE
    try:
        data = client.fetch_object(claim.sha256)
    except ValueError:
        return f"the stored file is not {claim.sha256}"
    try:
        policy = shelf.get(claim.policy_version, claim.lease, claim.relays)
        again = judge(data, claim, spec, policy, reader=reader, control_seed=secrets.randbits(64))
    except CannotCheck as error:
        return f"cannot be checked: {error}"
    return difference(again, verdict)


def difference(again: Verdict, verdict: LedgerEvent) -> str | None:
    if again.code != ACCEPTED:
        return f"{again.code}: {again.detail}"
    if list(again.rewards) != verdict.body["rewards"]:
        return f"rewards are {list(again.rewards)}, the ledger has {verdict.body['rewards']}"
    if again.output_tokens != verdict.body["output_tokens"]:
        return f"{again.output_tokens} output tokens, the ledger has {verdict.body['output_tokens']}"
    return None
