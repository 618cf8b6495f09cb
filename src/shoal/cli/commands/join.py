"""Commands of a contributor: join, status, whoami, pause, leave, identity and check-local.

A node's folder (default: shoal-node) holds its key, the run it works for, and node.json: which coordinator it joined.
"""

import argparse
import hashlib
import json
import os
import secrets
import select
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.cli.public_api import PublicApi
from shoal.cli.run.confined_worker import confinement, run_confined
from shoal.cli.run.roles import limit_thread_spinning
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import check_device
from shoal.files import write_bytes_atomically
from shoal.landlock import Protection
from shoal.net.http_client import SignedClient, Unreachable
from shoal.net.waiting import Stopped
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED, CODES, Rejected
from shoal.wire.delegation import delegate as sign_delegation
from shoal.wire.delegation import read_delegation, write_relay_key
from shoal.wire.keys import PUBLIC_KEY, Key
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim, Info, Leave, NodeView, OpenSession, Recorded, RunList, Session, Stats
from shoal.wire.requirements import pick
from shoal.wire.run_spec import RunSpec

JOINED = "node.json"
KEPT = ("node.key", JOINED, "run.json", "delegation.json")
"""Files of a node's folder that a backup holds."""
TIMEOUT_S = 10.0
STOP_POLL_S = 0.1


# -- join ---------------------------------------------------------------------------------------------------


def join(options: argparse.Namespace, stop: threading.Event) -> int:
    """Checks the machine and the run, asks for consent, then works until the run is finished."""
    limit_thread_spinning()
    from shoal.cli.commands.doctor import examine, print_findings
    from shoal.rollout.engine.selection import check_engine
    from shoal.rollout.worker.worker_folder import is_in_use

    if is_in_use(options.dir):
        raise ValueError(f"{options.dir} is in use by another worker; stop that one or choose another --dir")
    check_device(options.device)
    check_engine(options.engine, device=options.device, tensor_parallel=options.tensor_parallel)
    _check_stop(stop)
    options.url = _choose_run(options)
    print(f"Checking this machine and {options.url} ...")
    with progress("checking"):
        findings = examine(options.url, options.dir)
    _check_stop(stop)
    print_findings(findings)
    if bad := [finding for finding in findings if finding.state == "bad"]:
        print(
            f"Not joining: {bad[0].name}: {bad[0].words}" + (f" -> {bad[0].remedy}" if bad[0].remedy else "")
        )
        return EXIT_FAILED
    key = _load_or_create_key(options.dir)
    with PublicApi(options.url, timeout_s=TIMEOUT_S) as api:
        info, stats = api.read("/v1/info", Info), api.read("/v1/stats", Stats)
    rules = confinement(
        options.url, options.dir, info, stats, engine=options.engine, allow_ports=tuple(options.allow_port)
    )
    print(consent(info, key.public, options.url, options.dir, rules.protections()))
    if not options.yes and not _ask_consent(stop):
        print("Nothing was sent.")
        return EXIT_FAILED
    _check_stop(stop)
    _write_text(options.dir / JOINED, json.dumps({"coordinator": options.url}) + "\n")
    if options.invite:
        _write_text(options.dir / "invite.txt", options.invite)
    print(
        "Joining; the first lease is the qualification. Ctrl-C stops; joining again continues unfinished work."
    )
    return run_confined(options, rules, stop)


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


def consent(info: Info, node: str, url: str, folder: Path, protections: list[Protection]) -> str:
    """Returns what will run, what it is kept from, what is sent and what is kept, for the user to agree to."""
    spec = info.spec
    limits = "\n            ".join(str(protection) for protection in protections)
    return f"""
What joining means
  run       {spec.run} at {url}, task {spec.task.name}; its key is {info.run_key[:16]}...
  node      {node}
  runs      Shoal's own worker with the run's weights and tokenizer, which are read as data. No file of the run is executed.
  limits    {limits}
  sent      generated tokens, their log-probs and proofs; phase and speed with each heartbeat; software version.
            No file of yours, no name, no address beyond what any web request shows. No port is opened.
  kept      up to {spec.max_lag + 2} versions of the weights, the key and the last file, in {folder}
  credit    verified output tokens x {info.credit_factor:g}, final after {info.hold_s / 3600:g} h; a refused submission earns nothing,
            two refused ones end it. The weights and the ledger are public to everybody in the run.
"""


