"""`shoal run`: starts every role of a run file on this machine, as processes that talk over loopback HTTP."""

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from shoal.cli.commands.admin import send_order
from shoal.cli.commands.diloco import check_peer_join
from shoal.cli.commands.watch import write_report
from shoal.cli.public_api import PublicApi
from shoal.cli.run.addresses import (
    COORDINATOR_PORT,
    LOOPBACK,
    RunAddresses,
    check_address,
    choose_addresses,
    join_sentences,
)
from shoal.cli.run.calibration import calibrate_here
from shoal.cli.run.changes import changes_between, check_changes, describe_changes
from shoal.cli.run.estimate import estimates
from shoal.cli.run.notices import LogFollower, NoticeFiles
from shoal.cli.run.overrides import overridden_text
from shoal.cli.run.preflight import problems_found, resources_needed, try_run
from shoal.cli.run.runfile import RunFile, derived_numbers, load_run_file
from shoal.cli.run.summary import LocalWorker, RunVerdict, format_sample, judge_run, print_summary
from shoal.cli.run.supervise import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    RunFailed,
    Supervisor,
    last_line,
    lock_folder,
)
from shoal.cli.ui.plot import plot_rewards
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import check_device
from shoal.cli.ui.view import View, duration, make_view, print_plainly
from shoal.files import replace_link, write_bytes_atomically
from shoal.net.http_client import Unreachable
from shoal.net.waiting import Stopped
from shoal.wire.delegation import write_relay_key
from shoal.wire.keys import Key
from shoal.wire.messages import AdminOrder, History, Stats
from shoal.wire.page_data import Snapshot

MARKER = "run.toml"
"""Copy of the run file. A folder that has it is a run's folder."""
SAY_AFTER_S = 10.0
"""Seconds after which a coordinator that has not started yet is mentioned."""
GUESTS_S = 20.0
"""Most seconds that a finished run keeps its coordinator up for workers from other machines."""
TRAINER_END_S = 5.0
"""Most seconds that a finished run waits for its trainer to end by itself."""
OWN_STAKE = 1000
"""Number of leases that each of the run's own workers can hold with its stake."""
POLL_S = 0.5
ANSWER_S = 2.0
"""Timeout of a request. Short, so that Ctrl-C does not wait for a coordinator that hangs."""
SILENCE_S = 60.0
"""Seconds without an answer from the coordinator after which the run fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """A run on this machine: its file, its folder, and the options it was started with."""

    file: RunFile
    source: Path
    folder: Path
    resume: bool
    fresh: bool
    device: str
    peer_join: tuple[str, ...] = ()
    """Addresses of other sites, for a run with [trainer.diloco]."""
    host: str = LOOPBACK
    port: int | None = None
    """The coordinator's port; None takes the one of the last start, COORDINATOR_PORT, or another free one."""
    overrides: tuple[str, ...] = ()
    """Keys of the run file that --set replaces."""

    @property
    def keys(self) -> Path:
        """The folder to which the coordinator writes the keys of the roles."""
        return self.folder / "coordinator" / "keys"


# -- the command --------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, stop: threading.Event) -> int:
    """Runs `shoal run`, or only checks the file for --dry-run."""
    if options.json and not options.dry_run:
        raise ValueError(
            "--json is for --dry-run; a run writes metrics.jsonl, and `shoal top URL --json` prints its state"
        )
    file = load_run_file(options.file, overrides=options.set)
    check_peer_join(options.peer_join, file.trainer.diloco)
    if options.device != "cpu":
        check_device(options.device)
    warnings: list[str] = []
    if not options.resume:  # with --fresh, before anything is deleted
        with progress("trying the model and the task"):
            warnings = try_run(file, options.file, starts=not options.dry_run, device=options.device)
    if options.dry_run:
        return _print_numbers(options, file, warnings)
    for warning in warnings:
        print(f"shoal: warning: {warning}", file=sys.stderr)
    local_run = LocalRun(
        file=file,
        source=options.file,
        folder=options.dir or default_folder(file),
        resume=options.resume,
        fresh=options.fresh,
        device=options.device,
        peer_join=tuple(options.peer_join),
        host=options.host,
        port=options.port,
        overrides=tuple(options.set),
    )
    return run_local(local_run, stop, Console(highlight=False))


def _print_numbers(options: argparse.Namespace, file: RunFile, warnings: list[str]) -> int:
    numbers = problems_found(file) | derived_numbers(file) | estimates(file) | resources_needed(file)
    if options.json:
        print(json.dumps(numbers | {"warnings": warnings}, default=str))
        return EXIT_OK
    print(f"{options.file}: good")
    for warning in warnings:
        print(f"  WARNING: {warning}")
    for name, value in numbers.items():
        print(f"  {name:<38} {value}")
    return EXIT_OK


