"""What `shoal join URL` and the other commands of a contributor do. join.py has what they are called with.

A node's folder (default: shoal-node) holds its key, the run it works for, and node.json: which coordinator it joined.
"""

import argparse
import contextlib
import json
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal.cli.run.roles import check_device, wait_quietly
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.net.waiting import Stopped
from shoal.wire.codes import CODES, Rejected
from shoal.wire.keys import Key
from shoal.wire.messages import Info, NodeView, RunList
from shoal.wire.requirements import pick

JOINED = "node.json"
TIMEOUT_S = 10.0
LOOK_S = 0.1


# -- joining ----------------------------------------------------------------------------------------------


def join(options: argparse.Namespace, stop: threading.Event) -> int:
    wait_quietly()
    from shoal.cli.commands.doctor import examine, print_findings
    from shoal.rollout.engine.factory import check_engine
    from shoal.rollout.worker.worker_folder import is_held

    if is_held(options.dir):
        raise ValueError(f"{options.dir} is in use by another worker; stop that one or choose another --dir")
    check_device(options.device)
    check_engine(options.engine, device=options.device, tensor_parallel=options.tensor_parallel)
    _heed(stop)
    options.url = _choose_run(options)
    print(f"Looking at this machine and at {options.url} ...")
    with progress("looking"):
        findings = examine(options.url, options.dir)
    _heed(stop)
    print_findings(findings)
    if bad := [finding for finding in findings if finding.state == "bad"]:
        print(
            f"Not joining: {bad[0].name}: {bad[0].words}" + (f" -> {bad[0].remedy}" if bad[0].remedy else "")
        )
        return EXIT_FAILED
    key = _key(options.dir)
    info = _ask_info(options.url)
    print(consent(info, key.public, options.url, options.dir))
    if not options.yes and not _agrees(stop):
        print("Nothing was sent.")
        return EXIT_FAILED
    _heed(stop)
    (options.dir / JOINED).write_text(json.dumps({"coordinator": options.url}) + "\n", encoding="utf-8")
    if options.invite:
        (options.dir / "invite.txt").write_text(options.invite, encoding="utf-8")
    print(
        "Joining; the first lease is the qualification. Ctrl-C stops, and what was begun is picked up again."
    )
    return _work(options, stop)


def _choose_run(options: argparse.Namespace) -> str:
    """The URL of the run to join: of the coordinator's own where it has one, else of one that this machine fits."""
    from shoal.net.http_client import Unreachable
    from shoal.rollout.worker.capabilities import capabilities

    try:
        runs = RunList.parse(_get(options.url, "/v1/runs")).runs
    except (Unreachable, Rejected):
        return str(options.url)  # what is wrong there, the doctor says
    if len(runs) == 1 and options.run in (None, runs[0].run):
        return str(options.url)
    chosen = pick(runs, capabilities(options.device), options.run)
    print(f"Of {len(runs)} runs at {options.url} this machine takes {chosen.run!r}.")
    return f"{options.url}{chosen.path}"


