"""Measures SHARDCAST on this machine: its speed, its CPU cost, and the cost of failures.

    python -P bench/shardcast.py                              about three minutes: 500 MB, 1 and 4 clients
    python -P bench/shardcast.py --only loopback --mb 500 2000 --clients 1 4 16 --levels 1 2 --repeats 3 --minutes 25 --max-gb 40
    python -P bench/shardcast.py --only loopback --tool shoal --mb 4000 16000 --clients 1 4 --repeats 1 --minutes 2.3 --max-gb 45
                                                              4 and 16 GB; 16 GB to one client only: 48 GB with the source
    python -P bench/shardcast.py --only links                 only the scenarios on slow links

1. Loopback, in turns: ours (origin -> relay -> clients), the package `shardcast` 0.3.2 from PyPI in its own virtual environment
   (polling every 0.1 s instead of 30 s, failed downloads repeated), and nginx + curl of one file. The file is in the page cache.
   For the first two the time runs from "publish" (hash and sign, or split into shards) to "the last client has the verified
   file", through every level of relays. For nginx + curl it runs from the start of all curls to the end of the last: no relay,
   no digest, nothing to publish. So ours copies each byte once more for each level, reads it once more at the origin and
   everywhere to hash it, and writes at least two files where curl writes one. Roles are processes that run before the time starts; all
   share this machine's cores and disk. Before each run the disk is flushed, the file is read, and a process allocates memory once and
   releases it during the run. TCP has the system's settings.
2. Links of a given speed (bench/throttle.py): a chain of three; relays of 10:3:1; a relay that hangs, disconnects, corrupts.
3. Two hundred clients at once against one relay.

-P keeps this folder off the path, because this file has the name of the package it measures. What cannot run here (no nginx,
no PyPI) is left out of the table and named.
"""

import argparse
import filecmp
import importlib
import mmap
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).parent))  # last: with -P, `shardcast` is the package and not this file
from child import Child, children, obey

PACKAGE = "shardcast==0.3.2"
SEED = bytes(32)
MB = 1_000_000
NO_LIMIT = 1e6
RANDOM_BYTES = 64 * MB
MAX_TRIES = 5
MAX_FAILURES = 2
"""Failures of a tool in a cell after which it is not run again."""
AHEAD_BYTES = 128 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it yet


