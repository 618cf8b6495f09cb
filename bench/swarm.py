"""How much one coordinator holds, and how a swarm of a thousand behaves.

    python bench/swarm.py load                    heartbeats and lease cycles a second, signatures on, SQLite
    python bench/swarm.py load --postgres         the same on a PostgreSQL that is started for it
    python bench/swarm.py churn                   1,000 nodes in virtual time: churn, clones, slow and lying ones
    python bench/swarm.py timeline                the report's step, and what deltas, relays and lag change

The coordinator runs as a process of its own, on a core of its own where there are two; the load comes from another. Beside
requests a second it prints requests per second of the coordinator's CPU time, which a busy machine changes least.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import churn
import timeline

from shoal.wire.delegation import delegate_relay
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.messages import (
    Announce,
    AskLease,
    AskUpload,
    Enrol,
    Heartbeat,
    OpenSession,
    RelayReport,
    Submit,
)
from shoal.wire.record import Record, Sealed, seal
from shoal.wire.request import Target, sign_request
from shoal.wire.run_spec import PROTOCOL

SERVER = """
import json, sys, threading
from pathlib import Path
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.http.server import Hosting, run_pool
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec
folder, database = Path(sys.argv[1]), sys.argv[2]
spec = RunSpec(run="load", task=TaskSpec(name="sort", options={"length": 6}), compute_dtype="float32",
               sampling=Sampling(max_new_tokens=8, samples_per_prompt=4), last_version=9)
config = CoordinatorConfig(groups_per_step=10**6, prompts_per_lease=2, eval_prompts=0, lease_s=600,
                           max_open_leases=64, requests_per_s=10**6, database=database, try_relays=False)
import shoal.telemetry
run_pool([Hosting(config=config, spec=spec, dir=folder)], "127.0.0.1", 0, threading.Event(),
         lambda url: print(url, flush=True))
"""


class Coordinator:
    """A real one, in a process of its own."""

    def __init__(self, database: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, self.folder.name, database], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise SystemExit("the coordinator did not start")
        if (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(self.process.pid, {0})
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {0})
            os.sched_setaffinity(0, {1})

    def key(self, name: str) -> Key:
        return Key.load(Path(self.folder.name) / "keys" / f"{name}.key")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


class Line:
    """One connection, kept open. Raw bytes: the load must cost less than what it loads."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.host, self.port, self.authority = parts.hostname, parts.port, parts.netloc

    async def open(self) -> "Line":
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        self.began_s = time.perf_counter()
        return self

    def close(self) -> None:
        self.writer.close()

    def request(self, key: Key | None, method: str, path: str, content: bytes) -> bytes:
        target = Target(method=method, authority=self.authority, path=path)
        headers = sign_request(key, target, content, now_s=time.time()) if key else {}
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.authority}", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def send(self, raw: bytes) -> tuple[int, bytes]:
        self.writer.write(raw)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        body = await self.reader.readexactly(length) if length else b""
        return int(head[9:12]), body

    async def call(self, key: Key | None, method: str, path: str, body: Record | bytes | None) -> bytes:
        content = body.model_dump_json().encode() if isinstance(body, Record) else body or b""
        status, answer = await self.send(self.request(key, method, path, content))
        if status >= 300:
            raise SystemExit(f"{method} {path}: {status} {answer[:300]!r}")
        return answer


