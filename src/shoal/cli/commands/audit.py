"""`shoal ledger verify` recomputes a run's ledger; `shoal audit` repeats a sample of its verdicts with the validator's own code.

Both take a coordinator's URL or a run's folder on this machine. Of a URL, the audit needs validator.key, because submitted files are
not public, and can only check work whose version a relay still holds. A folder has the weights of all versions in the trainer's archive.
"""

import argparse
import json
import random
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from shoal.cli.public_api import PublicApi
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import is_url
from shoal.net.http_client import Refused, SignedClient, fetch_files
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.ledger_replay import ReplayedLedger, replay, seed_of
from shoal.tasks import make_task
from shoal.tasks.datasets.file_options import run_digests, with_files_from
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.telemetry import Log, printable
from shoal.wire.codes import ACCEPTED, CorruptData, Rejected
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_ledger
from shoal.wire.messages import Claim, Info, Stats
from shoal.wire.record import Sealed, seal
from shoal.wire.run_spec import RunSpec

if TYPE_CHECKING:  # the validator needs torch, which `shoal ledger verify` must do without
    from shoal.swarm.validator.prefill import LoadedPolicy
    from shoal.swarm.validator.table_reader import TableReader

PAGE_EVENTS = 500
FETCH_S = 120.0
"""Seconds to try for a version's weights or a task's files."""
GONE = "no relay holds its version any more"
"""Why a verdict cannot be repeated. A run's folder has all versions; a URL has those that relays keep."""
DELETED = "the coordinator deleted its rejected file"
_NOT_REPEATABLE = (GONE, DELETED)
_UNCHECKED = "cannot be checked: "
"""Begins a result that says nothing against the ledger: this machine or the coordinator cannot repeat the verdict."""


# -- shoal ledger verify ------------------------------------------------------------------------------------


class ShownLedger(NamedTuple):
    """A ledger and what its coordinator shows of it."""

    run_key: str
    shown: Stats
    head: Sealed[LedgerHead]
    events: list[LedgerEvent]


def verify(options: argparse.Namespace, stop: threading.Event) -> int:
    """Recomputes the ledger's hashes and balances, and compares them with the signed head and the public tables."""
    try:
        run_key, shown, head, events = (
            _ledger_of_url(options.run, stop) if is_url(options.run) else _ledger_of_folder(Path(options.run))
        )
        with progress(f"verifying {len(events):,} events"):
            count = verify_ledger(events, head, run_key)
            books = replay(events[: shown.ledger_seq])
            compare(books, shown)
    except (CorruptData, Rejected) as error:
        reason = {"good": False, "reason": error.detail}
        print(json.dumps(reason) if options.json else f"NOT GOOD: {printable(error.detail)}")
        return EXIT_FAILED
    if options.json:
        counts = {"events": count, "head": head.body.hash, "run_key": run_key, "nodes": len(books.nodes)}
        print(json.dumps({"good": True, **counts, "leases": len(books.leases)}))
        return EXIT_OK
    print(f"good: {count} events, head {head.body.hash[:16]}, signed by run key {run_key[:16]}")
    print(
        f"recomputed {len(books.nodes)} nodes and {len(books.leases)} leases from the events; trust and credit of all "
        f"{len(shown.nodes)} nodes shown by the coordinator agree"
    )
    return EXIT_OK


def _ledger_of_url(url: str, stop: threading.Event) -> ShownLedger:
    with PublicApi(url) as api:
        run_key = api.read("/v1/info", Info).run_key
        # Before the head, so that the head covers every event that the tables follow from.
        shown = Stats.parse(api.get("/v1/stats"))
        return ShownLedger(run_key, shown, *_fetch_events(api, stop))


def _ledger_of_folder(folder: Path) -> ShownLedger:
    """Reads the tables, and signs the head as the coordinator would: the folder holds the run's key."""
    with RunFolder(folder) as run:
        shown, events = run.stats(), list(run.events())
        if not events:
            raise CorruptData(f"{folder} has no ledger event")
        last = events[-1]
        head = LedgerHead(run=run.spec.run, seq=last.seq, hash=last.hash, time_s=last.time_s)
        return ShownLedger(run.run_key, shown, seal(head, run.key()), events)