def run_local(run: LocalRun, stop: threading.Event, console: Console) -> int:
    """Locks the run's folder, runs all roles until the run is finished, and prints the summary."""
    check_folder(run)
    # Closed to other users: the folder has the data set, and programs may run as another user (sandbox level `user`).
    run.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_folder(run.folder, stop) as lock, contextlib.ExitStack() as held:
        check_folder(run)  # again: another run may have used the folder until now
        check_address(run.host, run.port)  # with --fresh, before anything is deleted
        prepare_folder(run, console)
        replace_link(run.folder / "model", Path("trainer") / "newest")
        addresses = choose_addresses(run.folder, run.host, run.port, relays=run.file.local.relays, held=held)
        roles = RunningRoles(run, addresses, Supervisor(run.folder, lock), stop, console)
        try:
            noise = calibrate_here(
                run.file,
                run.source,
                roles.supervisor,
                device=run.device,
                overrides=run.overrides,
                stop=stop,
                console=console,
            )
            roles.start(noise)
            roles.watch()
        except Stopped:
            pass
        finally:
            roles.supervisor.stop()
        if roles.stats is None or roles.history is None:
            print_plainly(console, f"stopped; continue with: {resume_command(run)}")
            return EXIT_INTERRUPTED
        return finish(run, roles.stats, roles.history, roles.workers, console)


def finish(
    run: LocalRun, stats: Stats, history: History, workers: Mapping[str, LocalWorker], console: Console
) -> int:
    """Prints the summary of a finished run, writes plot and report, and returns the exit code."""
    verdict = judge_run(run.file, stats, workers)
    plotted = plot_rewards(
        history,
        run.folder / "reward.png",
        f"{run.file.run.name}: {run.file.run.model} on {', '.join(task.title for task in run.file.task)}",
    )
    names = {node: worker.display_name for node, worker in workers.items()}
    print_summary(run.file, stats, verdict, run.folder, plotted=plotted, names=names, console=console)
    if written := write_report(run.folder, run.folder / "report.html"):
        print_plainly(console, f"  report            {written}: this run's page as one file, to share")
    return EXIT_OK if verdict in (RunVerdict.GOOD, RunVerdict.FINISHED) else EXIT_FAILED


def resume_command(run: LocalRun) -> str:
    """Returns the command that continues the run."""
    words = ["shoal", "run", str(run.source)]
    if run.folder != default_folder(run.file):
        words += ["--dir", str(run.folder)]
    if run.device != "cpu":
        words += ["--device", run.device]
    if run.host != LOOPBACK:
        words += ["--host", run.host]
    if run.port is not None:
        words += ["--port", str(run.port)]
    for override in run.overrides:
        words += ["--set", override]
    for address in run.peer_join:
        words += ["--peer-join", address]
    return shlex.join([*words, "--resume"])


# -- the folder ---------------------------------------------------------------------------------------------


def default_folder(file: RunFile) -> Path:
    return Path("out") / file.run.name


def check_folder(run: LocalRun) -> None:
    """Raises ValueError if starting would delete or mix up files of another run. Changes nothing."""
    marker = run.folder / MARKER
    if run.resume:
        if not marker.exists():
            raise ValueError(f"nothing to resume: {run.folder} holds no run; start it without --resume")
        check_changes(changes_between(marker, run.source, run.overrides), marker, run.source)
    elif run.folder.exists() and any(run.folder.iterdir()):
        if not marker.exists():
            raise ValueError(
                f"{run.folder} holds files that are not a run's, so they are not deleted; choose another --dir"
            )
        if not run.fresh:
            raise ValueError(
                f"{run.folder} holds an earlier run; continue it with --resume, or delete it and start again with --fresh"
            )


def prepare_folder(run: LocalRun, console: Console) -> None:
    """Empties the folder of a new run, and copies the run file into it. Says what is deleted and what has changed."""
    marker = run.folder / MARKER
    if run.resume:
        if changes := changes_between(marker, run.source, run.overrides):
            print_plainly(
                console, f"changed since the run began: {describe_changes(changes)}; the ledger records it"
            )
    else:
        if marker.exists():
            age = duration(time.time() - marker.stat().st_mtime)
            print_plainly(console, f"--fresh: deleting the run in {run.folder}, which was started {age} ago")
        # The folder itself stays, because its descriptor holds the lock.
        for path in run.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    text = overridden_text(run.source, run.overrides)
    write_bytes_atomically(marker, text.encode(), durable=False)


# -- the roles ----------------------------------------------------------------------------------------------


