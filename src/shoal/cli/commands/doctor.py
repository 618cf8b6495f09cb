"""`shoal doctor`: whether this machine can work for a run, each finding with what to do about it."""

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import httpx2

from shoal.cli.commands.connectivity import in_words
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info, Stats
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL

TIMEOUT_S = 10.0
SAMPLE_BYTES = 4 << 20
"""What is fetched from each relay to measure it."""
SKEW_S = 120.0
"""Signatures bear 300 s; beyond this, something is wrong with the clock."""
MIN_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: Literal["good", "weak", "bad"]
    """`weak` works, but not well; `bad` does not work."""
    words: str
    remedy: str = ""


def examine(url: str, dir: Path) -> list[Finding]:
    """Every finding, the machine first, then the run."""
    findings = [_python(), _device(), _memory(), _folder(dir)]
    with httpx2.Client(base_url=url, timeout=TIMEOUT_S) as http:
        try:
            info = Info.parse(http.get("/v1/info").raise_for_status().content)
            stats = Stats.parse(http.get("/v1/stats").raise_for_status().content)
        except (httpx2.HTTPError, Rejected) as error:
            words = f"{url} does not answer as a coordinator does: {in_words(error)}"
            return [*findings, Finding("coordinator", "bad", words, "check the URL, a proxy, a firewall")]
        findings += [_protocol(info), _clock(info), _admission(info)]
        findings += _weights(http, info, stats, dir)
    return findings


def _python() -> Finding:
    return Finding(
        "python", "good", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def _device() -> Finding:
    try:
        import torch
    except ModuleNotFoundError:
        return Finding("device", "bad", "torch is not installed", "pip install 'shoal-rl[torch]'")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return Finding(
            "device", "good", f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB: use --device cuda"
        )
    return Finding(
        "device",
        "weak",
        f"no CUDA device; {os.cpu_count()} CPU cores",
        "fine for small models; leases are sized to it",
    )


def _memory() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = f"{memory / 2**30:.1f} GiB"
    if memory < MIN_MEMORY:
        return Finding("memory", "bad", words, "at least 1 GiB is needed")
    return Finding("memory", "good", words)


def _folder(dir: Path) -> Finding:
    try:
        dir.mkdir(parents=True, exist_ok=True)
        probe = dir / f"write-test.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return Finding("folder", "bad", f"{dir}: {error.strerror}", "choose another --dir")
    return Finding("folder", "good", f"{dir}, {shutil.disk_usage(dir).free / 1e9:.1f} GB free")


def _protocol(info: Info) -> Finding:
    words = f"run {info.spec.run!r}, {info.software}, protocol {info.protocol}"
    if info.protocol != PROTOCOL:
        return Finding(
            "coordinator", "bad", words, f"this is protocol {PROTOCOL}: install the version the run uses"
        )
    return Finding(
        "coordinator", "weak" if info.finished else "good", words + (", finished" if info.finished else "")
    )


def _clock(info: Info) -> Finding:
    offset_s = info.server_time_s - time.time()
    words = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator"
    if abs(offset_s) > SKEW_S:
        return Finding("clock", "bad", words, "set the clock: signed requests bear five minutes at most")
    return Finding("clock", "good", words)


def _admission(info: Info) -> Finding:
    remedies = {
        "invite": "ask the operator for an invitation: --invite CODE",
        "allow": "send the operator the node's id: shoal whoami",
        "work": f"nothing: joining spends about 2^{info.work_bits} hashes once",
        "stake": "the operator must enter a stake for the node or its owner",
    }
    remedy = remedies.get(info.admission, "")
    return Finding("admission", "weak" if remedy else "good", info.admission, remedy)


def _weights(http: httpx2.Client, info: Info, stats: Stats, dir: Path) -> list[Finding]:
    if info.newest_version is None:
        return [
            Finding("weights", "weak", "the trainer has not published version 0 yet", "wait, or come later")
        ]
    try:
        sealed = Sealed[Manifest].parse(http.get("/v1/policies/latest").raise_for_status().content)
        manifest = sealed.open(info.run_key)
    except (httpx2.HTTPError, Rejected) as error:
        return [Finding("weights", "bad", f"no manifest: {error}", "ask the operator")]
    needed, free = manifest.num_bytes * (info.spec.max_lag + 2), shutil.disk_usage(dir).free
    words = f"version {manifest.version}: {manifest.num_bytes / 1e6:.1f} MB, {_size(needed)} for all that are kept"
    disk = Finding("disk", "good", words)
    if free < needed:
        disk = Finding("disk", "bad", f"{words}; {_size(free)} free", "free some, or choose another --dir")
    live = [relay for relay in stats.relays if relay.liveness != "offline"]
    if not live:
        return [disk, Finding("relays", "bad", "none is live", "ask the operator")]
    return [disk, *(_relay(relay.url, manifest) for relay in live)]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _relay(url: str, manifest: Manifest) -> Finding:
    """How fast this relay's bytes come: the run's own, not some speed test's."""
    # What is sent of most versions is a delta; the file itself is on no relay then.
    sent = manifest.payloads
    if not sent:
        return Finding("relay", "good", f"{url}: nothing of version {manifest.version} to measure it by")
    largest = max(sent, key=lambda entry: entry.num_bytes)
    path = f"{url}/versions/{manifest.version}/{largest.name}"
    size = min(SAMPLE_BYTES, largest.num_bytes)
    began_s = time.monotonic()
    try:
        answer = httpx2.get(path, headers={"Range": f"bytes=0-{size - 1}"}, timeout=TIMEOUT_S)
    except httpx2.HTTPError as error:
        return Finding(
            "relay", "bad", f"{url}: {type(error).__name__}: {error}", "a firewall? workers only dial out"
        )
    took_s = max(1e-3, time.monotonic() - began_s)
    if answer.status_code == 401:
        return Finding("relay", "good", f"{url}: for members of the run, not measured; joining gets a ticket")
    if not answer.is_success:
        return Finding(
            "relay", "weak", f"{url}: HTTP {answer.status_code}", "it may still be mirroring; others serve"
        )
    got = len(answer.content)
    # A few bytes say how far away it is, not how wide the way.
    fast = (
        f"{got / 1e3:.0f} kB in {took_s:.2f} s" if got < 1 << 20 else f"{got * 8 / took_s / 1e6:.0f} Mbit/s"
    )
    return Finding("relay", "good", f"{url}: {fast}")


MARKS = {"good": "ok  ", "weak": "weak", "bad": "BAD "}


def print_findings(findings: list[Finding], say: Callable[[str], None] = print) -> None:
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        say(f"  {MARKS[finding.state]} {finding.name:<12} {finding.words}{remedy}")


def doctor(options: argparse.Namespace) -> int:
    with progress(f"looking at this machine and at {options.url}"):
        findings = examine(options.url, options.dir)
    if options.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=1)
        print()
    else:
        print_findings(findings)
    return EXIT_FAILED if any(finding.state == "bad" for finding in findings) else EXIT_OK