def _work(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.roles import worker

    options.coordinator, options.lie, options.no_prefetch = options.url, None, False
    return worker(options, stop)


def _key(dir: Path) -> Key:
    path = dir / "node.key"
    new = not path.exists()
    key = Key.load_or_create(path)
    if new:
        print(
            f"Made this node's key: {path}. It is the node: whoever has it has its credit, and nobody can make it again.\n"
            f"  Back it up:  shoal identity backup FILE --dir {dir}"
        )
    return key


def consent(info: Info, node: str, url: str, dir: Path) -> str:
    """What will run and what is sent, in words."""
    spec = info.spec
    return f"""
What joining means
  run       {spec.run} at {url}, task {spec.task.name}; its key is {info.run_key[:16]}...
  node      {node}
  runs      Shoal's own worker with the run's weights (safetensors: data, never code). Nothing else is executed.
  sent      generated tokens, their log-probs and proofs; phase and speed with each heartbeat; software version.
            No file of yours, no name, no address beyond what any web request shows. No port is opened.
  kept      up to {spec.max_lag + 2} versions of the weights, the key and the last file, in {dir}
  credit    verified output tokens x {info.credit_factor:g}, final after {info.hold_s / 3600:g} h; a refused submission earns nothing,
            two refused ones end it. The weights and the ledger are public to everybody in the run.
"""


def _heed(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped("stopped before joining")


def _agrees(stop: threading.Event) -> bool:
    if not sys.stdin.isatty():
        raise ValueError("nobody is at the terminal to agree; read the summary above and join with --yes")
    print("Join? [y/N] ", end="", flush=True)
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        _heed(stop)  # Python's own input() would wait on for an answer after Ctrl-C
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- afterwards -------------------------------------------------------------------------------------------


def _own_key(dir: Path) -> Key:
    if not (dir / "node.key").exists():
        raise ValueError(f"{dir} holds no node; shoal join URL makes one, --dir names another folder")
    return Key.load(dir / "node.key")


def _joined(dir: Path) -> tuple[Key, str]:
    """The node in `dir` and the coordinator it joined."""
    key, path = _own_key(dir), dir / JOINED
    if not path.exists():
        raise ValueError(f"{dir} has joined no run yet: shoal join URL --dir {dir}")
    url = _read(path).get("coordinator")
    if not isinstance(url, str):
        raise ValueError(f"{path} does not name a coordinator; shoal join URL --dir {dir} writes it anew")
    return key, url


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read; delete it, and join or delegate again")
    return found


def _get(url: str, path: str) -> bytes:
    import httpx2

    from shoal.net.http_client import Unreachable

    try:
        answer = httpx2.get(url + path, timeout=TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"{url}: {type(error).__name__}: {error}; check that the coordinator runs there"
        ) from None
    if answer.status_code == 404:
        return b""
    if not answer.is_success:
        raise Unreachable(f"{url}{path}: HTTP {answer.status_code}")
    return answer.content


def _ask_info(url: str) -> Info:
    return Info.parse(_get(url, "/v1/info"))


def status(options: argparse.Namespace, stop: threading.Event) -> int:
    key, url = _joined(options.dir)
    info, found = _ask_info(url), _get(url, f"/v1/nodes/{key.public}")
    if options.json:
        node = NodeView.parse(found).model_dump(mode="json") if found else None
        print(
            json.dumps(
                {
                    "run": info.spec.run,
                    "coordinator": url,
                    "newest_version": info.newest_version,
                    "node": node,
                }
            )
        )
        return EXIT_OK if found else EXIT_FAILED
    print(f"run {info.spec.run!r} at {url}: version {info.newest_version} of {info.spec.last_version}")
    if not found:
        print(f"node {key.public[:16]}: not enrolled yet")
        return EXIT_FAILED
    view = NodeView.parse(found)
    final = view.credit - view.credit_held
    print(f"node {view.node[:16]}: {view.trust}, {view.liveness}; {view.phase or 'no phase yet'}")
    print(f"  accepted {view.accepted}, refused {view.rejected}, void {view.void}")
    print(f"  credit {view.credit}: {final} final, {view.credit_held} held")
    if view.last_code is not None:
        print(f"  last verdict: {view.last_code}" + (f": {view.last_detail}" if view.last_detail else ""))
        if view.last_code in CODES:
            print(f"  what to do: {CODES[view.last_code].remedy}")
    if (options.dir / "paused").exists():
        print("  paused: shoal pause --off goes on")
    return EXIT_OK


def whoami(options: argparse.Namespace, stop: threading.Event) -> int:
    known = {"node": _own_key(options.dir).public, "owner": "itself"}
    delegation = options.dir / "delegation.json"
    if delegation.exists():
        known["owner"] = _owner(delegation)
    if (options.dir / JOINED).exists():
        known["coordinator"] = _joined(options.dir)[1]
    if (options.dir / "run.json").exists():
        run = _read(options.dir / "run.json")
        known["run"] = f"{run.get('run')}, key {run.get('run_key')}"
    print(
        json.dumps(known)
        if options.json
        else "\n".join(f"{name:<12} {value}" for name, value in known.items())
    )
    return EXIT_OK


def _owner(path: Path) -> str:
    from shoal.wire.delegation import read_delegation

    word = read_delegation(path)
    return f"{word.key}, until {time.strftime('%Y-%m-%d', time.gmtime(word.body.not_after_s))}"


def pause(options: argparse.Namespace, stop: threading.Event) -> int:
    _joined(options.dir)
    flag = options.dir / "paused"
    if options.off:
        flag.unlink(missing_ok=True)
        print("going on")
    else:
        flag.touch()
        print("pausing after the lease at hand; `shoal pause --off` goes on")
    return EXIT_OK


def leave(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.rollout.worker.worker_folder import is_held

    key, url = _joined(options.dir)
    if is_held(options.dir):
        (options.dir / "leaving").touch()
        print("the worker leaves when the lease at hand is delivered")
        return EXIT_OK
    from contextlib import closing

    from shoal.net.http_client import SignedClient
    from shoal.telemetry import Log
    from shoal.wire.messages import Leave, OpenSession, Recorded, Session

    with closing(SignedClient(url, key, log=Log("leave"), stop=stop)) as client:
        session = client.call("POST", "/v1/session", OpenSession(software="shoal"), Session)
        client.call("POST", "/v1/leave", Leave(epoch=session.epoch), Recorded)
    print("left; joining again brings the node back")
    return EXIT_OK


# -- identity ---------------------------------------------------------------------------------------------

KEPT = ("node.key", JOINED, "run.json", "delegation.json")


def backup(options: argparse.Namespace, stop: threading.Event) -> int:
    key = _own_key(options.dir)
    kept = {name: (options.dir / name).read_text() for name in KEPT if (options.dir / name).exists()}
    try:
        descriptor = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{options.file} exists and is left alone; choose another name") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(file.fileno())
    print(f"node {key.public[:16]} is in {options.file}: keep it where nobody else can read it")
    return EXIT_OK


def restore(options: argparse.Namespace, stop: threading.Event) -> int:
    if (options.dir / "node.key").exists():
        raise ValueError(f"{options.dir} holds a node already; choose another --dir")
    try:
        kept = json.loads(options.file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or "node.key" not in kept or not set(kept) <= set(KEPT):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{options.file} is no backup of a node; `shoal identity backup` makes one"
        ) from None
    options.dir.mkdir(parents=True, exist_ok=True)
    for name, text in kept.items():
        with os.fdopen(os.open(options.dir / name, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(text)
    print(f"node {Key.load(options.dir / 'node.key').public[:16]} is back in {options.dir}")
    return EXIT_OK


def delegate(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.wire.delegation import delegate as vouch
    from shoal.wire.keys import PUBLIC_KEY

    if not PUBLIC_KEY.fullmatch(options.node):
        raise ValueError(f"{options.node!r} is not a node's id: 64 hex digits, as shoal whoami prints")
    new = not options.owner.exists()
    owner = Key.load_or_create(options.owner)
    if new:
        print(f"Made an owner's key: {options.owner}. Keep it offline and backed up; nodes never need it.")
    word = vouch(owner, options.node, now_s=time.time(), days=options.days)
    options.out.write_text(word.model_dump_json() + "\n", encoding="utf-8")
    print(f"owner {owner.public}\nwrote {options.out}: put it into the node's folder as delegation.json")
    return EXIT_OK


# -- check-local ------------------------------------------------------------------------------------------


def check_local(options: argparse.Namespace, stop: threading.Event) -> int:
    wait_quietly()
    from shoal.cli.commands.check_local import check_file

    file = options.file or options.dir / "last" / "rollouts.parquet"
    lease = options.lease or file.with_name("lease.json")
    for path in (file, lease):
        if not path.exists():
            raise ValueError(f"no {path}; a worker keeps its last file and lease in its folder, under last/")
    _, url = _joined(options.dir)
    spec = _ask_info(url).spec
    with progress(f"checking {file.name} as a validator does"):
        verdict = check_file(file, lease, options.dir / "versions", spec)
    if options.json:
        print(json.dumps({"code": verdict.code, "detail": verdict.detail}))
        return EXIT_OK if verdict.code == "accepted" else EXIT_FAILED
    with contextlib.suppress(BrokenPipeError):
        print(f"{verdict.code}: {verdict.detail}")
        if verdict.code in CODES:
            print(f"what to do: {CODES[verdict.code].remedy}")
    return EXIT_OK if verdict.code == "accepted" else EXIT_FAILED