def fetch_ledger(api: PublicApi, run_key: str, stop: threading.Event) -> list[LedgerEvent]:
    """Returns every event up to the signed head. Raises CorruptData if they do not verify."""
    head, events = _fetch_events(api, stop)
    verify_ledger(events, head, run_key)
    return events


def _fetch_events(api: PublicApi, stop: threading.Event) -> tuple[Sealed[LedgerHead], list[LedgerEvent]]:
    """Returns the signed head and every event up to it."""
    head = Sealed[LedgerHead].parse(api.get("/v1/ledger/head"))
    events: list[LedgerEvent] = []
    with progress("events fetched", head.body.seq) as advance:
        for event in read_events(api, 1, head.body.seq, stop):
            events.append(event)
            advance(1)
    return head, events


def compare(books: ReplayedLedger, shown: Stats) -> None:
    """Raises CorruptData with the first node whose public figures differ from the ledger's."""
    for view in shown.nodes:
        if view.node not in books.nodes:
            raise CorruptData(f"node {view.node[:16]} is shown, but never enrolled")
        node, balance = books.nodes[view.node], books.balance(view.node, shown.server_time_s)
        recomputed = {
            "trust": node.standing.trust.value,
            "accepted": node.accepted,
            "rejected": node.standing.rejected,
            "void": node.void,
            "credit": balance.final + balance.held,
            "credit_held": balance.held,
        }
        for name, expected in recomputed.items():
            if getattr(view, name) != expected:
                raise CorruptData(
                    f"node {view.node[:16]}: {name} is shown as {getattr(view, name)}, the ledger gives {expected}",
                )


def read_events(api: PublicApi, seq: int, last_seq: int, stop: threading.Event) -> Iterator[LedgerEvent]:
    """Yields the events from number `seq` to `last_seq`. Their hashes are not checked."""
    while seq <= last_seq:
        if stop.is_set():
            raise Stopped(f"stopped at event {seq} of {last_seq}")
        events = _parse_page(api.get(f"/v1/ledger?from_seq={seq}&limit={PAGE_EVENTS}"), seq)
        if not events:
            raise CorruptData(f"the ledger ends before event {seq}; its head says {last_seq}")
        yield from events[: last_seq - seq + 1]
        seq += len(events)


def _parse_page(data: bytes, seq: int) -> list[LedgerEvent]:
    try:
        return [LedgerEvent.model_validate(event) for event in json.loads(data)]
    except (ValidationError, ValueError, TypeError):
        raise CorruptData(f"the page from event {seq} on holds no ledger events") from None


# -- shoal audit --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSource:
    """What an audit reads, of a URL or a folder."""

    spec: RunSpec
    events: list[LedgerEvent]
    held: set[int]
    """Versions whose weights can be had."""
    claim: Callable[[str], Claim]
    """Returns the submission on a lease."""
    read_object: Callable[[str], bytes]
    """Returns a submitted file; raises ValueError if it is not the one that was submitted."""
    policy: Callable[[Claim], "LoadedPolicy | None"]
    """Returns the version that a submission names, None if no relay holds it any more; raises CannotCheck if it cannot be loaded."""


def audit(options: argparse.Namespace, stop: threading.Event) -> int:
    """Repeats verdicts and compares each with the one in the ledger. Fails if none could be repeated."""
    from shoal.swarm.validator.table_reader import TableReader

    opened = _audit_url(options, stop) if is_url(options.run) else _audit_folder(options)
    with opened as source, TableReader() as reader:
        events, books = source.events, replay(source.events)
        given = repeatable_verdicts(events, source.held)
        chosen = (
            [verdict_on(given, options.lease)]
            if options.lease
            else choose(given, options.sample, random.Random(options.seed))
        )
        refused = sum(verdict.body["code"] != ACCEPTED for verdict in chosen)
        if not options.json:
            print(
                f"the ledger is good: {len(events)} events; verdicts to repeat: {len(chosen)}, refusals among them: {refused}"
            )
        found: dict[str, str | None] = {}
        issued = {event.body["lease_id"]: event for event in events if event.type == "lease.issued"}
        for verdict in chosen:
            if stop.is_set():
                raise Stopped("stopped between two verdicts")
            lease_id = verdict.body["lease_id"]
            found[lease_id] = repeat_verdict(source, reader, verdict, issued[lease_id])
            if not options.json:
                print(printable(f"  {lease_id}: {describe(found[lease_id], seed_of(books, lease_id))}"))
    return _print_result(options, len(events), found)