def _ask_consent(stop: threading.Event) -> bool:
    if not sys.stdin.isatty():
        raise ValueError("standard input is not a terminal; read the summary above and join with --yes")
    print("Join? [y/N] ", end="", flush=True)
    while not select.select([sys.stdin], [], [], STOP_POLL_S)[0]:
        _check_stop(stop)  # Python's input() would keep waiting for an answer after Ctrl-C
    return sys.stdin.readline().strip().lower() in ("y", "yes")


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
    print(f"node {view.node[:16]}: {view.trust}, {view.liveness}; {view.phase or 'no phase yet'}")
    print(f"  accepted {view.accepted}, refused {view.rejected}, void {view.void}")
    print(f"  credit {view.credit}: {final} final, {view.credit_held} held")
    if view.last_code is not None:
        print(f"  last verdict: {view.last_code}" + (f": {view.last_detail}" if view.last_detail else ""))
        if view.last_code in CODES:
            print(f"  what to do: {CODES[view.last_code].remedy}")
    if (options.dir / "paused").exists():
        print("  paused; `shoal pause --off` continues")
    return EXIT_OK


def whoami(options: argparse.Namespace, stop: threading.Event) -> int:
    known = {"node": _load_key(options.dir).public, "owner": "itself"}
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
        print("continuing")
    else:
        flag.touch()
        print("pausing after the current lease; `shoal pause --off` continues")
    return EXIT_OK


def leave(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.rollout.worker.worker_folder import is_in_use

    key, url = _joined(options.dir)
    if is_in_use(options.dir):
        (options.dir / "leaving").touch()
        print("the worker leaves the run after it has delivered the current lease")
        return EXIT_OK
    with closing(SignedClient(url, key, log=Log("leave"), stop=stop)) as client:
        session = client.call("POST", "/v1/session", OpenSession(software="shoal"), Session)
        client.call("POST", "/v1/leave", Leave(epoch=session.epoch), Recorded)
    print("left; joining again brings the node back")
    return EXIT_OK


def _load_key(folder: Path) -> Key:
    if not (folder / "node.key").exists():
        raise ValueError(f"{folder} holds no node; `shoal join URL` makes one, --dir names another folder")
    return Key.load(folder / "node.key")


def _joined(folder: Path) -> tuple[Key, str]:
    """Returns the node's key and the URL of the coordinator it joined."""
    key, path = _load_key(folder), folder / JOINED
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


# -- identity -----------------------------------------------------------------------------------------------


def backup(options: argparse.Namespace, stop: threading.Event) -> int:
    key = _load_key(options.dir)
    kept = {name: (options.dir / name).read_text() for name in KEPT if (options.dir / name).exists()}
    try:
        # Not `write_atomically`, which would replace an existing file: it may be another node's only backup.
        descriptor = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{options.file} exists and is not overwritten; choose another name") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(file.fileno())
    print(f"node {key.public[:16]} is backed up in {options.file}; keep it where nobody else can read it")
    return EXIT_OK


def restore(options: argparse.Namespace, stop: threading.Event) -> int:
    if (options.dir / "node.key").exists():
        raise ValueError(f"{options.dir} already holds a node; choose another --dir")
    try:
        kept = json.loads(options.file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or "node.key" not in kept or not set(kept) <= set(KEPT):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{options.file} is not a backup of a node; `shoal identity backup` makes one"
        ) from None
    for name, text in kept.items():
        _write_text(options.dir / name, text, mode=0o600)
    print(f"node {Key.load(options.dir / 'node.key').public[:16]} is restored in {options.dir}")
    return EXIT_OK


def delegate(options: argparse.Namespace, stop: threading.Event) -> int:
    if not PUBLIC_KEY.fullmatch(options.node):
        raise ValueError(
            f"{options.node!r} is not a node's id; give the 64 hex digits that `shoal whoami` prints"
        )
    new = not options.owner.exists()
    owner = Key.load_or_create(options.owner)
    if new:
        print(f"Made an owner's key: {options.owner}. Keep it offline and backed up; nodes never need it.")
    delegation = sign_delegation(owner, options.node, now_s=time.time(), days=options.days)
    _write_text(options.out, delegation.model_dump_json() + "\n")
    print(f"owner {owner.public}\nwrote {options.out}; copy it into the node's folder as delegation.json")
    return EXIT_OK


def delegate_relay(options: argparse.Namespace, stop: threading.Event) -> int:
    """Writes the key of one relay and its delegation. A key that is in the folder already gets a newer delegation."""
    key = write_relay_key(Key.load(options.owner), options.url, options.out, days=options.days)
    print(
        f"relay {Key.load(key).public[:16]} at {options.url}: copy {options.out} to its host and start it there with\n"
        f"  shoal relay --key {key} --coordinator URL --dir DIR"
    )
    return EXIT_OK


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
    from shoal.swarm.validator.recompute import LoadedPolicy
    from shoal.swarm.validator.table_reader import TableReader

    kept = json.loads(lease_file.read_text(encoding="utf-8"))
    lease, version = Lease.parse(json.dumps(kept["lease"])), int(kept["policy_version"])
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
    with TableReader() as reader:
        return judge(data, claim, spec, policy, reader=reader, control_seed=secrets.randbits(64))


def _write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    write_bytes_atomically(path, text.encode(), mode=mode)
