"""`shoal doctor` checks whether this machine can work for a run; `shoal explain` says what a refusal code means."""

import argparse
import difflib
import json
import os
import platform
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import httpx2

from shoal import __version__
from shoal.cli.public_api import PublicApi
from shoal.cli.run.confined_worker import confinement
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.errors import split_remedy
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import byte_size
from shoal.net.http_client import Unreachable
from shoal.swarm.coordinator.rules.node_status import is_older
from shoal.tasks import CannotGrade
from shoal.tasks.grading.sandbox import best_level
from shoal.telemetry import printable
from shoal.wire.codes import CODES, Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info, Stats
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL

TIMEOUT_S = 10.0
SAMPLE_BYTES = 4 << 20
"""Bytes fetched from each relay to measure its speed."""
SKEW_S = 120.0
"""Largest clock difference that is reported as good. Signed requests are refused beyond 300 s."""
MIN_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The result of one check of the machine or the run."""

    name: str
    state: Literal["good", "weak", "bad"]
    """`weak` works, but slowly or not yet; `bad` does not work."""
    words: str
    remedy: str = ""


def good(name: str, words: str) -> HealthCheck:
    return HealthCheck(name, "good", words)


def weak(name: str, words: str, remedy: str) -> HealthCheck:
    return HealthCheck(name, "weak", words, remedy)


def bad(name: str, words: str, remedy: str) -> HealthCheck:
    return HealthCheck(name, "bad", words, remedy)


def examine(url: str | None, dir: Path) -> list[HealthCheck]:
    """Returns the results of all checks, of the machine first, then of the run at `url`, if there is one."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    findings = [good("python", python), _device(), _memory(), _folder(dir, make=url is not None), _sandbox()]
    if url is None:
        return findings
    with PublicApi(url, timeout_s=TIMEOUT_S) as api:
        try:
            info, stats = api.read("/v1/info", Info), api.read("/v1/stats", Stats)
        except Unreachable as error:
            words = split_remedy(str(error))[0]
            return [*findings, bad("coordinator", words, "check the URL, the proxy and the firewall")]
        findings.append(_protocol(info))
        if info.finished:
            return findings
        findings += [_clock(info), _admission(info), *_confinement(url, dir, info, stats)]
        findings += _weights(api, info, stats, dir)
    return findings


