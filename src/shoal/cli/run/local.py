"""`shoal run`: every role of a run file on this machine, as processes that talk over loopback HTTP."""

import contextlib
import itertools
import json
import random
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.console import Console

from shoal.cli.commands.report import write_report
from shoal.cli.run.runfile import RunFile
from shoal.cli.run.summary import Outcome, judge_run, print_plainly, print_summary
from shoal.cli.run.supervise import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    RunFailed,
    Supervisor,
    alone_in,
    last_words,
)
from shoal.cli.ui.plot import plot_rewards
from shoal.cli.ui.view import View, make_view
from shoal.net.waiting import Stopped
from shoal.wire.keys import Key
from shoal.wire.messages import History, Stats

HOST = "127.0.0.1"
MARKER = "run.toml"
"""A folder that holds this file is a run's folder."""
PORTS = range(20_000, 30_000)
"""Below those that systems give to outgoing connections: a role that is started again must find its port free."""
START_S = 60.0
GUESTS_S = 20.0
"""How long a finished run stays for others, at most."""
POLL_S = 0.5
ANSWER_S = 2.0
"""Short, so that Ctrl-C does not wait for a coordinator that hangs."""
SILENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """Where a run lives and how it was asked for."""

    file: RunFile
    source: Path
    folder: Path
    resume: bool
    fresh: bool
    device: str
    peer_join: tuple[str, ...] = ()
    """Other sites of a run with [trainer.diloco]."""


def check_folder(run: LocalRun) -> None:
    """Refuse, in words, what would lose or mix up somebody's files. Changes nothing."""
    held = run.folder / MARKER
    if run.resume:
        if not held.exists():
            raise ValueError(f"nothing to resume: {run.folder} holds no run; start it without --resume")
        if held.read_bytes() != run.source.read_bytes():
            raise ValueError(
                f"{run.source} differs from {held}, the file this run began with; put it back, or start anew with --fresh"
            )
    elif run.folder.exists() and any(run.folder.iterdir()):
        if not held.exists():
            raise ValueError(
                f"{run.folder} holds files, but not a run's, so they are left alone; choose another --dir"
            )
        if not run.fresh:
            raise ValueError(
                f"{run.folder} holds an earlier run; continue it with --resume, or delete it and start anew with --fresh"
            )


def prepare_folder(run: LocalRun) -> None:
    """Empty the folder of a fresh run, and note down which file the run began with."""
    if run.resume:
        return
    # The folder itself stays: we hold it.
    for path in run.folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copyfile(run.source, run.folder / MARKER)


def run_local(run: LocalRun, stop: threading.Event, console: Console) -> int:
    """Start everything, watch it to its end, stop everything, sum up."""
    check_folder(run)
    run.folder.mkdir(parents=True, exist_ok=True)
    with alone_in(run.folder, stop) as held:
        check_folder(run)  # again: it may have been another run's until now
        prepare_folder(run)
        return run_held(run, held, stop, console)


def run_held(run: LocalRun, held: int, stop: threading.Event, console: Console) -> int:
    supervisor = Supervisor(run.folder, held)
    view: View | None = None
    names: dict[str, str] = {}
    try:
        url = start_roles(run, supervisor, stop)
        view = make_view(names, console)
        view.say(f"run {run.file.run.name}: coordinator {url}, files in {run.folder}")
        view.say(f"watch it in a browser: {url}/")
        stats, history = watch(url, supervisor, view, stop, on_poll=lambda: names.update(worker_names(run)))
        if stats is not None and (guests := live_guests(stats, names)):
            # Else they would wait for a coordinator that is gone, and not know that they are done.
            view.say(f"finished; {guests} that joined from elsewhere hear of it by their next heartbeat")
            stop.wait(min(GUESTS_S, run.file.coordinator.heartbeat_s + 1.0))
    except Stopped:
        stats = history = None
    finally:
        if view is not None:
            view.close()
        supervisor.stop()
    if stats is None or history is None:
        print_plainly(console, f"stopped; continue with: {resume_command(run)}")
        return EXIT_INTERRUPTED
    outcome = judge_run(run.file, stats, names)
    plotted = plot_rewards(
        history,
        run.folder / "reward.png",
        f"{run.file.run.name}: {run.file.run.model} on {run.file.task.name}",
    )
    print_summary(run.file, stats, outcome, run.folder, plotted=plotted, names=names, console=console)
    if written := write_report(run.folder, run.folder / "report.html"):
        print_plainly(console, f"  report            {written}: this run's page in one file, to share")
    return EXIT_OK if outcome is Outcome.GOOD else EXIT_FAILED