@contextmanager
def _audit_url(options: argparse.Namespace, stop: threading.Event) -> Iterator[AuditSource]:
    from shoal.model.load_model import DTYPES, load_causal
    from shoal.swarm.validator.loaded_versions import LoadedVersions

    if options.key is None or options.dir is None:
        raise ValueError(
            "an audit of a URL needs --key validator.key, from the coordinator, and --dir, a folder for the versions that are "
            "fetched; a run's folder on this machine needs neither"
        )
    log = Log("audit")
    key = Key.load(options.key)
    with PublicApi(options.run) as api:
        info, stats = api.read("/v1/info", Info), api.read("/v1/stats", Stats)
        events = fetch_ledger(api, info.run_key, stop)
    with closing(SignedClient(options.run, key, log=log, stop=stop)) as client:
        versions = LoadedVersions(
            options.dir / "policies",
            client,
            run_key=info.run_key,
            load=partial(load_causal, dtype=DTYPES[info.spec.compute_dtype], device="cpu"),
            max_loaded=2,
            fetch_s=FETCH_S,
            log=log,
        )
        yield AuditSource(
            spec=with_fetched_files(client, info.spec, options.dir / "data"),
            events=events,
            held={version for relay in stats.relays for version in relay.versions},
            claim=lambda lease_id: client.call("GET", f"/v1/checks/{lease_id}", None, Claim),
            read_object=client.fetch_object,
            policy=lambda claim: (
                versions.get(claim.policy_version, claim.lease, claim.relays, claim.origin)
                if claim.relays
                else None
            ),
        )


@contextmanager
def _audit_folder(options: argparse.Namespace) -> Iterator[AuditSource]:
    with ExitStack() as stack:
        run = stack.enter_context(RunFolder(Path(options.run)))
        if run.config.store:
            raise ValueError(
                f"the submitted files of this run are in {run.config.store}; audit its coordinator's URL instead"
            )
        ledger = _ledger_of_folder(run.folder)
        verify_ledger(ledger.events, ledger.head, ledger.run_key)
        work = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield AuditSource(
            spec=run.local_spec(),
            events=ledger.events,
            held=set(run.archive.versions()),
            claim=run.claim,
            read_object=run.read_object,
            policy=partial(_archived_policy, run, work),
        )


