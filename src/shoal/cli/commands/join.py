"""Commands of a contributor: join, status, whoami, pause, leave, remove and check-local.

A node's folder (default: shoal-node) holds its key, the run it works for, and node.json: which coordinator it joined.
"""

import argparse
import hashlib
import json
import os
import secrets
import shutil
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.commands.doctor import examine, print_findings
from shoal.cli.public_api import PublicApi
from shoal.cli.run.confined_worker import confinement, run_confined
from shoal.cli.run.roles import check_engine_options, limit_thread_spinning
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, last_line
from shoal.cli.ui.join_view import JoinView, single_keys
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.questions import STOP_POLL_S, agrees
from shoal.cli.ui.values import byte_size, check_device
from shoal.cli.ui.view import shown_trust
from shoal.files import folder_bytes, write_bytes_atomically
from shoal.landlock import Confinement, Protection
from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.net.waiting import Stopped
from shoal.rollout.worker.worker_folder import LOG_FILE, NODE_FILES, PAUSE_NOW, is_in_use
from shoal.telemetry import Log, printable
from shoal.wire.codes import ACCEPTED, CODES, Rejected
from shoal.wire.delegation import read_delegation
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Verdict
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Claim, Info, Leave, NodeView, OpenSession, Recorded, RunList, Session, Stats
from shoal.wire.record import Sealed
from shoal.wire.requirements import pick
from shoal.wire.run_spec import RunSpec

JOINED = "node.json"
TIMEOUT_S = 10.0
VIEW_TIMEOUT_S = 2.0
"""Timeout of the view's requests. Short, because the view is not redrawn while it waits."""


# -- join ---------------------------------------------------------------------------------------------------


def join(options: argparse.Namespace, stop: threading.Event) -> int:
    """Checks the machine and the run, asks for consent, then works until the run is finished."""
    limit_thread_spinning()
    if is_in_use(options.dir):
        raise ValueError(f"{options.dir} is in use by another worker; stop that one or choose another --dir")
    check_device(options.device)
    check_engine_options(options)
    _check_stop(stop)
    options.url = _choose_run(options)
    print(f"Checking this machine and {options.url} ...")
    with progress("checking"):
        findings = examine(options.url, options.dir)
    _check_stop(stop)
    print_findings(findings)
    if bad := [finding for finding in findings if finding.state == "bad"]:
        print(
            printable(f"Not joining: {bad[0].name}: {bad[0].words}")
            + (f" -> {bad[0].remedy}" if bad[0].remedy else "")
        )
        return EXIT_FAILED
    key = _load_or_create_key(options.dir)
    with PublicApi(options.url, timeout_s=TIMEOUT_S) as api:
        info, stats = api.read("/v1/info", Info), api.read("/v1/stats", Stats)
        uses = _uses(options, info, _version_bytes(api, info))
    rules = confinement(
        options.url, options.dir, info, stats, engine=options.engine, allow_ports=tuple(options.allow_port)
    )
    print(consent(info, key.public, options.url, options.dir, rules.protections(), uses))
    if not options.yes and not agrees(
        "Join? [y/N] ",
        stop,
        otherwise="standard input is not a terminal; read the summary above and join with --yes",
    ):
        print("Nothing was sent.")
        return EXIT_FAILED
    _check_stop(stop)
    joined = json.dumps({"coordinator": options.url})
    write_bytes_atomically(options.dir / JOINED, f"{joined}\n".encode())
    if options.invite:
        write_bytes_atomically(options.dir / "invite.txt", options.invite.encode())
    print(
        "Joining; the first lease is the qualification. Ctrl-C stops; joining again continues unfinished work."
    )
    if options.plain or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return run_confined(options, rules, stop)
    return _run_with_view(options, rules, stop, key.public)


def _run_with_view(options: argparse.Namespace, rules: Confinement, stop: threading.Event, node: str) -> int:
    """Runs the worker with its log in a file and a few lines about it at the terminal."""

    def ask() -> tuple[Info, NodeView | None] | None:
        try:
            found = api.find(f"/v1/nodes/{node}")
            return api.read("/v1/info", Info), None if found is None else NodeView.parse(found)
        except (Unreachable, Rejected):
            return None

    console = Console(highlight=False)
    with PublicApi(options.url, timeout_s=VIEW_TIMEOUT_S) as api, single_keys():
        with JoinView(options.dir, ask, console, url=options.url, stop=stop) as view:
            code = run_confined(options, rules, stop, view.poll)
        last = ask()
    log = options.dir / LOG_FILE
    if last is not None and last[1] is not None:
        print(
            f"credit {last[1].credit:,}; accepted {last[1].accepted}, refused {last[1].rejected}, void {last[1].void}"
        )
    if code not in (EXIT_OK, EXIT_INTERRUPTED):
        print(f"the worker ended: {printable(last_line(log))} (log: {log})", file=sys.stderr)
    elif code == EXIT_INTERRUPTED:
        print(
            f"stopped. Continue: shoal join {options.url} --dir {options.dir}. Delete all of it: shoal remove --dir {options.dir}"
        )
    return code


