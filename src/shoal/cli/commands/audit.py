"""`shoal audit`: check a sample of a run's verdicts again, on work that was accepted and on work that was refused, by a validator's own code,
against the published weights.

Needs validator.key, because files are not public. What can be checked again is what was made by versions that relays still hold.
"""

import argparse
import json
import random
import secrets
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx2

from shoal.cli.commands.connectivity import ask_info, reaching
from shoal.cli.commands.ledger import TIMEOUT_S, fetch_ledger
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.model.load_model import DTYPES, load_decoder
from shoal.net.http_client import SignedClient, fetch_files
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.ledger_replay import replay, seed_of
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.loaded_versions import PolicyShelf
from shoal.swarm.validator.recompute import CannotCheck
from shoal.swarm.validator.table_reader import Reader
from shoal.tasks.datasets.file_options import file_digests, with_files_from
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import Claim, Stats
from shoal.wire.run_spec import RunSpec

FETCH_S = 120.0
GONE = "no relay holds its version any more"


def audit(options: argparse.Namespace, stop: threading.Event) -> int:
    log = Log("audit")
    key = Key.load(options.key)
    with httpx2.Client(base_url=options.url, timeout=TIMEOUT_S) as http, reaching(options.url):
        info = ask_info(http)
        stats = Stats.parse(http.get("/v1/stats").raise_for_status().content)
        events = fetch_ledger(http, info.run_key, stop)
    books = replay(events)
    held = {version for relay in stats.relays for version in relay.versions}
    given = verdicts_of(events, held)
    chosen = (
        [only(given, options.lease)]
        if options.lease
        else choose(given, options.sample, random.Random(options.seed))
    )
    refused = sum(verdict.body["code"] != ACCEPTED for verdict in chosen)
    say = (lambda words: None) if options.json else print
    say(
        f"the ledger is good: {len(events)} events; checking {len(chosen)} submissions again, {refused} of them refused ones"
    )
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
        spec = spec_at_hand(client, info.spec, options.dir / "data")
        issued = {event.body["lease_id"]: event for event in events if event.type == "lease.issued"}
        for verdict in chosen:
            if stop.is_set():
                raise Stopped("stopped between two submissions")
            lease_id = verdict.body["lease_id"]
            words = check_again(client, shelf, reader, spec, verdict, issued[lease_id])
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


def verdicts_of(events: list[LedgerEvent], held: set[int]) -> list[LedgerEvent]:
    """Those that can be checked again: on work whose version can still be had. Void says nothing about the work."""
    versions = {
        event.body["lease_id"]: event.body["policy_version"]
        for event in events
        if event.type == "submission.received"
    }
    return [
        event
        for event in events
        if event.type == "verdict.given"
        and not event.body["code"].startswith("void.")
        and versions[event.body["lease_id"]] in held
    ]


def choose(given: list[LedgerEvent], sample: int, rng: random.Random) -> list[LedgerEvent]:
    """At random: refusals are few and weigh more, so up to half are of those."""
    accepted = [event for event in given if event.body["code"] == ACCEPTED]
    refused = [event for event in given if event.body["code"] != ACCEPTED]
    chosen = rng.sample(refused, min(len(refused), max(sample // 2, sample - len(accepted))))
    chosen += rng.sample(accepted, min(len(accepted), sample - len(chosen)))
    return sorted(chosen, key=lambda event: event.seq)


def only(given: list[LedgerEvent], lease_id: str) -> LedgerEvent:
    for event in given:
        if event.body["lease_id"] == lease_id:
            return event
    raise ValueError(
        f"no verdict on lease {lease_id} can be checked again: it has none, is void, or no relay holds its version any more"
    )


def spec_at_hand(client: SignedClient, spec: RunSpec, folder: Path) -> RunSpec:
    """The run's terms, its task reading the files that were fetched."""
    fetch_files(client, file_digests(spec.task), folder, deadline_s=FETCH_S)
    return spec.model_copy(update={"task": with_files_from(spec.task, folder)})


def check_again(
    client: SignedClient,
    shelf: PolicyShelf,
    reader: Reader,
    spec: RunSpec,
    verdict: LedgerEvent,
    issued: LedgerEvent,
) -> str | None:
    """What is wrong with a verdict; None if nothing is."""
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
    given = verdict.body["code"]
    if again.code != given:
        return f"{again.code}, the ledger has {given}: {again.detail}"
    if given != ACCEPTED:
        return None
    if list(again.rewards) != verdict.body["rewards"]:
        return f"rewards are {list(again.rewards)}, the ledger has {verdict.body['rewards']}"
    if again.output_tokens != verdict.body["output_tokens"]:
        return f"{again.output_tokens} output tokens, the ledger has {verdict.body['output_tokens']}"
    return None
