"""The worker of `shoal join`: a process that can write only in the node's folder and connect only to the run's ports.

The rules are Linux's Landlock (shoal/landlock.py). Where the system does not have it, the worker runs without them, and the
summary that `shoal join` shows says so.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from shoal.cli.run.supervise import EXIT_FAILED
from shoal.landlock import Confinement
from shoal.rollout.worker.worker_folder import LOG_FILE
from shoal.wire.messages import Info, Stats

POLL_S = 0.2
STOP_S = 20.0
"""Seconds that a worker gets to give its leases back before it is killed."""
COMMON_PORTS = (53, 443)
"""DNS over TCP, and HTTPS: the coordinator may send uploads to an object store, whose address is known only then."""
WEB_PORTS = (80, 443)
MAX_RUN_PORTS = 8
"""Ports that a run's coordinator may choose. With more, a hostile one could allow connections to every service of the user's network."""
FIRST_OPEN_PORT = 1024
"""Ports below belong to services of a machine, such as SSH and mail; a run may choose WEB_PORTS of them."""
SHOWN_PORTS = 4
LIMITS = ("cores", "memory_gb", "disk_gb", "download_mbit", "upload_mbit")
"""Options of `shoal join` and `shoal worker` that limit what the worker uses."""
MAX_LOG_BYTES = 20 << 20
"""A larger log is moved to worker.log.1 when the worker starts."""
CACHES = {
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "other",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
    "HF_HOME": "huggingface",
}
"""Environment variables that move the caches and temporary files of libraries into the node's folder."""


def confinement(
    url: str, dir: Path, info: Info, stats: Stats, *, engine: str = "torch", allow_ports: tuple[int, ...] = ()
) -> Confinement:
    """Returns the rules of a worker in `dir` for the run at `url`.

    The user chose `url`, `allow_ports` and the proxies. The coordinator chose all other addresses; ports that it may not choose are
    left out, and the note of the rules names them.
    """
    if engine == "vllm":
        reason = "vLLM's processes connect to each other over ports of this machine"
        return Confinement(writable=(dir,), ports=None, why_any_port=reason)
    ports = {*COMMON_PORTS, *allow_ports, *_ports([url, *urllib.request.getproxies().values()])}
    origin = [stats.origin] if stats.origin else []
    asked = [
        port
        for port in _ports([*info.entry_points, *origin, *(relay.url for relay in stats.relays)])
        if port not in ports
    ]
    good = [port for port in asked if port >= FIRST_OPEN_PORT or port in WEB_PORTS][:MAX_RUN_PORTS]
    left_out = sorted({*asked} - {*good})
    return Confinement(writable=(dir,), ports=tuple(sorted(ports | {*good})), note=_note(left_out))


def _note(left_out: list[int]) -> str:
    if not left_out:
        return ""
    listed = ", ".join(map(str, left_out[:SHOWN_PORTS])) + (", ..." if len(left_out) > SHOWN_PORTS else "")
    return (
        f" (not to {listed}: a run may choose {MAX_RUN_PORTS} ports, and none below {FIRST_OPEN_PORT} but "
        f"{' and '.join(map(str, WEB_PORTS))}; --allow-port allows more)"
    )


def _ports(urls: Iterable[str]) -> list[int]:
    """Returns the ports of addresses, each once, in order."""
    return list(dict.fromkeys(port for one in urls if (port := _port(one)) is not None))


def _port(url: str) -> int | None:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # not a URL, or not a port number
        return None


def run_confined(
    options: argparse.Namespace,
    rules: Confinement,
    stop: threading.Event,
    on_poll: Callable[[int], None] | None = None,
) -> int:
    """Runs `shoal worker` with the options of `shoal join` under the rules; returns its exit code.

    With `on_poll`, its log goes to a file in its folder, and `on_poll` is called with its process id a few times a second.
    """
    caches = options.dir.resolve() / "cache"
    for name in CACHES.values():
        (caches / name).mkdir(parents=True, exist_ok=True)
    log = None if on_poll is None else _open_log(options.dir / LOG_FILE)
    process = subprocess.Popen(
        [*rules.wrapper(), sys.executable, "-m", "shoal", *worker_arguments(options)],
        # A pipe: when this process ends, the worker reads the end of the file and stops, even if no signal reaches it.
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=os.environ | {variable: str(caches / name) for variable, name in CACHES.items()},
        # Ctrl-C reaches this process only, which then tells the worker once.
        start_new_session=True,
    )
    try:
        code = _wait(process, stop, on_poll)
    finally:
        if log is not None:
            log.close()
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    if code < 0:
        print(f"the worker was ended by signal {-code}; joining again continues its work", file=sys.stderr)
        return EXIT_FAILED
    return code


def worker_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of `shoal` for the worker that `shoal join` was asked for."""
    named: dict[str, Any] = {
        "--coordinator": options.url,
        "--dir": options.dir.resolve(),
        "--engine": options.engine,
        "--tensor-parallel": options.tensor_parallel,
        "--weights": options.weights,
        "--draft": options.draft if options.draft in (None, "lookup") else Path(options.draft).resolve(),
        "--draft-rows": options.draft_rows,
        "--device": options.device,
        "--threads": options.threads,
        "--max-rows": options.max_rows,
        "--deadline-s": options.deadline_s,
        **{f"--{name.replace('_', '-')}": getattr(options, name) for name in LIMITS},
    }
    named = {name: value for name, value in named.items() if value is not None}
    return ["worker", "--stop-with-stdin", *(str(word) for pair in named.items() for word in pair)]


def _open_log(path: Path) -> BinaryIO:
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")


def _wait(
    process: subprocess.Popen[bytes], stop: threading.Event, on_poll: Callable[[int], None] | None
) -> int:
    kill_at_s: float | None = None
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            pass
        if on_poll is not None:
            on_poll(process.pid)
        if stop.is_set() and kill_at_s is None:
            process.terminate()
            kill_at_s = time.monotonic() + STOP_S
        if kill_at_s is not None and time.monotonic() > kill_at_s:
            process.kill()