async def join(line: Line, key: Key) -> int:
    await line.call(key, "POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="bench"))
    opened = await line.call(key, "POST", "/v1/session", OpenSession(software="bench"))
    return int(json.loads(opened)["epoch"])


async def publish(line: Line, coordinator: Coordinator) -> None:
    entry = FileEntry(
        name="model.safetensors", num_bytes=1000, blake3="0" * 64, shard_bytes=1000, shards=("0" * 64,)
    )
    manifest = Manifest(run="load", version=0, files=(entry,), created_at_s=5.0)
    told = Announce(
        manifest=seal(manifest, coordinator.key("run")), origin_url="http://127.0.0.1:1", report=None
    )
    await line.call(coordinator.key("trainer"), "POST", "/v1/policies", told)
    operator, url = coordinator.key("relay"), "http://127.0.0.1:2"
    delegation = delegate_relay(operator, operator.public, url, now_s=time.time() - 1)
    here = RelayReport(url=url, versions=(0,), delegation=delegation)
    await line.call(operator, "POST", "/v1/relays", here)


def report(what: str, latencies: list[float], wall_s: float, cpu_s: float) -> None:
    latencies.sort()
    p99 = latencies[int(len(latencies) * 0.99) - 1]
    count = len(latencies)
    print(
        f"| {what} | {count} | {count / wall_s:,.0f} | {count / cpu_s:,.0f} | "
        f"{statistics.median(latencies) * 1e3:.1f} | {p99 * 1e3:.1f} |"
    )


class Pulse(asyncio.Protocol):
    """One connection that sends one request after the other, all signed before the clock starts, and times each.

    So that the load costs a fraction of what it loads: no signing, no parsing, one callback a request.
    """

    def __init__(self, requests: list[bytes], end_s: float, latencies: list[float]) -> None:
        self.requests, self.end_s, self.latencies = requests, end_s, latencies
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""
        self._send()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, blank, body = self.received.partition(b"\r\n\r\n")
        if not blank or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        if head[9:12] != b"200":
            raise SystemExit(self.received.decode())
        self.latencies.append(time.perf_counter() - self.began_s)
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self.end_s or not self.requests:
            self.transport.close()
            self.done.set_result(None)
            return
        self.received, self.began_s = b"", time.perf_counter()
        self.transport.write(self.requests.pop())


MOST_A_SECOND = 5000
"""Requests signed beforehand for each second of load; a coordinator that answers more of them ends the measurement early."""


async def load_heartbeats(coordinator: Coordinator, *, lines: int, seconds: float) -> None:
    line = await Line(coordinator.url).open()
    keys = [Key.generate() for _ in range(lines)]
    epochs = [await join(line, key) for key in keys]
    bodies = [
        Heartbeat(epoch=epoch, phase="generating", policy_version=0, tokens_per_s=1.0) for epoch in epochs
    ]
    each = int(seconds * MOST_A_SECOND / lines)
    signed = [
        [line.request(key, "POST", "/v1/heartbeat", body.model_dump_json().encode()) for _ in range(each)]
        for key, body in zip(keys, bodies, strict=True)
    ]
    latencies: list[float] = []
    start_s, start_cpu, own_cpu = time.perf_counter(), coordinator.cpu_s(), time.process_time()
    loop = asyncio.get_running_loop()
    pulses = [
        await loop.create_connection(
            partial(Pulse, requests, start_s + seconds, latencies), line.host, line.port
        )
        for requests in signed
    ]
    await asyncio.gather(*(pulse.done for _, pulse in pulses))
    wall_s, cpu_s = time.perf_counter() - start_s, coordinator.cpu_s() - start_cpu
    report(f"heartbeats, {lines} connections", latencies, wall_s, cpu_s)
    print(f"(the load itself took {(time.process_time() - own_cpu) / wall_s:.0%} of a core)", file=sys.stderr)
    line.close()


CYCLE = 6
"""Requests of one lease from issue to verdict: lease, upload, bytes, submit, claim, verdict."""
BEATS = 20
"""Heartbeats to a lease of five minutes."""


async def load_leases(
    coordinator: Coordinator, *, lines: int, seconds: float, beats: int, rate: float | None
) -> None:
    """Runs lease cycles with `beats` heartbeats each. All lines together send `rate` requests a second, or as many as they can."""
    keys = [Key.generate() for _ in range(lines)]
    connections = [await Line(coordinator.url).open() for _ in range(lines)]
    epochs = [await join(line, key) for line, key in zip(connections, keys, strict=True)]
    validator = coordinator.key("validator")
    latencies: list[float] = []
    start_s, start_cpu = time.perf_counter(), coordinator.cpu_s()
    end_s = start_s + seconds
    cycles = 0

    async def timed(
        line: Line, key: Key | None, method: str, path: str, body: Record | bytes | None
    ) -> bytes:
        if rate is not None:
            slot_s = lines / rate
            await asyncio.sleep(slot_s - (time.perf_counter() - line.began_s) % slot_s)
        began_s = time.perf_counter()
        answer = await line.call(key, method, path, body)
        latencies.append(time.perf_counter() - began_s)
        return answer

    async def work(number: int, line: Line, key: Key, epoch: int) -> None:
        nonlocal cycles
        if rate is not None:
            line.began_s = start_s + number / rate  # the lines take turns
        while time.perf_counter() < end_s:
            sealed = await timed(line, key, "POST", "/v1/leases", AskLease(epoch=epoch))
            lease = Sealed[Lease].parse(sealed).body
            data = lease.lease_id.encode() * 8
            what = {"epoch": epoch, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            path = f"/v1/leases/{lease.lease_id}"
            upload = await timed(line, key, "POST", f"{path}/upload", AskUpload.model_validate(what))
            await timed(line, None, "PUT", json.loads(upload)["path"], data)
            submit = Submit.model_validate(what | {"policy_version": 0})
            await timed(line, key, "POST", f"{path}/submit", submit)
            claim = json.loads(await timed(line, validator, "POST", "/v1/checks/claim", None))
            rows = len(claim["lease"]["prompts"]) * claim["lease"]["sampling"]["samples_per_prompt"]
            verdict = {
                "lease_id": claim["lease"]["lease_id"],
                "code": "accepted",
                "detail": "",
                "rewards": [float(row % 2) for row in range(rows)],
                "output_tokens": rows,
                "checks": claim["checks"],
            }
            verdict_path = f"/v1/checks/{verdict['lease_id']}/verdict"
            await timed(line, validator, "POST", verdict_path, json.dumps(verdict).encode())
            for _ in range(beats):
                body = Heartbeat(epoch=epoch, phase="generating", policy_version=0, tokens_per_s=1.0)
                await timed(line, key, "POST", "/v1/heartbeat", body)
            cycles += 1

    joined = zip(range(lines), connections, keys, epochs, strict=True)
    await asyncio.gather(*(work(*one) for one in joined))
    wall_s, cpu_s = time.perf_counter() - start_s, coordinator.cpu_s() - start_cpu
    what = f"lease cycles of {CYCLE} requests" + (f" and {beats} heartbeats" if beats else "")
    what += f" at {rate:g} a second" if rate is not None else ""
    report(f"requests of {what}", latencies, wall_s, cpu_s)
    print(f"| {what} | {cycles} | {cycles / wall_s:,.0f} | {cycles / cpu_s:,.0f} | | |")
    for line in connections:
        line.close()


def load(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        database = options.database
        if options.postgres:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "swarm" / "coordinator"))
            from postgres import running_postgres

            database = stack.enter_context(running_postgres(durable=True)).fresh()
        load_on(database, options)


def load_on(database: str, options: argparse.Namespace) -> None:
    coordinator = Coordinator(database)
    print("| what | count | a second | a second of CPU | median ms | p99 ms |")
    print("|---|---|---|---|---|---|")

    async def everything() -> None:
        line = await Line(coordinator.url).open()
        await publish(line, coordinator)
        line.close()
        await load_heartbeats(coordinator, lines=options.lines, seconds=options.seconds)
        for beats in (0, BEATS):
            await load_leases(
                coordinator, lines=options.lines, seconds=options.seconds, beats=beats, rate=None
            )
        if options.rate is not None:
            await load_leases(
                coordinator, lines=options.lines, seconds=options.seconds, beats=0, rate=options.rate
            )

    try:
        asyncio.run(everything())
    finally:
        coordinator.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    loading = commands.add_parser("load")
    loading.add_argument("--database", default="")
    loading.add_argument(
        "--postgres", action="store_true", help="on a PostgreSQL started for it, as the tests do"
    )
    loading.add_argument("--lines", type=int, default=64)
    loading.add_argument("--seconds", type=float, default=10.0)
    loading.add_argument("--rate", type=float, help="also run lease cycles at this many requests a second")
    loading.set_defaults(act=load)
    churning = commands.add_parser("churn")
    churning.add_argument("--nodes", type=int, default=1000)
    churning.add_argument("--hours", type=float, default=24.0)
    churning.add_argument("--seed", type=int, default=7)
    churning.set_defaults(act=lambda o: churn.table(nodes=o.nodes, hours=o.hours, seed=o.seed))
    timing = commands.add_parser("timeline")
    timing.set_defaults(act=lambda o: timeline.table())
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
