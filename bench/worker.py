"""Measures how busy a worker keeps its device, over a run with real leases, uploads and downloads.

    python bench/worker.py                                     without and with prefetch; about two and a half minutes
    python bench/worker.py --mbit 100 --every 8 --seconds 120  a slower link, more frequent versions
    python bench/worker.py --model FOLDER --device cuda        another model on another device

Runs a whole swarm on loopback: coordinator, origin, relay, validator and a publisher of a new version every `--every`
seconds (sent whole) in a second process, and one worker here. The relay answers through a link of `--mbit`. Time counts
from the worker's first row; what came before (joining, the first download, building the model) is printed as start-up.
A node holds one lease at a time until it is trusted (three accepted submissions), so the first leases cannot be fetched
ahead; they count.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import torch
from throttle import Link

from shoal.model.builtin import create_model
from shoal.model.load_model import empty_decoder, load_decoder
from shoal.model.shape import read_shape
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.net.http_client import SignedClient
from shoal.net.http_server import listen
from shoal.net.waiting import Stopped
from shoal.rollout.engine.api import Behaviour
from shoal.rollout.worker.heartbeat import Activity, Utilisation
from shoal.rollout.worker.worker import WorkerConfig, start_worker
from shoal.rollout.worker.worker_folder import open_worker_folder
from shoal.shardcast import RelayConfig, RelayServer, VersionStore, publish, run_relay
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.http.server import Hosting, run_pool
from shoal.swarm.validator.claim_loop import ValidatorConfig, run_validator
from shoal.telemetry import Log
from shoal.wire.delegation import read_relay_delegation, write_relay_key
from shoal.wire.keys import Key
from shoal.wire.messages import Announce, Recorded, Stats, StepReport
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec

RUN = "busy"


def main() -> None:
    options = read_options()
    if options.serve:
        serve(options.serve, options)
        return
    for ahead in {"both": (False, True), "on": (True,), "off": (False,)}[options.ahead]:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
            measure(Path(scratch), ahead, options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ahead", choices=("off", "on", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=60.0, help="after the first row")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two versions")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link to the relay")
    parser.add_argument(
        "--latency-s", type=float, default=0.0, help="of the link to the coordinator, one way"
    )
    parser.add_argument("--model", default="", help="a folder; else a random Llama of --hidden and --layers")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="of a lease")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the worker ---------------------------------------------------------------------------------------------


def measure(scratch: Path, ahead: bool, options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", str(scratch)]
    with (scratch / "servers.log").open("w") as log:
        servers = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=log, text=True
        )
    assert servers.stdout is not None
    assert servers.stdin is not None
    try:
        url = servers.stdout.readline().strip()
        if not url:
            raise SystemExit((scratch / "servers.log").read_text()[-2000:])
        utilisation = work(url, scratch / "worker", ahead, options)
        report(url, utilisation, ahead)
    finally:
        servers.stdin.close()  # ends the process
        servers.wait(60)


def work(url: str, folder: Path, ahead: bool, options: argparse.Namespace) -> Utilisation:
    stop = threading.Event()
    config = WorkerConfig(
        coordinator=url,
        dir=folder,
        device=options.device,
        max_rows=options.rows,
        num_threads=options.threads,
        prefetch=ahead,
    )
    torch.set_num_threads(options.threads)
    with open_worker_folder(folder) as worker_folder:
        worker = start_worker(config, worker_folder, Behaviour(), stop=stop, log=Log("worker"))
        utilisation = worker.status.utilisation
        timer = threading.Thread(target=stop_later, args=(utilisation, options.seconds, stop), daemon=True)
        timer.start()
        with suppress(Stopped):
            worker.main_loop()
        worker.shutdown()
        return utilisation


def stop_later(utilisation: Utilisation, seconds: float, stop: threading.Event) -> None:
    """Sets `stop` this many seconds after the first row."""
    while utilisation.spent_s()[Activity.GENERATING] == 0:
        time.sleep(0.05)
    time.sleep(seconds)
    stop.set()


def report(url: str, utilisation: Utilisation, ahead: bool) -> None:
    stats = Stats.parse(httpx2.get(f"{url}/v1/stats").content)
    events = ledger(url)
    used = [event["body"]["policy_version"] for event in events if event["type"] == "submission.received"]
    newest, lags = 0, []
    for event in events:
        if event["type"] == "policy.published":
            newest = event["body"]["version"]
        elif event["type"] == "submission.received":
            lags.append(newest - event["body"]["policy_version"])
    print(
        f"fetching ahead {'on ' if ahead else 'off'}: busy {utilisation.busy_share:.1%}  ({utilisation.describe()}; "
        f"start-up {utilisation.spent_s()[Activity.STARTING]:.1f} s)"
    )
    print(
        f"  {len(used)} submissions with {len(set(used))} versions of {newest + 1}, lag on arrival mean "
        f"{sum(lags) / max(1, len(lags)):.2f}, most {max(lags, default=0)}; {stats.submissions}",
        flush=True,
    )


def ledger(url: str) -> list[dict]:  # type: ignore[type-arg]
    events: list[dict] = []  # type: ignore[type-arg]
    while more := httpx2.get(f"{url}/v1/ledger", params={"from_seq": len(events) + 1}).json():
        events += more
    return events


# -- the other roles ----------------------------------------------------------------------------------------


def serve(scratch: Path, options: argparse.Namespace) -> None:
    """Runs all other roles until standard input is closed."""
    torch.set_num_threads(1)
    stop, ready, urls = threading.Event(), threading.Event(), []
    spec = RunSpec(
        run=RUN,
        task=TaskSpec(name="sort", options={"length": 6}),
        compute_dtype=options.dtype,
        sampling=Sampling(max_new_tokens=options.new_tokens, samples_per_prompt=options.samples),
        last_version=10**6,
    )
    own_port = free_port()
    own_link = Link(own_port, latency_s=options.latency_s)
    # Random weights earn no reward, so no batch is ever formed: there is always work, and the publisher does not wait.
    config = CoordinatorConfig(
        groups_per_step=10**6,
        prompts_per_lease=options.prompts,
        eval_prompts=0,
        heartbeat_s=5.0,
        authorities=(f"127.0.0.1:{own_link.port}",),
    )

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    place = scratch / "coordinator"
    run = Hosting(config=config, spec=spec, dir=place)
    begin(run_pool, [run], "127.0.0.1", own_port, stop, on_ready)
    ready.wait(60)
    url, keys = urls[0], place / "keys"
    publisher = Publisher(scratch, url, keys, options)
    publisher.publish()
    port = free_port()
    link = Link(port, bytes_per_s=options.mbit * 1e6 / 8)
    relay_key = write_relay_key(Key.load(keys / "relay.key"), link.url, scratch / "relay-key")
    delegation = read_relay_delegation(relay_key)
    relay = RelayConfig(folder=scratch / "relay", coordinator=url, port=port, delegation=delegation)
    begin(lambda: run_relay(relay, key=Key.load(relay_key), log=Log("relay"), stop=stop))
    check = ValidatorConfig(
        coordinator=url, key=keys / "validator.key", dir=scratch / "validator", num_threads=1
    )
    begin(lambda: run_validator(check, stop=stop))
    begin(publisher.run, stop)
    print(own_link.url, flush=True)
    sys.stdin.read()
    stop.set()


def free_port() -> int:
    sock = listen("127.0.0.1", 0)
    port = int(sock.getsockname()[1])
    sock.close()
    return port


def begin(work, *arguments) -> None:  # type: ignore[no-untyped-def]
    threading.Thread(target=work, args=arguments, daemon=True).start()


class Publisher:
    """Publishes versions without training: each is the last one with a little noise on one tensor."""

    def __init__(self, scratch: Path, url: str, keys: Path, options: argparse.Namespace) -> None:
        self._every_s, self._version = options.every, -1
        self._key = Key.load(keys / "run.key")
        self._client = SignedClient(url, Key.load(keys / "trainer.key"), log=Log("trainer"))
        self._store = VersionStore(scratch / "origin", run=RUN, run_key=self._key.public)
        server = RelayServer(self._store, listen("127.0.0.1", 0), log=Log("origin"))
        server.start()
        self._url = f"http://127.0.0.1:{server.port}"
        self._model = scratch / "model"
        write_model(self._model, options)
        self._decoder = load_decoder(self._model, torch.bfloat16)

    def publish(self) -> None:
        self._version += 1
        folder = self._store.path(self._version)
        shutil.copytree(self._model, folder, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
        with torch.no_grad():
            norm = self._decoder.model.norm.weight
            norm.add_(0.01 * torch.randn_like(norm))
        save_weights(self._decoder, folder / WEIGHTS_FILE)
        sealed = publish(folder, run=RUN, version=self._version, key=self._key)
        self._store.adopt(self._version)
        report = step_report(self._version) if self._version else None
        body = Announce(manifest=sealed, origin_url=self._url, report=report)
        self._client.call("POST", "/v1/policies", body, Recorded)

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(self._every_s):
            self.publish()


def step_report(version: int) -> StepReport:
    kinds = {name: field.annotation for name, field in StepReport.model_fields.items() if field.is_required()}
    zeros = {name: 0 if kind is int else 0.0 for name, kind in kinds.items()}
    return StepReport.model_validate(zeros | {"version": version})


def write_model(folder: Path, options: argparse.Namespace) -> None:
    create_model(options.model or "tiny", folder, seed=0)
    if options.model:
        return
    shape = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(1, options.hidden // 128),
        "head_dim": 64,
        "intermediate_size": 3 * options.hidden,
    }
    config = json.loads((folder / "config.json").read_text()) | shape
    (folder / "config.json").write_text(json.dumps(config))
    decoder = empty_decoder(read_shape(folder), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)
    save_weights(decoder, folder / WEIGHTS_FILE)


if __name__ == "__main__":
    main()