def commands_of_roles(run: LocalRun, addresses: RunAddresses) -> list[tuple[str, list[str]]]:
    """Returns name and arguments of every role, as an operator would type them."""
    file, local = run.file, run.file.local
    client = ["--coordinator", addresses.url, "--deadline-s", str(local.deadline_s)]
    device = ["--device", run.device]
    threads = [*device, "--threads", str(local.worker_threads)]
    coordinator_port, origin_port, *relay_ports = addresses.ports
    file_words = [str(run.source), *(word for override in run.overrides for word in ("--set", override))]
    commands = [
        ("coordinator", ["coordinator", *file_words, *addresses.options(coordinator_port)]),
        (
            "trainer",
            ["trainer", *file_words, *client, "--keys", str(run.keys), *addresses.options(origin_port)]
            + [*device, "--threads", str(local.trainer_threads)]
            + [word for address in run.peer_join for word in ("--peer-join", address)],
        ),
    ]
    for index, port in enumerate(relay_ports):
        key = run.folder / "relay-keys" / str(index + 1) / "relay.key"
        relay = ["relay", *client, "--key", str(key), *addresses.options(port)]
        relay += ["--private"] if file.shardcast.private else []
        commands.append((f"relay-{index + 1}", relay))
    for index in range(local.validators):
        validator = ["validator", *client, "--key", str(run.keys / "validator.key"), *threads]
        commands.append((f"validator-{index + 1}", validator))
    for name, lie in local_workers(file):
        worker = ["worker", *client, "--max-rows", str(local.max_rows), "--engine", local.engine, *threads]
        commands.append((name, worker + (["--lie", lie] if lie else [])))
    return [(name, [*arguments, "--dir", str(run.folder / name)]) for name, arguments in commands]


def local_workers(file: RunFile) -> list[LocalWorker]:
    """Returns every worker that the run starts, the lying ones last."""
    lies: list[str | None] = [None] * file.local.workers + list(file.local.lies)
    return [LocalWorker(f"worker-{index + 1}", lie) for index, lie in enumerate(lies)]


def workers_by_node(run: LocalRun) -> dict[str, LocalWorker]:
    """Returns the workers that have made their key so far, by node id."""
    found = {}
    for worker in local_workers(run.file):
        path = run.folder / worker.name / "node.key"
        if path.exists():
            found[Key.load(path).public] = worker
    return found