def _version_bytes(api: PublicApi, info: Info) -> int | None:
    """Returns the size of the newest version; None if there is none yet."""
    if info.newest_version is None:
        return None
    try:
        return Sealed[Manifest].parse(api.get("/v1/policies/latest")).open(info.run_key).num_bytes
    except (Unreachable, Rejected):
        return None


def _uses(options: argparse.Namespace, info: Info, version_bytes: int | None) -> str:
    """Returns what the worker will use of this machine: its limits, and what follows from the size of a version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = min(options.cores or cores, cores)
    memory = (
        "as much memory as it needs"
        if options.memory_gb is None
        else f"at most {options.memory_gb:g} GB of memory"
    )
    rates = ", ".join(
        f"at most {rate:g} Mbit/s {way}"
        for rate, way in ((options.download_mbit, "down"), (options.upload_mbit, "up"))
        if rate is not None
    )
    needed = None if version_bytes is None else (info.spec.max_lag + 2) * version_bytes
    if options.disk_gb is not None:
        disk = f"at most {options.disk_gb:g} GB of disk"
        if version_bytes is not None and options.disk_gb * 1e9 < 2 * version_bytes:
            raise ValueError(
                f"--disk-gb {options.disk_gb:g} is too little: two versions of {version_bytes / 1e9:.2f} GB must fit; "
                f"use at least --disk-gb {2.2 * version_bytes / 1e9:.2g}"
            )
    else:
        disk = "disk for the weights" if needed is None else f"about {byte_size(needed)} of disk"
    first = (
        ""
        if version_bytes is None
        else f"; {byte_size(version_bytes)} to download first, then mostly changes"
    )
    return f"{used} of {cores} cores, {memory}, {disk}{first}\n            {rates or 'no limit of bandwidth'}"


def _choose_run(options: argparse.Namespace) -> str:
    """Returns the URL of the run to join: the coordinator's only run, or one that this machine is suitable for."""
    from shoal.rollout.engine.selection import machine_capabilities

    try:
        with PublicApi(options.url, timeout_s=TIMEOUT_S) as api:
            runs = RunList.parse(api.get("/v1/runs")).runs
    except (Unreachable, Rejected):
        return str(options.url)  # the checks that follow report what is wrong there
    if len(runs) == 1 and options.run in (None, runs[0].run):
        return str(options.url)
    chosen = pick(runs, machine_capabilities(options.device), options.run)
    print(f"This machine joins {chosen.run!r}, one of {len(runs)} runs at {options.url}.")
    return f"{options.url}{chosen.path}"


def _load_or_create_key(folder: Path) -> Key:
    path = folder / "node.key"
    new = not path.exists()
    key = Key.load_or_create(path)
    if new:
        print(
            f"Made this node's key: {path}. The key is the node: its owner has the credit, and a lost key cannot be replaced.\n"
            f"  Back it up:  shoal identity backup FILE --dir {folder}"
        )
    return key


def consent(info: Info, node: str, url: str, folder: Path, protections: list[Protection], uses: str) -> str:
    """Returns what will run, what it uses, what it is kept from, what is sent and kept, for the user to agree to."""
    spec = info.spec
    limits = "\n            ".join(str(protection) for protection in protections)
    return f"""
What joining means
  run       {printable(spec.run)} at {url}, task {printable(spec.task.name)}; its key is {info.run_key[:16]}...
  node      {node}
  runs      Shoal's own worker with the run's weights and tokenizer, which are read as data. No file of the run is executed.
  uses      {uses}
  limits    {limits}
  sent      generated tokens, their log-probs and proofs; phase and speed with each heartbeat; software version.
            No file of yours, no name, no address beyond what any web request shows. No port is opened.
  kept      up to {spec.max_lag + 2} versions of the weights, the key and the last file, in {folder}
  credit    verified output tokens x {info.credit_factor:g}, final after {info.hold_s / 3600:g} h; a refused submission earns nothing,
            two refused ones end it. The weights and the ledger are public to everybody in the run.
"""


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped("stopped before joining")


# -- status, whoami, pause, leave ---------------------------------------------------------------------------