def usage() -> dict[str, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return {"cpu_s": cpu_s, "rss_mb": max(own.ru_maxrss, children.ru_maxrss) / 1024}


# -- roles: each a process that reports when it is ready and then reads commands from stdin ----------------------


def our_origin(options: argparse.Namespace) -> None:
    from shoal import shardcast
    from shoal.net.http_server import listen
    from shoal.wire.keys import Key

    key = Key.from_seed(SEED)
    store = shardcast.VersionStore(options.dir, run="bench", run_key=key.public)
    server = shardcast.RelayServer(store, listen("127.0.0.1", 0))
    server.start()

    def publish() -> None:
        shardcast.publish(store.path(1), run="bench", version=1, key=key, shard_bytes=options.shard_bytes)
        store.adopt(1)

    serve_commands(server.port, publish)


def our_relay(options: argparse.Namespace) -> None:
    from shoal import shardcast
    from shoal.telemetry import Log
    from shoal.wire.keys import Key

    key, stop = Key.from_seed(SEED), threading.Event()
    config = shardcast.RelayConfig(
        folder=options.dir,
        run="bench",
        run_key=key.public,
        upstreams=tuple(options.upstream),
        max_connections_per_address=2048,  # here all clients have the same address
    )
    relay = shardcast.Relay(config, key, log=Log("relay"), stop=stop)
    relay.startup()
    serve_commands(int(relay.url.rsplit(":", 1)[1]), lambda: None)


def our_client(options: argparse.Namespace) -> None:
    from shoal import shardcast
    from shoal.shardcast.client.http_source import Connections, ask_latest
    from shoal.telemetry import Log
    from shoal.wire.keys import Key

    terms: dict[str, Any] = {
        "run_key": Key.from_seed(SEED).public,
        "log": Log("client"),
        "stop": threading.Event(),
        "deadline_s": 600.0,
    }

    def one(folder: Path, took_s: list[float]) -> None:
        began_s = time.monotonic()
        sealed = None
        with Connections() as connections:
            while sealed is None:
                sealed = ask_latest(connections, options.upstream[-1], wait_s=20.0)
        shardcast.fetch_version(sealed, options.upstream, folder, **terms)
        took_s.append(time.monotonic() - began_s)

    def fetch() -> dict[str, Any]:
        took_s: list[float] = []
        folders = [options.dir / str(index) for index in range(options.copies)]
        threads = [threading.Thread(target=one, args=(folder, took_s)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"took_s": took_s}

    serve_commands(0, fetch)


def their_package() -> ModuleType:
    """Imports the rival package. This script has the same name, so an import statement would name the script to mypy."""
    return importlib.import_module("shardcast")


def their_origin(options: argparse.Namespace) -> None:
    options.dir.mkdir(parents=True)
    (options.dir / "data1.bin").write_bytes(
        bytes(MB)
    )  # clients measure the speed of a server with it when they start
    origin = their_package().OriginServer(str(options.dir), options.port)
    serve_commands(options.port, lambda: origin.broadcast(str(options.source)) and None)


def their_relay(options: argparse.Namespace) -> None:
    options.dir.mkdir(parents=True)
    (options.dir / "data1.bin").write_bytes(bytes(MB))
    their_package().MiddleNode(options.upstream, str(options.dir), options.port, check_interval=0.1)
    serve_commands(options.port, lambda: None)


def their_client(options: argparse.Namespace) -> None:
    client = their_package().ClientNode(options.upstream, str(options.dir))

    def fetch() -> None:
        while not (versions := client.list_available_versions()):
            time.sleep(0.1)
        for _ in range(MAX_TRIES):  # with many clients at once, some fail
            if client.download_version(next(iter(versions))) is not None:
                return
        raise SystemExit("the download failed")

    serve_commands(0, fetch)


def some_memory(options: argparse.Namespace) -> None:
    """Allocates memory and releases it as other processes use up what is free: free memory would go back to the host."""
    room = mmap.mmap(-1, options.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        room.madvise(mmap.MADV_HUGEPAGE)
        room.madvise(MADV_POPULATE_WRITE)
    level, given = free_memory() + AHEAD_BYTES, 0

    def give_back() -> None:
        nonlocal given
        while given < options.bytes:
            num_bytes = min(max(0, level - free_memory()) >> 21 << 21, options.bytes - given)
            if num_bytes:
                room.madvise(mmap.MADV_DONTNEED, given, num_bytes)
                given += num_bytes
            time.sleep(0.01)

    threading.Thread(target=give_back, daemon=True).start()
    time.sleep(0.05)
    serve_commands(0, lambda: None)


def free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )  # cheap: called often during the measurement


def serve_commands(port: int, work: Callable[[], Any]) -> None:
    """Runs the work on the command `go`; answers any other line with the resources used so far."""
    obey({"port": port}, lambda line: (work() if line == "go" else None) or usage())


ROLES = {
    role.__name__: role
    for role in (our_origin, our_relay, our_client, their_origin, their_relay, their_client, some_memory)
}


@contextmanager
def roles() -> Iterator[Callable[..., Child]]:
    with children(__file__, quiet=True) as start:
        yield lambda role, folder, *arguments, **named: start(role, "--dir", folder, *arguments, **named)


# -- 1. loopback ------------------------------------------------------------------------------------------


def timed(origin: Child, relays: list[Child], clients: list[Child], need_bytes: int) -> dict[str, Any]:
    """Returns the seconds from "publish" to the answer of the last client."""
    before = {child: child.ask("usage") for child in (origin, *relays, *clients)}
    with warm_memory(need_bytes):
        began_s = time.monotonic()
        for child in (*clients, origin):
            child.tell("go")
        for child in (*clients, origin):
            child.hear()
        seconds = time.monotonic() - began_s
    after = {child: child.ask("usage") for child in before}
    return {
        "seconds": seconds,
        "origin": after[origin]["cpu_s"] - before[origin]["cpu_s"],
        "relays": sum(after[one]["cpu_s"] - before[one]["cpu_s"] for one in relays),
        "clients": sum(after[one]["cpu_s"] - before[one]["cpu_s"] for one in clients),
        "rss_mb": max(one["rss_mb"] for one in after.values()),
    }


def run_ours(root: Path, source: Path, num_clients: int, options: argparse.Namespace) -> dict[str, Any]:
    version = root / "origin" / "v1"
    version.mkdir(parents=True)
    os.link(source, version / "model.safetensors")  # where the trainer writes it
    with roles() as start:
        origin = start("our_origin", root / "origin", "--shard-bytes", options.shard_bytes)
        relays, above = [], origin
        for level in range(options.levels):
            above = start("our_relay", root / f"relay{level}", "--upstream", above.url)
            relays.append(above)
        clients = [
            start("our_client", root / f"client{index}", "--upstream", above.url, wait=False)
            for index in range(num_clients)
        ]
        return timed(origin, relays, clients, options.need_bytes)


def run_theirs(root: Path, source: Path, num_clients: int, options: argparse.Namespace) -> dict[str, Any]:
    python = str(their_python(options))
    with roles() as start:
        origin = start(
            "their_origin", root / "origin", "--port", free_port(), "--source", source, python=python
        )
        relays, above = [], origin
        for level in range(options.levels):
            above = start(
                "their_relay",
                root / f"relay{level}",
                "--port",
                free_port(),
                "--upstream",
                above.url,
                python=python,
            )
            relays.append(above)
        clients = []
        for index in range(num_clients):
            # It keeps a file in its package folder while it works, so each client needs its own installation.
            own = root / f"package{index}"
            left_out = shutil.ignore_patterns("pip", "pip-*", "setuptools*", "pkg_resources")
            shutil.copytree(Path(python).parent.parent, own, symlinks=True, ignore=left_out)
            clients.append(
                start(
                    "their_client",
                    root / f"client{index}",
                    "--upstream",
                    above.url,
                    python=str(own / "bin" / "python"),
                    wait=False,
                )
            )
        return timed(origin, relays, clients, options.need_bytes)


def run_nginx(root: Path, source: Path, num_clients: int, options: argparse.Namespace) -> dict[str, Any]:
    root.mkdir(parents=True)
    (root / "files").mkdir()
    os.link(source, root / "files" / "model")
    port = free_port()
    temp = "".join(
        f"{kind}_temp_path {root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.getuid() == 0 else ""
    (root / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {root}/pid; error_log {root}/log; {user} events {{}}"
        f"http {{ access_log off; sendfile on; tcp_nopush on; {temp}"
        f"server {{ listen 127.0.0.1:{port}; root {root}/files; }} }}"
    )
    binary = nginx_binary()
    assert binary is not None, "nginx is not installed"
    nginx = subprocess.Popen([binary, "-c", root / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        with warm_memory(options.need_bytes):
            before_s, began_s = usage()["cpu_s"], time.monotonic()
            curls = [
                subprocess.Popen(
                    ["curl", "-sf", "-o", root / f"got{index}", f"http://127.0.0.1:{port}/model"]
                )
                for index in range(num_clients)
            ]
            if any(curl.wait() for curl in curls):
                raise RuntimeError("curl failed")
            seconds, clients = time.monotonic() - began_s, usage()["cpu_s"] - before_s
        ticks = (Path("/proc") / str(nginx.pid) / "stat").read_text().rsplit(")", 1)[1].split()
        served = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        return {"seconds": seconds, "origin": served, "relays": 0.0, "clients": clients, "rss_mb": 0.0}
    finally:
        nginx.terminate()
        nginx.wait()


TOOLS: dict[str, Any] = {"shoal": run_ours, PACKAGE: run_theirs, "nginx + curl": run_nginx}


Cell = tuple[int, int, int]
"""(Megabytes, levels of relays, clients)."""
Runs = dict[str, dict[int, dict[str, Any]]]
"""Results by tool, then by round."""


class OutOfTime(Exception):
    """The time of --minutes or --run-s is over."""


def compare(root: Path, options: argparse.Namespace) -> None:
    late_s = time.monotonic() + 60 * options.minutes
    tools = {name: run for name, run in TOOLS.items() if not options.tool or name in options.tool}
    for name, there, missing in (
        (PACKAGE, lambda: their_python(options), f"pip install {PACKAGE} failed"),
        ("nginx + curl", nginx_binary, "nginx is not installed"),
    ):
        if name in tools and not there():
            del tools[name]
            print(f"left out: {name}: {missing}")
    cells = [
        (mb, levels, clients) for mb in options.mb for clients in options.clients for levels in options.levels
    ]
    comparison = Comparison(root, tools, cells, options, late_s=late_s)
    with ExitStack() as stack:
        stack.callback(comparison.show)  # also after an interruption
        with suppress(OutOfTime):
            comparison.run()


class Comparison:
    """Runs every tool once in each cell, one after the other, and repeats all of it."""

    def __init__(
        self,
        root: Path,
        tools: dict[str, Any],
        cells: list[Cell],
        options: argparse.Namespace,
        *,
        late_s: float,
    ) -> None:
        self._root, self._tools, self._cells, self._options = root, tools, cells, options
        self._found: dict[Cell, Runs] = {cell: {name: {} for name in tools} for cell in cells}
        self._why_not: dict[tuple[Cell, str], str] = {}
        self._failed: defaultdict[tuple[Cell, str], list[str]] = defaultdict(list)
        self._late_s = late_s

    def run(self) -> None:
        signal.signal(signal.SIGALRM, _out_of_time)
        # Small files twice before large ones once, because large ones may use up the remaining time.
        sizes = self._options.mb
        rounds = [
            (turn + 1.5 * size, turn, size)
            for turn in range(self._options.repeats)
            for size in range(len(sizes))
        ]
        for _, turn, size in sorted(rounds):
            source = self._root / f"source{sizes[size]}"
            if not source.exists():
                make_file(source, sizes[size] * MB)
            for cell in self._cells:
                if cell[0] == sizes[size]:
                    self._run_cell(cell, turn, source)

    def _run_cell(self, cell: Cell, turn: int, source: Path) -> None:
        names = list(self._tools)
        # The order rotates, so that each tool runs first once; the disk is flushed before each run.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if not self._begins(cell, name, turn):
                continue
            try:
                signal.alarm(max(1, round(min(self._options.run_s, self._late_s - time.monotonic()))))
                self._found[cell][name][turn] = self._run_tool(cell, name, turn, source)
            except OutOfTime:
                if time.monotonic() > self._late_s - 1:
                    self._why_not[cell, name] = "stopped when the time was over"
                    raise
                self._failed[cell, name].append(f"not done after {self._options.run_s:.0f} s (--run-s)")
            except (RuntimeError, OSError, subprocess.SubprocessError) as failure:
                self._failed[cell, name].append(str(failure))
            finally:
                signal.alarm(0)

    def _begins(self, cell: Cell, name: str, turn: int) -> bool:
        runs = self._found[cell][name]
        failures = len(self._failed[cell, name])
        if failures >= MAX_FAILURES or len(runs) + failures < turn:  # it did not fit into the previous round
            return False
        need_gb, expected_s = copies(name, cell) * cell[0] / 1000, self._expected_s(cell, name)
        free_gb = min(self._options.max_gb, shutil.disk_usage(self._root).free / 1e9 - 1)
        why = ""
        if need_gb > free_gb:
            why = f"needs {need_gb:.0f} GB of disk, {free_gb:.0f} are free or allowed (--max-gb)"
        elif time.monotonic() + expected_s > self._late_s:
            why = f"would take {expected_s:.0f} s by what went before, {max(0.0, self._late_s - time.monotonic()):.0f} are left"
        if why:
            self._why_not[cell, name] = why
        return not why

    def _expected_s(self, cell: Cell, name: str) -> float:
        """Estimates a run by the cell's last run, else by the tool's largest run, scaled by the bytes that are sent."""
        if runs := self._found[cell][name]:
            return float(runs[max(runs)]["whole_s"])
        known = {
            copies(name, other) * other[0]: found[name][max(found[name])]
            for other, found in self._found.items()
            if found[name]
        }
        most = max(known, default=0)
        if not most:
            return 0.0
        last, times = known[most], copies(name, cell) * cell[0] / most
        return float(last["whole_s"] + (times - 1) * last["seconds"])

    def _run_tool(self, cell: Cell, name: str, turn: int, source: Path) -> dict[str, Any]:
        mb, levels, num_clients = cell
        began_s = time.monotonic()
        os.sync()
        time.sleep(self._options.pause_s)
        read_through(source)
        place = self._root / "-".join(map(str, (*cell, turn, len(name))))
        need_bytes = copies(name, cell) * mb * MB
        terms = argparse.Namespace(
            **vars(self._options) | {"mb": mb, "levels": levels, "need_bytes": need_bytes}
        )
        try:
            run: dict[str, Any] = self._tools[name](place, source, num_clients, terms)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(
            f"{mb} MB, {levels} level(s), {num_clients} client(s), {name}: {run['seconds']:.2f} s",
            file=sys.stderr,
            flush=True,
        )
        return run | {"whole_s": time.monotonic() - began_s}

    def show(self) -> None:
        names = [
            {"shoal": "ours", PACKAGE: "shardcast", "nginx + curl": "nginx"}[name] for name in self._tools
        ]
        print(f"\nOne file to all clients; files on {file_system(self._root)}; medians, tools in turns")
        show(
            ["MB", "levels", "clients", "runs"]
            + [f"{short} s" for short in names]
            + ["ours : nginx", "shardcast : ours"]
            + [f"CPU s/GB {short}" for short in names]
            + ["CPU ours : shardcast"]
            + [f"peak MB {short}" for short in names if short != "nginx"],
            [self._row(cell) for cell in sorted(self._cells)],
        )
        print("\nCPU seconds per delivered GB, by role")
        rows = [
            [str(mb), str(levels), *row]
            for (mb, levels, clients), runs in sorted(self._found.items())
            for row in by_role(runs, mb, clients)
        ]
        show(["MB", "levels", "clients", "tool", "origin", "relays", "clients' own"], rows)
        for cell in sorted(self._cells):
            for name in self._tools:
                self._explain(cell, name)

    def _row(self, cell: Cell) -> list[str]:
        """Returns medians of the ratios of each round, so that runs that followed each other are compared."""
        mb, levels, clients = cell
        found, gigabytes = self._found[cell], mb * clients / 1000
        ours, theirs, nginx = (found.get(name, {}) for name in ("shoal", PACKAGE, "nginx + curl"))
        counts = "/".join(str(len(runs)) for runs in found.values())
        seconds = [self._cell_text(cell, name, lambda run: f"{run['seconds']:.2f}") for name in self._tools]
        cpu = [
            self._cell_text(cell, name, lambda run: f"{cpu_s(run) / gigabytes:.2f}") for name in self._tools
        ]
        peaks = [
            self._cell_text(cell, name, lambda run: f"{run['rss_mb']:.0f}")
            for name in self._tools
            if name != "nginx + curl"
        ]
        ratios = [ratio(ours, nginx, wall_s), ratio(theirs, ours, wall_s)]
        return [
            str(mb),
            str(levels),
            str(clients),
            counts,
            *seconds,
            *ratios,
            *cpu,
            ratio(ours, theirs, cpu_s),
            *peaks,
        ]

    def _cell_text(self, cell: Cell, name: str, text: Callable[[dict[str, Any]], str]) -> str:
        if runs := self._found[cell][name]:
            return text(
                {
                    what: statistics.median(run[what] for run in runs.values())
                    for what in next(iter(runs.values()))
                }
            )
        return "fails" if self._failed[cell, name] else "-"

    def _explain(self, cell: Cell, name: str) -> None:
        mb, levels, clients = cell
        what = f"{mb} MB, {levels} level(s), {clients} client(s), {name}"
        if failures := self._failed[cell, name]:
            print(f"failed: {what}: {len(failures)} times: {failures[-1]}")
        elif len(runs := self._found[cell][name]) < self._options.repeats:
            why = self._why_not.get((cell, name), "the time was over before")
            print(f"did not fit: {what}: {len(runs)} of {self._options.repeats} runs: {why}")


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def copies(name: str, cell: Cell) -> int:
    """Returns the number of copies on disk besides the source. The package keeps its shards beside the joined file."""
    _, levels, num_clients = cell
    return {
        "shoal": levels + num_clients,
        PACKAGE: 1 + levels + 2 * num_clients,
        "nginx + curl": num_clients,
    }[name]


def read_through(path: Path) -> None:
    """Reads the file, so that it is in the page cache."""
    room = bytearray(MB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(room):
            pass


@contextmanager
def warm_memory(num_bytes: int) -> Iterator[None]:
    """Keeps as much memory allocated as will be written, and releases it as it is needed.

    A virtual machine gives unused memory back to its host within seconds. Getting it back takes longer than sending the
    data, and would be counted for the process that happens to need it first.
    """
    num_bytes = min(num_bytes, free_memory() - (1 << 30)) >> 21 << 21
    with ExitStack() as stack:
        if num_bytes > 0:
            start = stack.enter_context(children(__file__, quiet=True))
            start("some_memory", "--bytes", num_bytes)
        yield


def file_system(folder: Path) -> str:
    """Returns the type of the file system of a folder, from the longest matching mount point."""
    best = ("", "?")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def by_role(found: Runs, mb: int, num_clients: int) -> list[list[str]]:
    gigabytes = mb * num_clients / 1000
    rows = []
    for name, runs in found.items():
        if runs:
            parts = [statistics.median(run[part] for run in runs.values()) / gigabytes for part in PARTS]
            rows.append([str(num_clients), name, *(f"{part:.2f}" for part in parts)])
    return rows


def ratio(
    ones: dict[int, dict[str, Any]],
    others: dict[int, dict[str, Any]],
    measure: Callable[[dict[str, Any]], float],
) -> str:
    pairs = [measure(ones[turn]) / measure(others[turn]) for turn in ones.keys() & others.keys()]
    return f"{statistics.median(pairs):.2f}" if pairs else "-"


def wall_s(run: dict[str, Any]) -> float:
    return float(run["seconds"])


PARTS = ("origin", "relays", "clients")


def cpu_s(run: dict[str, Any]) -> float:
    return float(sum(run[part] for part in PARTS))


# -- 2. slow links ----------------------------------------------------------------------------------------


def links(root: Path, options: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    source = make_file(root / "source", options.link_mb * MB)
    for scenario in [one for one in SCENARIOS if not options.scenario or one.__name__ in options.scenario]:
        with ExitStack() as stack:
            start = stack.enter_context(roles())
            place = root / scenario.__name__
            version = place / "origin" / "v1"
            version.mkdir(parents=True)
            os.link(source, version / "model.safetensors")
            origin = start("our_origin", place / "origin", "--shard-bytes", options.link_shard_bytes)

            def link(target: int, stack: ExitStack = stack, **ways: Any) -> Any:
                from throttle import Link

                made = Link(target, **ways)
                stack.callback(made.close)
                return made

            rows += scenario(place, options, start, origin, link)
        shutil.rmtree(place)
    print(f"\n{options.link_mb} MB over links of a given speed")
    show(["scenario", "seconds", "best possible", "ratio", "what it cost", "aim"], rows)


def fetch_over(start: Any, folder: Path, origin: Child, urls: list[str]) -> float:
    client = start("our_client", folder, *(word for url in urls for word in ("--upstream", url)))
    began_s = time.monotonic()
    client.tell("go")
    origin.ask("go")
    client.hear()
    took_s = time.monotonic() - began_s
    check_digest(folder)
    return took_s


def check_digest(folder: Path) -> None:
    """Compares the files of a client with the source, byte by byte, independent of any manifest."""
    got, put = (
        folder / "0" / "v1" / "model.safetensors",
        folder.parent / "origin" / "v1" / "model.safetensors",
    )
    if not filecmp.cmp(got, put, shallow=False):
        raise SystemExit(f"{got} is not {put}")


def chain(place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any) -> list[list[str]]:
    rate = 20e6
    port = origin.port
    for level in (1, 2):
        port = start(
            "our_relay", place / f"relay{level}", "--upstream", link(port, bytes_per_s=rate).url
        ).port
    took_s = fetch_over(start, place / "client", origin, [link(port, bytes_per_s=rate).url])
    return [
        row(
            "3 links of 20 MB/s in a row",
            took_s,
            options.link_mb * MB / rate,
            "store and forward: ratio 3.00",
            "ratio 1.15",
        )
    ]


def speeds(place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any) -> list[list[str]]:
    made = [link(origin.port, bytes_per_s=rate) for rate in (20e6, 6e6, 2e6)]
    took_s = fetch_over(start, place / "client", origin, [one.url for one in made])
    shares = " : ".join(f"{one.num_bytes / made[2].num_bytes:.1f}" for one in made)
    best_s = options.link_mb * MB / 28e6
    return [row("relays of 10:3:1 (20, 6, 2 MB/s)", took_s, best_s, f"shares {shares}", "10 : 3 : 1")]


def mixed(place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any) -> list[list[str]]:
    """Relays of 10:3:1 and one of each kind of failure, with four clients at once, each behind its own links."""
    size, clients = options.link_mb * MB, []
    for index in range(4):
        made = [link(origin.port, bytes_per_s=rate) for rate in (20e6, 6e6, 2e6)]
        made += [
            link(origin.port, bytes_per_s=6e6, die_after=size / 20),
            link(origin.port, bytes_per_s=6e6, corrupt_every=size // 20),
            link(origin.port, bytes_per_s=6e6, stall_after=size / 20),
        ]
        words = [word for one in made for word in ("--upstream", one.url)]
        clients.append(start("our_client", place / f"client{index}", *words))
    began_s = time.monotonic()
    for client in clients:
        client.tell("go")
    origin.ask("go")
    for client in clients:
        client.hear()
    took_s = time.monotonic() - began_s
    for index in range(4):
        check_digest(place / f"client{index}")
    best_s = size * (1 - 3 / 20) / 28e6  # bytes of failing relays before the failure count
    what = "10:3:1, one that dies, one that corrupts, one that hangs; 4 clients"
    return [row(what, took_s, best_s, "4 of 4 with the right digest", "all of them")]


def hung(place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any) -> list[list[str]]:
    half = options.link_mb * MB / 4
    made = [link(origin.port, bytes_per_s=20e6), link(origin.port, bytes_per_s=20e6, stall_after=half)]
    took_s = fetch_over(start, place / "client", origin, [one.url for one in made])
    best_s = half / 20e6 + (options.link_mb * MB - 2 * half) / 20e6
    what = "one of two 20 MB/s relays hangs half-way"
    return [row(what, took_s, best_s, f"{took_s - best_s:.1f} s", "under 5 s")]


def corrupt(
    place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any
) -> list[list[str]]:
    size = options.link_mb * MB
    made = [link(origin.port, bytes_per_s=20e6), link(origin.port, bytes_per_s=20e6, corrupt_every=size // 4)]
    took_s = fetch_over(start, place / "client", origin, [one.url for one in made])
    in_vain = (sum(one.num_bytes for one in made) - size) / options.link_shard_bytes
    best_s = size / 4 / 20e6 + (size / 2) / 20e6
    what = "one of two 20 MB/s relays flips a bit half-way"
    return [row(what, took_s, best_s, f"{in_vain:.1f} shards in vain, with all headers", "one shard")]


def failing(
    place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any
) -> list[list[str]]:
    made = [
        link(origin.port, bytes_per_s=20e6, die_after=options.link_mb * MB / 4),
        link(origin.port, bytes_per_s=20e6, corrupt_every=8 * MB),
        link(origin.port, bytes_per_s=20e6, stall_after=options.link_mb * MB / 8),
        link(origin.port, bytes_per_s=10e6),
    ]
    took_s = fetch_over(start, place / "client", origin, [one.url for one in made])
    surplus = sum(one.num_bytes for one in made) / (options.link_mb * MB) - 1
    # Bytes that the failing relays sent before their failure count.
    best_s = (options.link_mb * MB * (1 - 1 / 4 - 1 / 8) - 8 * MB) / 10e6
    what = "one dies, one corrupts, one hangs, one is well (10 MB/s)"
    return [row(what, took_s, best_s, f"{100 * surplus:.0f} % of the bytes in vain", "the right digest")]


def restarted(
    place: Path, options: argparse.Namespace, start: Any, origin: Child, link: Any
) -> list[list[str]]:
    made = link(origin.port, bytes_per_s=20e6)
    origin.ask("go")
    first = start("our_client", place / "client", "--upstream", made.url)
    first.tell("go")
    while made.num_bytes < options.link_mb * MB / 2:
        time.sleep(0.01)
    first.close(kill=True)
    before = made.num_bytes
    second = start("our_client", place / "client", "--upstream", made.url)
    began_s = time.monotonic()
    second.ask("go")
    took_s = time.monotonic() - began_s
    check_digest(place / "client")
    again = (made.num_bytes - before) / (options.link_mb * MB)
    return [
        row(
            "client killed half-way and started again",
            took_s,
            options.link_mb * MB / 40e6,
            f"fetched {100 * again:.0f} %",
            "55 %",
        )
    ]


SCENARIOS = (chain, speeds, hung, corrupt, failing, mixed, restarted)


def row(what: str, took_s: float, best_s: float, cost: str, aim: str) -> list[str]:
    return [what, f"{took_s:.2f}", f"{best_s:.2f}", f"{took_s / best_s:.2f}", cost, aim]


# -- 3. a crowd -------------------------------------------------------------------------------------------


def crowd(root: Path, options: argparse.Namespace) -> None:
    num_processes, size = 10, 5 * MB
    version = root / "origin" / "v1"
    version.mkdir(parents=True)
    make_file(version / "model.safetensors", size)
    with roles() as start:
        origin = start("our_origin", root / "origin", "--shard-bytes", 1 << 20)
        relay = start("our_relay", root / "relay", "--upstream", origin.url)
        copies = options.crowd // num_processes
        clients = [
            start("our_client", root / f"client{index}", "--upstream", relay.url, "--copies", copies)
            for index in range(num_processes)
        ]
        before = relay.ask("usage")
        for child in (*clients, origin):
            child.tell("go")
        took_s = sorted(took for client in clients for took in client.hear()["took_s"])
        origin.hear()
        after = relay.ask("usage")
    shutil.rmtree(root)
    print(f"\n{options.crowd} clients at once, {size // MB} MB each, one relay")
    gigabytes = options.crowd * size / 1e9
    show(
        ["done", "first s", "median s", "last s", "relay CPU s/GB", "relay peak MB", "before MB"],
        [
            [f"{len(took_s)} of {options.crowd}"]
            + [f"{took_s[index]:.2f}" for index in (0, len(took_s) // 2, -1)]
            + [
                f"{(after['cpu_s'] - before['cpu_s']) / gigabytes:.2f}",
                f"{after['rss_mb']:.0f}",
                f"{before['rss_mb']:.0f}",
            ]
        ],
    )


# -- tools ------------------------------------------------------------------------------------------------


def make_file(path: Path, num_bytes: int) -> Path:
    """Writes random bytes, which repeat after RANDOM_BYTES but for a number at the start of each piece: no two shards are equal.

    Nothing is compressed on the way, and new random bytes for 16 GB would take 40 s.
    """
    random = memoryview(os.urandom(min(num_bytes, RANDOM_BYTES)))
    with path.open("wb", buffering=0) as file:
        for number, start in enumerate(range(0, num_bytes, MB)):
            at, size = start % RANDOM_BYTES, min(MB, num_bytes - start)
            stamp = number.to_bytes(8, "little")[:size]
            file.write(stamp + random[at + len(stamp) : at + size])
    return path


def nginx_binary() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def their_python(options: argparse.Namespace) -> Path | None:
    """Returns the interpreter of an environment with the package, which is created once."""
    folder: Path = options.root / "pypi"
    python = folder / "bin" / "python"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE],
            check=False,
            stderr=subprocess.DEVNULL,
        )
    found = subprocess.run([python, "-P", "-c", "import shardcast"], check=False, stderr=subprocess.DEVNULL)
    return python if found.returncode == 0 else None


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for_port(port: int) -> None:
    import socket

    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")


def show(header: list[str], rows: list[list[str]]) -> None:
    sys.stdout.flush()
    widths = [max(len(line[index]) for line in (header, *rows)) for index in range(len(header))]
    for line in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[500], help="sizes of the file, loopback")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--levels", type=int, nargs="+", default=[1], help="levels of relays")
    parser.add_argument("--repeats", type=int, default=2, help="loopback: rounds over all combinations")
    parser.add_argument(
        "--minutes",
        type=float,
        default=NO_LIMIT,
        help="loopback: time limit; runs that would probably exceed it are not started",
    )
    parser.add_argument(
        "--run-s", type=float, default=180.0, help="loopback: a run that takes longer counts as failed"
    )
    parser.add_argument("--max-gb", type=float, default=35.0, help="loopback: limit of disk space")
    parser.add_argument("--tool", choices=list(TOOLS), action="append", help="loopback: only these tools")
    parser.add_argument(
        "--pause-s", type=float, default=2.0, help="before each run, for the machine to settle"
    )
    parser.add_argument("--link-mb", type=int, default=100, help="size of the file, slow links")
    parser.add_argument("--crowd", type=int, default=200)
    parser.add_argument("--shard-bytes", type=int, default=2 << 20)
    parser.add_argument("--link-shard-bytes", type=int, default=512 << 10, help="slow links")
    parser.add_argument("--scenario", choices=[one.__name__ for one in SCENARIOS], action="append")
    parser.add_argument("--only", choices=["loopback", "links", "crowd"], action="append")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the files go (default: a temporary folder)"
    )
    for name in ("role", "upstream", "port", "source", "copies", "bytes"):
        kind: dict[str, Any] = {
            "port": {"type": int},
            "bytes": {"type": int},
            "copies": {"type": int, "default": 1},
            "source": {"type": Path},
        }
        kind["upstream"] = {"action": "append", "default": []}
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **kind.get(name, {}))
    options = parser.parse_args()
    if options.role:
        ROLES[options.role](options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the cleanup of temporary files
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        options.root = Path(folder)
        for name, part in (("loopback", compare), ("links", links), ("crowd", crowd)):
            if not options.only or name in options.only:
                (place := options.root / name).mkdir()
                part(place, options)


if __name__ == "__main__":
    main()