@dataclass
class RunningRoles:
    """The roles of a run while it runs. `stats` and `history` are set when the run is finished."""

    run: LocalRun
    addresses: RunAddresses
    supervisor: Supervisor
    stop: threading.Event
    console: Console
    stats: Stats | None = None
    history: History | None = None
    workers: dict[str, LocalWorker] = field(default_factory=dict)
    """The workers that have made their key so far, by node id."""
    names: dict[str, str] = field(default_factory=dict)
    """Display names by node id."""

    def start(self, noise: Path | None) -> None:
        """Starts the coordinator, which writes the keys, then all other roles. `noise` is the calibration if the run measured one."""
        (name, coordinator), *others = commands_of_roles(self.run, self.addresses)
        self.supervisor.start(name, coordinator + (["--calibration", str(noise)] if noise else []))
        self._wait_until_up()
        operator = Key.load(self.run.keys / "relay.key")
        for number, port in enumerate(self.addresses.ports[2:], start=1):
            key_folder = self.run.folder / "relay-keys" / str(number)
            write_relay_key(operator, self.addresses.url_of(port), key_folder)
        self._admit_own_workers()
        for name, arguments in others:
            self.supervisor.start(name, arguments)

    def _wait_until_up(self) -> None:
        """Waits until the coordinator answers and has written its keys. Raises RunFailed after local.deadline_s."""
        began_s, said = time.monotonic(), False
        with PublicApi(self.addresses.url, timeout_s=ANSWER_S) as api:
            while True:
                self.supervisor.check()
                with contextlib.suppress(Unreachable):
                    api.get("/healthz")
                    if (self.run.keys / "relay.key").exists():
                        return
                waited_s = time.monotonic() - began_s
                if waited_s > SAY_AFTER_S and not said:
                    said = True
                    print_plainly(self.console, "the coordinator is still starting; the machine may be busy")
                if waited_s > self.run.file.local.deadline_s:
                    log_path = self.supervisor.children["coordinator"].log_path
                    raise RunFailed(
                        f"the coordinator at {api.url} did not start within {waited_s:.0f} s (local.deadline_s); the last line of "
                        f"its log, {log_path}: {last_line(log_path)}"
                    )
                if self.stop.wait(0.1):
                    raise Stopped("stopped while waiting for the coordinator")

    def _admit_own_workers(self) -> None:
        """Lets the run's own workers enrol, as an operator would: by `allow`, or by a stake that their leases never use up."""
        coordinator = self.run.file.coordinator
        if coordinator.admission not in ("invite", "allow", "stake"):
            return
        by_stake = coordinator.admission == "stake"
        admin = Key.load(self.run.keys / "admin.key")
        for worker in local_workers(self.run.file):
            path = self.run.folder / worker.name / "node.key"
            if path.exists():
                continue  # admitted when the run began
            path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed once it is admitted, so that an interrupted start is repeated.
            new = path.with_suffix(".new")
            amount = OWN_STAKE * coordinator.stake_per_lease if by_stake else 0
            subject = Key.load_or_create(new).public
            order = AdminOrder(reason="a worker of shoal run", subject=subject, amount=amount)
            send_order(self.addresses.url, admin, "stake" if by_stake else "allow", order, self.stop)
            new.rename(path)

    def watch(self) -> None:
        """Shows the run until it is finished or stopped."""
        view, addresses, file = make_view(self.names, self.console), self.addresses, self.run.file
        try:
            view.say(f"run {file.run.name}: coordinator {addresses.url}, files in {self.run.folder}")
            if self.run.port is None and addresses.ports[0] != COORDINATOR_PORT:
                view.say(
                    f"port {COORDINATOR_PORT} is in use, so the coordinator has port {addresses.ports[0]} (--port chooses one)"
                )
            view.say(f"watch it in a browser: {addresses.outside_url}/")
            for sentence in join_sentences(addresses, file.coordinator.admission):
                view.say(sentence)
            self._poll_until_finished(view)
            if self.stats is not None and (guests := live_guests(self.stats, self.workers)):
                # Otherwise they would wait for a coordinator that is gone, without knowing that the run is finished.
                view.say(f"finished; waiting for the next heartbeat of {guests} workers from other machines")
                self.stop.wait(min(GUESTS_S, file.coordinator.heartbeat_s + 1.0))
        finally:
            view.close()

    def _poll_until_finished(self, view: View) -> None:
        """Polls the coordinator, restarts roles that died, and sets `stats` and `history` when the run is finished."""
        said, evaluated = 0, 0
        heard_s = time.monotonic()
        follower = LogFollower(self.run.folder / "logs")
        notices = NoticeFiles(self.run.folder / "coordinator")
        with PublicApi(self.addresses.url, timeout_s=ANSWER_S) as api:
            while not self.stop.wait(POLL_S):
                self.supervisor.check()
                self.workers = workers_by_node(self.run)
                self.names.update({node: worker.display_name for node, worker in self.workers.items()})
                notices.set_names(self.names)
                for sentence in [*self.supervisor.events[said:], *follower.new_warnings()]:
                    view.say(sentence)
                    notices.add(sentence)
                said = len(self.supervisor.events)
                try:
                    stats = api.read("/v1/stats", Stats)
                    history = api.read("/v1/history", History) if stats.finished else None
                except Unreachable as error:
                    if time.monotonic() - heard_s > SILENCE_S:
                        raise RunFailed(
                            f"the coordinator has not answered for {SILENCE_S:.0f} s: {error}; "
                            f"read its log, {self.supervisor.children['coordinator'].log_path}"
                        ) from None
                    continue
                heard_s = time.monotonic()
                view.show(follower.with_progress(stats))
                evaluated = shown_answer(api, stats, evaluated, view)
                if history is not None:
                    self.stats, self.history = stats, history
                    # The trainer writes the last evaluation to its metrics.
                    self.supervisor.wait_for("trainer", TRAINER_END_S)
                    return
                check_workers(self.supervisor)


def shown_answer(api: PublicApi, stats: Stats, evaluated: int, view: View) -> int:
    """After each held-out evaluation, says the newest checked answer beside the right one. Returns the number of evaluations."""
    done = sum(one.complete for one in stats.evaluations)
    if done == evaluated:
        return evaluated
    with contextlib.suppress(Unreachable):
        samples = api.read("/v1/page", Snapshot).samples
        if samples:
            view.say(format_sample(max(samples, key=lambda one: one.given_at_s)))
    return done


def live_guests(stats: Stats, workers: Mapping[str, LocalWorker]) -> int:
    """Returns the number of live workers that this run did not start."""
    return sum(node.liveness == "live" and node.node not in workers for node in stats.nodes)


def check_workers(supervisor: Supervisor) -> None:
    """Raises RunFailed if every worker has ended: the run would otherwise wait until a role's deadline."""
    workers = [child for name, child in supervisor.children.items() if name.startswith("worker-")]
    if all(child.ended is not None for child in workers):
        words = "; ".join(f"{child.name}: {last_line(child.log_path)}" for child in workers)
        raise RunFailed(f"every worker has left before the run was finished: {words}")