def status(options: argparse.Namespace, stop: threading.Event) -> int:
    key, url = _joined(options.dir)
    with PublicApi(url, timeout_s=TIMEOUT_S) as api:
        info, found = api.read("/v1/info", Info), api.find(f"/v1/nodes/{key.public}")
    view = None if found is None else NodeView.parse(found)
    if options.json:
        node = None if view is None else view.model_dump(mode="json")
        shown = {
            "run": info.spec.run,
            "coordinator": url,
            "newest_version": info.newest_version,
            "node": node,
        }
        print(json.dumps(shown))
        return EXIT_FAILED if view is None else EXIT_OK
    print(f"run {info.spec.run!r} at {url}: version {info.newest_version} of {info.spec.last_version}")
    if view is None:
        print(f"node {key.public[:16]}: not enrolled yet")
        return EXIT_FAILED
    final = view.credit - view.credit_held
    print(
        printable(
            f"node {view.node[:16]}: {shown_trust(view)}, {view.liveness}; {view.phase or 'no phase yet'}"
        )
    )
    print(f"  accepted {view.accepted}, refused {view.rejected}, void {view.void}")
    print(f"  credit {view.credit}: {final} final, {view.credit_held} held")
    if view.last_code is not None:
        detail = f": {view.last_detail}" if view.last_detail else ""
        print(printable(f"  last verdict: {view.last_code}{detail}"))
        if view.last_code in CODES:
            print(f"  what to do: {CODES[view.last_code].remedy}")
    if (options.dir / "paused").exists():
        print("  paused; `shoal pause --off` continues")
    return EXIT_OK


def whoami(options: argparse.Namespace, stop: threading.Event) -> int:
    known = {"node": load_key(options.dir).public, "owner": "itself"}
    path = options.dir / "delegation.json"
    if path.exists():
        delegation = read_delegation(path)
        until = time.strftime("%Y-%m-%d", time.gmtime(delegation.body.not_after_s))
        known["owner"] = f"{delegation.key}, until {until}"
    if (options.dir / JOINED).exists():
        known["coordinator"] = _joined(options.dir)[1]
    if (options.dir / "run.json").exists():
        run = _read_json(options.dir / "run.json")
        known["run"] = f"{run.get('run')}, key {run.get('run_key')}"
    if options.json:
        print(json.dumps(known))
    else:
        print("\n".join(f"{name:<12} {value}" for name, value in known.items()))
    return EXIT_OK


def pause(options: argparse.Namespace, stop: threading.Event) -> int:
    _joined(options.dir)
    flag = options.dir / "paused"
    if options.off:
        flag.unlink(missing_ok=True)
        print(
            "continuing" if is_in_use(options.dir) else "not paused any more; `shoal join` starts the worker"
        )
    elif not is_in_use(options.dir):
        flag.touch()
        print(
            f"no worker runs in {options.dir}; the next one starts paused. `shoal pause --off` takes that back"
        )
    elif options.now:
        write_bytes_atomically(flag, PAUSE_NOW.encode())
        print(
            "pausing at once; the current lease is given back and earns nothing. `shoal pause --off` continues"
        )
    else:
        flag.touch()
        print("pausing after the current lease; `shoal pause --off` continues")
    return EXIT_OK


def leave(options: argparse.Namespace, stop: threading.Event) -> int:
    if _leave_run(options.dir, stop):
        print("left; joining again brings the node back")
    else:
        print("the worker leaves the run after it has delivered the current lease")
    return EXIT_OK


def _leave_run(folder: Path, stop: threading.Event) -> bool:
    """Leaves the run and returns True; if a worker runs in the folder, tells it to leave and returns False."""
    key, url = _joined(folder)
    if is_in_use(folder):
        (folder / "leaving").touch()
        return False
    with closing(SignedClient(url, key, log=Log("leave"), stop=stop)) as client:
        session = client.call("POST", "/v1/session", OpenSession(software="shoal"), Session)
        client.call("POST", "/v1/leave", Leave(epoch=session.epoch), Recorded)
    return True


def remove(options: argparse.Namespace, stop: threading.Event) -> int:
    """Leaves the run and deletes what a node's folder holds. Files that Shoal did not write there are kept."""
    key = load_key(options.dir)
    size = folder_bytes(options.dir)
    lost = "its key is kept" if options.keep_key else "its key too, and with it the claim to its credit"
    print(
        f"This leaves the run and deletes node {key.public[:16]} in {options.dir} ({byte_size(size)}), {lost}."
    )
    if not options.yes and not agrees(
        "Delete? [y/N] ",
        stop,
        otherwise="standard input is not a terminal; delete without a question with --yes",
    ):
        print("Nothing was deleted.")
        return EXIT_FAILED
    _leave_before_removal(options, stop)
    for name in set(NODE_FILES) - ({"node.key"} if options.keep_key else set()):
        path = options.dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if left := sorted(path.name for path in options.dir.iterdir()):
        print(f"kept in {options.dir}: {', '.join(left)}")
    else:
        options.dir.rmdir()
    print(f"deleted {byte_size(size)}. To uninstall the program: pip uninstall shoal-rl")
    return EXIT_OK