def _device() -> HealthCheck:
    try:
        import torch
    except ModuleNotFoundError:
        return bad("device", "torch is not installed", "pip install 'shoal-rl[torch]'")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return good("device", f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB: use --device cuda")
    return weak(
        "device",
        f"no CUDA device; {os.cpu_count()} CPU cores",
        "good enough for small models; leases are sized accordingly",
    )


def _memory() -> HealthCheck:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = f"{memory / 2**30:.1f} GiB"
    if memory < MIN_MEMORY:
        return bad("memory", words, "at least 1 GiB is needed")
    return good("memory", words)


def _folder(dir: Path, *, make: bool) -> HealthCheck:
    """Checks that the node's folder can be written; without `make`, the folder where it would be made."""
    try:
        if make:
            dir.mkdir(parents=True, exist_ok=True)
        elif not dir.exists():
            dir = dir.absolute().parent
        probe = dir / f"write-test.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return bad("folder", f"{dir}: {error.strerror}", "choose another --dir")
    return good("folder", f"{dir}, {shutil.disk_usage(dir).free / 1e9:.1f} GB free")


def _sandbox() -> HealthCheck:
    """Returns how programs would be isolated. Only validators run programs, so no level keeps a worker from working."""
    try:
        level = best_level()
    except CannotGrade as error:
        words, _, remedy = str(error).partition("; ")
        return weak("sandbox", f"{words} (concerns validators only)", remedy)
    return good("sandbox", f"programs would run at level {level} (validators only)")


def _protocol(info: Info) -> HealthCheck:
    words = f"run {info.spec.run!r}, {info.software}, protocol {info.protocol}"
    if info.protocol != PROTOCOL:
        return bad("coordinator", words, f"this is protocol {PROTOCOL}: install the version the run uses")
    if info.finished:
        return bad("coordinator", f"{words}: the run is finished", "it needs no more work; join another run")
    own = f"shoal {__version__}"
    if is_older(own, info.min_software):
        return weak(
            "coordinator",
            f"{words}; it needs {info.min_software}, and this is {own}",
            "update it, or it will get no work: pip install --upgrade 'shoal-rl[torch]'",
        )
    return good("coordinator", words)


def _clock(info: Info) -> HealthCheck:
    offset_s = info.server_time_s - time.time()
    words = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator"
    if abs(offset_s) > SKEW_S:
        return bad(
            "clock", words, "set the clock: signed requests are refused if it is more than five minutes off"
        )
    return good("clock", words)


def _admission(info: Info) -> HealthCheck:
    remedies = {
        "invite": "ask the operator for an invitation: --invite CODE",
        "allow": "send the operator the node's id: shoal whoami",
        "work": f"nothing; joining computes about 2^{info.work_bits} hashes once",
        "stake": "ask the operator to enter a stake for the node or its owner",
    }
    remedy = remedies.get(info.admission, "")
    return HealthCheck("admission", "weak" if remedy else "good", info.admission, remedy)


def _confinement(url: str, dir: Path, info: Info, stats: Stats) -> list[HealthCheck]:
    """Says what the system keeps a worker of `shoal join` from."""
    return [
        HealthCheck(
            "confinement",
            "good" if protection.active else "weak",
            f"a worker {protection}",
            "" if protection.active else "use Linux 6.7 or newer, or join in a container",
        )
        for protection in confinement(url, dir, info, stats).protections()
    ]


def _weights(api: PublicApi, info: Info, stats: Stats, dir: Path) -> list[HealthCheck]:
    if info.newest_version is None:
        return [weak("weights", "the trainer has not published version 0 yet", "try again later")]
    try:
        manifest = Sealed[Manifest].parse(api.get("/v1/policies/latest")).open(info.run_key)
    except (Unreachable, Rejected) as error:
        return [bad("weights", f"no manifest: {error}", "ask the operator")]
    needed, free = manifest.num_bytes * (info.spec.max_lag + 2), shutil.disk_usage(dir).free
    words = f"version {manifest.version}: {manifest.num_bytes / 1e6:.1f} MB, {byte_size(needed)} for all versions that are kept"
    disk = good("disk", words)
    if free < needed:
        disk = bad(
            "disk", f"{words}; {byte_size(free)} free", "free some disk space, or choose another --dir"
        )
    live = [relay for relay in stats.relays if relay.liveness != "offline"]
    if not live:
        return [disk, bad("relays", "no relay is live", "ask the operator")]
    return [disk, *(_relay(relay.url, manifest) for relay in live)]


def _relay(url: str, manifest: Manifest) -> HealthCheck:
    """Measures a relay with the newest version's largest file: a delta for most versions, whose whole file no relay has."""
    sent = manifest.payloads
    if not sent:
        return good("relay", f"{url}: version {manifest.version} has no file to measure it with")
    largest = max(sent, key=lambda entry: entry.num_bytes)
    path = f"{url}/versions/{manifest.version}/{largest.name}"
    size = min(SAMPLE_BYTES, largest.num_bytes)
    began_s, got = time.monotonic(), 0
    try:
        with httpx2.stream(
            "GET", path, headers={"Range": f"bytes=0-{size - 1}"}, timeout=TIMEOUT_S
        ) as answer:
            # A relay may send more than it was asked for, or a byte now and then.
            for piece in answer.iter_raw() if answer.is_success else ():
                got += len(piece)
                if got >= size or time.monotonic() > began_s + TIMEOUT_S:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return bad(
            "relay",
            f"{url}: {type(error).__name__}: {error}",
            "check the firewall; workers only make outgoing connections",
        )
    took_s = max(1e-3, time.monotonic() - began_s)
    if answer.status_code == 401:
        return good(
            "relay", f"{url}: serves members only, so it was not measured; a worker that joins gets a ticket"
        )
    if not answer.is_success:
        return weak(
            "relay",
            f"{url}: HTTP {answer.status_code}",
            "it may still be mirroring; other relays serve meanwhile",
        )
    # The time of a small file is mostly latency and says nothing about bandwidth.
    speed = (
        f"{got / 1e3:.0f} kB in {took_s:.2f} s" if got < 1 << 20 else f"{got * 8 / took_s / 1e6:.0f} Mbit/s"
    )
    return good("relay", f"{url}: {speed}")


MARKS = {"good": "ok  ", "weak": "weak", "bad": "BAD "}


def print_findings(findings: list[HealthCheck]) -> None:
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        print(f"  {MARKS[finding.state]} {finding.name:<12} {printable(finding.words)}{remedy}")


def doctor(options: argparse.Namespace, stop: threading.Event) -> int:
    with progress(f"checking this machine{f' and {options.url}' if options.url else ''}"):
        findings = examine(options.url, options.dir)
    if options.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=1)
        print()
    else:
        print_findings(findings)
        if options.url is None:
            print("To check a run too: shoal doctor URL")
    return EXIT_FAILED if any(finding.state == "bad" for finding in findings) else EXIT_OK


def explain(options: argparse.Namespace, stop: threading.Event) -> int:
    if options.code is not None and options.code not in CODES:
        close = difflib.get_close_matches(options.code, CODES, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"no refusal code {options.code!r}; {hint}`shoal explain` lists them all")
    if options.json:
        chosen = [options.code] if options.code else list(CODES)
        found = {code: {"meaning": CODES[code].meaning, "remedy": CODES[code].remedy} for code in chosen}
        print(json.dumps(found))
    elif options.code is None:
        width = max(map(len, CODES))
        for code, meaning in CODES.items():
            print(f"{code:<{width}} {meaning.meaning}")
    else:
        meaning = CODES[options.code]
        print(f"{options.code}: {meaning.meaning}\nwhat to do: {meaning.remedy}")
    return EXIT_OK