def resume_command(run: LocalRun) -> str:
    """What to type to go on, in full."""
    words = ["shoal", "run", str(run.source)]
    if run.folder != default_folder(run.file):
        words += ["--dir", str(run.folder)]
    if run.device != "cpu":
        words += ["--device", run.device]
    for address in run.peer_join:
        words += ["--peer-join", address]
    return shlex.join([*words, "--resume"])


def default_folder(file: RunFile) -> Path:
    return Path("out") / file.run.name


def start_roles(run: LocalRun, supervisor: Supervisor, stop: threading.Event) -> str:
    """All roles, the coordinator first because its folder holds the keys; returns its URL."""
    ports = choose_ports(run.folder, 2 + run.file.local.relays)
    url = f"http://{HOST}:{ports[0]}"
    coordinator, *others = role_commands(run, url, ports)
    supervisor.start(*coordinator)
    wait_until_up(url, supervisor, run.folder / "coordinator" / "keys", stop)
    for name, arguments in others:
        supervisor.start(name, arguments)
    return url


def role_commands(run: LocalRun, url: str, ports: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Name and arguments of every role: what an operator would type, one host each."""
    file, keys, local = run.file, run.folder / "coordinator" / "keys", run.file.local
    client = ["--coordinator", url, "--deadline-s", str(local.deadline_s)]
    device = ["--device", run.device]
    threads = [*device, "--threads", str(local.worker_threads)]
    commands = [
        ("coordinator", ["coordinator", str(run.source), "--port", str(ports[0])]),
        (
            "trainer",
            ["trainer", str(run.source), *client, "--keys", str(keys), "--port", str(ports[1])]
            + [*device, "--threads", str(local.trainer_threads)]
            + [word for address in run.peer_join for word in ("--peer-join", address)],
        ),
    ]
    for index, port in enumerate(ports[2:]):
        relay = ["relay", *client, "--key", str(keys / "relay.key"), "--port", str(port)]
        relay += ["--private"] if file.shardcast.private else []
        commands.append((f"relay-{index + 1}", relay))
    for index in range(local.validators):
        validator = ["validator", *client, "--key", str(keys / "validator.key"), *threads]
        commands.append((f"validator-{index + 1}", validator))
    for name, lie in worker_roles(file):
        worker = [
            "worker",
            *client,
            "--max-rows",
            str(local.max_rows),
            "--engine",
            local.engine,
            *threads,
            *(["--lie", lie] if lie else []),
        ]
        commands.append((name, worker))
    return [(name, [*arguments, "--dir", str(run.folder / name)]) for name, arguments in commands]


def worker_roles(file: RunFile) -> list[tuple[str, str | None]]:
    """Name and lie of every worker, the liars last."""
    lies: list[str | None] = [None] * file.local.workers + list(file.local.lies)
    return [(f"worker-{index + 1}", lie) for index, lie in enumerate(lies)]


def worker_names(run: LocalRun) -> dict[str, str]:
    """What this run calls each node whose key it has made."""
    names = {}
    for name, lie in worker_roles(run.file):
        path = run.folder / name / "node.key"
        if path.exists():
            names[Key.load(path).public] = f"{name}, lies: {lie}" if lie else name
    return names


def live_guests(stats: Stats, names: Mapping[str, str]) -> int:
    """Workers that this run did not start."""
    return sum(node.liveness == "live" and node.node not in names for node in stats.nodes)


def watch(
    url: str, supervisor: Supervisor, view: View, stop: threading.Event, *, on_poll: Callable[[], None]
) -> tuple[Stats | None, History | None]:
    """Show the run until it is finished; (None, None) if somebody stopped it."""
    said = 0
    heard_s = time.monotonic()
    with httpx2.Client(base_url=url, timeout=ANSWER_S) as http:
        while not stop.wait(POLL_S):
            supervisor.check()
            on_poll()
            for event in supervisor.events[said:]:
                view.say(event)
            said = len(supervisor.events)
            try:
                stats = Stats.parse(_get(http, "/v1/stats"))
                history = History.parse(_get(http, "/v1/history")) if stats.finished else None
            except httpx2.HTTPError as error:
                if time.monotonic() - heard_s > SILENCE_S:
                    raise RunFailed(
                        f"the coordinator at {url} has not answered for {SILENCE_S:.0f} s: {error}; "
                        f"its log is {supervisor.children['coordinator'].log_path}"
                    ) from None
                continue
            heard_s = time.monotonic()
            view.show(stats)
            if history is not None:
                return stats, history
            check_workers(supervisor)
    return None, None


def _get(http: httpx2.Client, path: str) -> bytes:
    return http.get(path).raise_for_status().content


def check_workers(supervisor: Supervisor) -> None:
    """A run that nobody works for any more would wait until somebody's deadline."""
    workers = [child for name, child in supervisor.children.items() if name.startswith("worker-")]
    if all(child.ended is not None for child in workers):
        words = "; ".join(f"{child.name}: {last_words(child.log_path)}" for child in workers)
        raise RunFailed(f"every worker has left before the run was finished: {words}")


def wait_until_up(url: str, supervisor: Supervisor, keys: Path, stop: threading.Event) -> None:
    """Until the coordinator answers and its keys are written."""
    give_up_s = time.monotonic() + START_S
    while True:
        supervisor.check()
        try:
            if httpx2.get(f"{url}/healthz", timeout=ANSWER_S).is_success and (keys / "relay.key").exists():
                return
        except httpx2.HTTPError:
            pass
        if time.monotonic() > give_up_s:
            log_path = supervisor.children["coordinator"].log_path
            raise RunFailed(
                f"waited {START_S:.0f} s for the coordinator at {url}; its log, {log_path}, ends: {last_words(log_path)}"
            )
        if stop.wait(0.1):
            raise Stopped("stopped while waiting for the coordinator")


def choose_ports(folder: Path, count: int) -> list[int]:
    """The ports of the last start where they are still free: leases issued then name the relays by them."""
    path = folder / "ports.json"
    before = json.loads(path.read_text()) if path.exists() else []
    ports = free_ports(count, before)
    path.write_text(json.dumps(ports))
    return ports


def free_ports(count: int, wanted: Sequence[int] = ()) -> list[int]:
    """Ports that are free now, `wanted` ones if they are. Held together while choosing, so that they differ."""
    others = iter(random.sample(PORTS, 500))
    with contextlib.ExitStack() as held:
        found = []
        for first in [*wanted, *[None] * count][:count]:
            candidates = itertools.chain(() if first is None else (first,), others)
            port = next((port for port in candidates if _take(port, held)), None)
            if port is None:
                raise RunFailed(f"{HOST} has no free port among 500 of {PORTS}; stop what uses them")
            found.append(port)
    return found


def _take(port: int, held: contextlib.ExitStack) -> bool:
    sock = held.enter_context(socket.socket())
    # As the roles do: connections of a run just ended do not count.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
        sock.listen()
    except OSError:
        return False
    return True