def _leave_before_removal(options: argparse.Namespace, stop: threading.Event) -> None:
    """Leaves the run, and waits for a worker that runs in the folder to deliver its lease and end."""
    is_running = is_in_use(options.dir)
    if (options.dir / JOINED).exists():
        try:
            _leave_run(options.dir, stop)
        except (Unreachable, Refused) as error:
            print(f"the coordinator was not told, so the node's leases there expire by themselves: {error}")
    elif is_running:
        raise ValueError(f"a worker runs in {options.dir}, which `shoal join` did not start; stop it first")
    with progress("waiting for the worker to end"):
        while is_in_use(options.dir):
            if stop.wait(STOP_POLL_S):
                raise Stopped("stopped before anything was deleted")


def load_key(folder: Path) -> Key:
    """Returns the key of the node in a folder; raises ValueError if there is none."""
    if not (folder / "node.key").exists():
        raise ValueError(f"{folder} holds no node; `shoal join URL` makes one, --dir names another folder")
    return Key.load(folder / "node.key")


def _joined(folder: Path) -> tuple[Key, str]:
    """Returns the node's key and the URL of the coordinator it joined."""
    key, path = load_key(folder), folder / JOINED
    if not path.exists():
        raise ValueError(f"{folder} has joined no run yet; join one with: shoal join URL --dir {folder}")
    url = _read_json(path).get("coordinator")
    if not isinstance(url, str):
        raise ValueError(
            f"{path} does not name a coordinator; join again with: shoal join URL --dir {folder}"
        )
    return key, url


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read; delete it, and join or delegate again")
    return found


# -- check-local --------------------------------------------------------------------------------------------


def check_local(options: argparse.Namespace, stop: threading.Event) -> int:
    """Prints the verdict that a validator would give on a file of this node."""
    limit_thread_spinning()
    file = options.file or options.dir / "last" / "rollouts.parquet"
    lease = options.lease or file.with_name("lease.json")
    for path in (file, lease):
        if not path.exists():
            raise ValueError(f"no {path}; a worker keeps its last file and lease in its folder, under last/")
    _, url = _joined(options.dir)
    with PublicApi(url, timeout_s=TIMEOUT_S) as api:
        spec = api.read("/v1/info", Info).spec
    with progress(f"checking {file.name} like a validator"):
        verdict = check_file(file, lease, options.dir / "versions", spec)
    if options.json:
        print(json.dumps({"code": verdict.code, "detail": verdict.detail}))
    else:
        print(f"{verdict.code}: {verdict.detail}")
        if verdict.code in CODES:
            print(f"what to do: {CODES[verdict.code].remedy}")
    return EXIT_OK if verdict.code == ACCEPTED else EXIT_FAILED


def check_file(file: Path, lease_file: Path, versions: Path, spec: RunSpec) -> Verdict:
    """Returns the verdict of the validator's own code.

    It cannot find copies of other nodes' files, which only the coordinator sees, and it does not grade answers of tasks that
    read files, because those files are not public.
    """
    from shoal.model.load_model import DTYPES, load_causal
    from shoal.model.tokenizer import load_tokenizer
    from shoal.swarm.validator.judge import judge
    from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
    from shoal.swarm.validator.table_reader import TableReader

    lease, version = read_lease(lease_file)
    folder = versions / f"v{version}"
    if not folder.exists():
        raise ValueError(
            f"version {version}, which made {file}, is no longer in {versions}; check a newer file"
        )
    data = file.read_bytes()
    claim = Claim(
        lease=lease,
        policy_version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        received_at_s=time.time(),
        deadline_s=time.time() + 3600,
        copy_of=None,
    )
    decoder = load_causal(folder, dtype=DTYPES[spec.compute_dtype])
    policy = LoadedPolicy(version, decoder, load_tokenizer(folder))
    try:
        with TableReader() as reader:
            return judge(data, claim, spec, policy, reader=reader, control_seed=secrets.randbits(64))
    except CannotCheck as error:
        raise ValueError(
            f"{file} cannot be checked on this machine: {error}; if it needs more memory, end other programs"
        ) from None


def read_lease(path: Path) -> tuple[Lease, int]:
    """Returns the lease of a worker's last file, and the version that made it. Raises ValueError for another file."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Lease.parse(json.dumps(kept["lease"])), int(kept["policy_version"])
    except (ValueError, KeyError, TypeError, Rejected) as error:
        raise ValueError(
            f"{path} is not the lease of a file ({type(error).__name__}: {error}); give the lease.json that the worker wrote beside it"
        ) from None