def _archived_policy(run: RunFolder, work: Path, claim: Claim) -> "LoadedPolicy":
    """Restores a version from the trainer's archive and loads it. Raises CannotCheck if it is not the leased one."""
    from shoal.model.load_model import DTYPES, load_causal
    from shoal.model.tokenizer import load_tokenizer
    from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy

    version = claim.policy_version
    folder = work / f"v{version}"
    try:
        manifest = run.restore(version, folder)
        leased = {policy.version: policy.weights_digest for policy in claim.lease.policies}
        if manifest.weights_digest != leased.get(version):
            raise ValueError(f"version {version} in the archive has other weights than the lease names")
        model = load_causal(folder, dtype=DTYPES[run.spec.compute_dtype], device="cpu")
        return LoadedPolicy(version, model, load_tokenizer(folder))
    except (CorruptData, ValueError, OSError) as error:
        raise CannotCheck(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print_result(options: argparse.Namespace, num_events: int, found: dict[str, str | None]) -> int:
    good = sum(difference is None for difference in found.values())
    reasons = Counter(difference for difference in found.values() if difference in _NOT_REPEATABLE)
    gone = reasons.total()
    if good + gone == len(found) and not good and not options.json:
        why = (
            f"because {' or '.join(map(str, reasons))}"
            if gone
            else "because the run has no verdict on a version that can be had"
        )
        print(f"NOTHING WAS CHECKED, {why}")
    if options.json:
        counts = {"events": num_events, "checked": len(found), "good": good, "gone": gone}
        print(json.dumps({**counts, "found": found}))
    else:
        missing = "".join(
            f"; {count} could not be repeated because {reason}" for reason, count in reasons.items()
        )
        print(f"verdicts that agree with the ledger: {good} of {len(found)}{missing}")
    return EXIT_OK if good and good + gone == len(found) else EXIT_FAILED


def describe(difference: str | None, seed: str | None) -> str:
    """Returns the result of one repeated verdict in words. `seed` is the lease's revealed seed, if it is revealed."""
    if difference in _NOT_REPEATABLE:
        return f"{_UNCHECKED}{difference}"
    if difference is not None:
        return difference if difference.startswith(_UNCHECKED) else f"NOT GOOD: {difference}"
    if seed is None:
        return "agrees with the ledger; its seed is not revealed yet"
    return "agrees with the ledger; its seed matches the commitment"


def repeatable_verdicts(events: list[LedgerEvent], held: set[int]) -> list[LedgerEvent]:
    """Returns the verdicts on work of the versions in `held`, without void ones, which say nothing about the work."""
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
    """Returns a random sample, up to half of it refusals: they are rare, and a wrong one harms a node."""
    accepted = [event for event in given if event.body["code"] == ACCEPTED]
    refused = [event for event in given if event.body["code"] != ACCEPTED]
    chosen = rng.sample(refused, min(len(refused), max(sample // 2, sample - len(accepted))))
    chosen += rng.sample(accepted, min(len(accepted), sample - len(chosen)))
    return sorted(chosen, key=lambda event: event.seq)


def verdict_on(given: list[LedgerEvent], lease_id: str) -> LedgerEvent:
    for event in given:
        if event.body["lease_id"] == lease_id:
            return event
    raise ValueError(
        f"the verdict on lease {lease_id} cannot be repeated: there is none, it is void, or no relay holds its version any more"
    )


def with_fetched_files(client: SignedClient, spec: RunSpec, folder: Path) -> RunSpec:
    """Fetches the files of all tasks and returns the run's terms with tasks that read them."""
    fetch_files(client, run_digests(spec), folder, deadline_s=FETCH_S)
    return spec.with_tasks(lambda task: with_files_from(task, folder))


def repeat_verdict(
    source: AuditSource, reader: "TableReader", verdict: LedgerEvent, issued: LedgerEvent
) -> str | None:
    """Judges a submission again; returns how the result differs from the ledger, or None if it agrees."""
    from shoal.swarm.validator.judge import judge
    from shoal.swarm.validator.prefill import CannotCheck

    try:
        claim = source.claim(verdict.body["lease_id"])
    except (Rejected, Refused) as error:
        # Only rejected files are deleted: an accepted one that is missing is an error.
        if error.code != "request.not_found" or verdict.body["code"] == ACCEPTED:
            raise
        return DELETED
    if claim.lease.digest() != issued.body.get("lease_digest"):
        return "the lease does not have the digest that the ledger has"
    try:
        data = source.read_object(claim.sha256)
    except ValueError:
        return f"the stored file is not {claim.sha256}"
    # The calibration may have been repeated since.
    spec = source.spec.as_calibrated_at(
        int(verdict.body["evidence"].get("calibrated_at", claim.policy_version))
    )
    try:
        policy = source.policy(claim)
        if policy is None:
            return GONE
        again = judge(data, claim, spec, policy, reader=reader, control_seed=secrets.randbits(64))
    except CannotCheck as error:
        return f"{_UNCHECKED}{error}"
    return difference_between(again, verdict, tolerance=_reward_tolerance(source.spec, claim))


def _reward_tolerance(spec: RunSpec, claim: Claim) -> float:
    """Returns the mean difference that rewards may have: 0, unless a judge model computes them."""
    task = spec.find_task(claim.lease.task.title, trained=claim.lease.purpose == "train")
    made = None if task is None else make_task(task)
    return made.score_tolerance if isinstance(made, JudgedAnswers) else 0.0


def difference_between(again: Verdict, verdict: LedgerEvent, tolerance: float = 0.0) -> str | None:
    given = verdict.body["code"]
    if again.code != given:
        return f"{again.code}, the ledger has {given}: {again.detail}"
    if given != ACCEPTED:
        return None
    before = verdict.body["rewards"]
    if len(again.rewards) != len(before):
        return f"{len(again.rewards)} rewards, the ledger has {len(before)}"
    mean = sum(abs(a - b) for a, b in zip(again.rewards, before, strict=True)) / max(1, len(before))
    if mean > tolerance:
        allowed = f" (mean difference {mean:.3f}, score_tolerance is {tolerance:g})" if tolerance else ""
        return f"rewards are {list(again.rewards)}, the ledger has {before}{allowed}"
    if again.output_tokens != verdict.body["output_tokens"]:
        return f"{again.output_tokens} output tokens, the ledger has {verdict.body['output_tokens']}"
    return None
