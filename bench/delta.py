"""Measures how small a version is as a delta: real GRPO steps of a model on its own answers, published whole and as deltas.

    python bench/delta.py --model smollm2-135m --lr 1e-6 3e-6 1e-5 --steps 4
    python bench/delta.py --model path/to/folder --threads 1
    python bench/delta.py --model tiny --lr 1e-3
    python bench/delta.py --lr 1e-6 --steps 1 --links 100 1000       and how long the last step takes to reach every worker

Each learning rate starts from the same model. A step: the engine answers sums, right answers earn 1, the model is trained on
groups with signal, the weights are rounded to bfloat16 and written, and the delta to the previous version is encoded and
applied. Every resulting file is compared with the original.

With --links, the last step of each rate is also sent: by the trainer's publisher and one relay to workers that have the
previous version, each a process with an engine behind its own link of that many Mbit/s (throttle.py, another process). The
time runs from "the step is done, its weights are in memory" to "the last worker has generated a first token with them": write,
encode, sign, send, apply, verify, load, generate. It is compared with the same without a delta, and with the INTELLECT-2 report:
14 minutes for 62 GB, scaled to the size of the file. All processes share this machine's cores.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from child import Child, children, obey
from safetensors.torch import load_file
from throttle import Link

from shoal import shardcast
from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import Tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.net.http_client import SignedClient
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.shardcast import delta
from shoal.shardcast.client.http_source import Connections, ask_latest
from shoal.shardcast.manifest_files import hash_bytes, mark_boot
from shoal.tasks import Problem, Task, make_task
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample, group_advantages
from shoal.trainer.io.publisher import OriginAddress, Publisher, PublisherSettings
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.supervised import warm_up
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.run_spec import ProofSpec, TaskSpec

T = TypeVar("T")

TASKS = {
    # Random weights never answer right, so the tiny model is first trained on right answers, as in runs/demo.toml.
    "tiny": (TaskSpec(name="add", options={"digits": 1, "style": "bare"}), 150),
    "any": (TaskSpec(name="add", options={"digits": 2, "style": "shots"}), 0),
}
MAX_NEW_TOKENS = 5
MAX_TRIES = 40
REPORT_S, REPORT_BYTES = 14 * 60.0, 62e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one version."""

    changed: float
    full_bytes: int
    delta_bytes: int
    ratio: float
    encode_s: float
    change_s: float
    digest_s: float
    write_s: float
    rebuild_s: float
    rebuild_cpu_s: float
    load_s: float


HEADS: dict[str, tuple[str, Callable[[float], str]]] = {
    "changed": ("changed", lambda value: f"{value:.2%}"),
    "full_bytes": ("full", lambda value: f"{value / 1e6:.1f} MB"),
    "delta_bytes": ("delta", lambda value: f"{value / 1e6:.3f} MB"),
    "ratio": ("smaller", lambda value: f"{value:.0f} x"),
    "encode_s": ("encode", lambda value: f"{value:.3f} s"),
    "change_s": ("apply", lambda value: f"{value:.3f} s"),
    "digest_s": ("digest", lambda value: f"{value:.3f} s"),
    "write_s": ("file to file", lambda value: f"{value:.3f} s"),
    "rebuild_s": ("rebuilt", lambda value: f"{value:.3f} s"),
    "rebuild_cpu_s": ("its CPU", lambda value: f"{value:.3f} s"),
    "load_s": ("loaded", lambda value: f"{value:.3f} s"),
}


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.role:
        ROLES[options.role](options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the cleanup of temporary files
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / "model"
        create_model(options.model, folder, 0)
        print(
            f"{options.model}, {options.prompts} prompts x {options.samples} samples a step, {options.steps} steps a rate.\n"
            "encode, apply, digest: in memory, in CPU time of one thread: words compared and changed, and the result hashed.\n"
            "file to file: the delta written from two files, with the old one's digest checked (as `publish` does).\n"
            "rebuilt: old file and delta read, words changed, the new file hashed and written, by three threads (as a worker does\n"
            "when a delta has come), and loaded: that file into its engine. Wall time; its CPU: of all threads.\n"
        )
        print("lr       version " + " ".join(f"{head:>12}" for head, _ in HEADS.values()), flush=True)
        for rate in options.lr:
            report(rate, run(folder, Path(scratch), rate, options))
            if options.links:
                send_all(Path(scratch), options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="tiny, smollm2-135m, or a model folder")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="groups with signal in each step")
    parser.add_argument("--samples", type=int, default=8, help="answers in a group")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: its default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--links", type=float, nargs="+", default=[], help="Mbit/s of each link, for sending")
    parser.add_argument("--workers", type=int, default=4, help="number of workers to send to")
    parser.add_argument("--scratch", help="where to write the versions; some GB for a large model")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=int, action="append", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(rate: float, rows: Iterator[Row]) -> None:
    seen = []
    for version, row in enumerate(rows, 1):
        seen.append(row)
        print(f"{rate:<8g} {version:>7} " + line(row), flush=True)
    means: dict[str, Any] = {
        field.name: fmean(getattr(row, field.name) for row in seen) for field in fields(Row)
    }
    mean = Row(**means)
    print(f"{rate:<8g} {'mean':>7} " + line(mean) + "\n", flush=True)


def line(row: Row) -> str:
    return " ".join(f"{show(getattr(row, name)):>12}" for name, (_, show) in HEADS.items())


def run(model: Path, scratch: Path, rate: float, options: argparse.Namespace) -> Iterator[Row]:
    folder = scratch / "versions"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    spec, supervised_steps = TASKS.get(options.model, TASKS["any"])
    task = make_task(spec)
    # No warm-up: every step uses the learning rate it is listed under.
    config = TrainerConfig(
        learning_rate=rate,
        warmup_steps=0,
        row_tokens=128,
        rows_per_micro_batch=4,
        supervised_steps=supervised_steps,
    )
    learner = Learner(load_decoder(folder, torch.float32, options.device), config)
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=64, device=options.device)
    engine.load(folder, 0)
    warm_up(learner, [task], engine.tokenizer, log=Log("bench"), stop=threading.Event())
    before, after = scratch / "before.safetensors", folder / WEIGHTS_FILE
    for version in range(options.steps):
        save_weights(learner.decoder, after)
        engine.load(folder, version)
        learner.step(make_batch(engine, task, version, options), threading.Event())
        after.replace(before)
        save_weights(learner.decoder, after)
        yield measure(before, after, scratch, partial(engine.load, folder, version + 1))


def make_batch(engine: TorchEngine, task: Task, version: int, options: argparse.Namespace) -> TrainBatch:
    """Returns that many groups with signal, generated by the version itself."""
    samples: list[TrainSample] = []
    num_groups = 0
    for attempt in range(MAX_TRIES):
        problems = [
            task.problem("train", 1000 * version + 10 * attempt + index) for index in range(options.prompts)
        ]
        for problem, rows in answer(engine, task, problems, options.samples, seed=1000 * version + attempt):
            rewards = [
                task.reward(
                    problem, engine.tokenizer.decode(list(row.output_tokens)), len(row.output_tokens)
                ).value
                for row in rows
            ]
            if min(rewards) < max(rewards) and num_groups < options.prompts:
                num_groups += 1
                samples += to_samples(rows, group_advantages(rewards, "std"))
        if num_groups == options.prompts:
            break
    if not samples:
        raise SystemExit(
            f"no group of {MAX_TRIES * options.prompts} had both right and wrong answers; raise --samples"
        )
    return TrainBatch(version=version, samples=tuple(samples), num_groups=num_groups)


def answer(
    engine: TorchEngine,
    task: Task,
    problems: list[Problem],
    num_samples: int,
    *,
    seed: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Iterator[tuple[Problem, list[FinishedRow]]]:
    engine.submit(
        [
            GenerationRequest(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=encoded(engine.tokenizer, task, problem),
                sample_seed=seed << 32 | index << 16 | sample,
                max_new_tokens=max_new_tokens,
                temperature=1.0,
            )
            for index, problem in enumerate(problems)
            for sample in range(num_samples)
        ]
    )
    done: list[FinishedRow] = []
    while engine.has_work:
        done += engine.step()
    for index, problem in enumerate(problems):
        yield problem, [row for row in done if row.request.prompt_index == index]


def encoded(tokenizer: Tokenizer, task: Task, problem: Problem) -> tuple[int, ...]:
    return tuple(tokenizer.encode_prompt(problem.prompt, chat=task.chat))


def to_samples(rows: list[FinishedRow], advantages: list[float]) -> list[TrainSample]:
    return [
        TrainSample(
            tokens=row.request.prompt_tokens + row.output_tokens,
            prompt_len=len(row.request.prompt_tokens),
            logprobs=row.logprobs,
            advantage=advantage,
            lag=0,
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def measure(before: Path, after: Path, scratch: Path, load: Callable[[], None]) -> Row:
    old, new = before.read_bytes(), after.read_bytes()
    payload, encode_s = timed(lambda: encode_in_memory(old, new), time.thread_time)
    made, change_s = change_in_memory(old, payload)
    assert made.tobytes()[: len(new)] == new, "the delta is not lossless"
    digest, digest_s = timed(lambda: hash_bytes(new), time.thread_time)
    old_blake3, path, rebuilt = hash_bytes(old), scratch / "delta", scratch / "rebuilt"
    _, write_s = timed(
        lambda: delta.write_delta(before, after, path, old_blake3=old_blake3, max_bytes=len(new))
    )
    cpu_s = time.process_time()
    found, rebuild_s = timed(lambda: delta.apply_deltas(before, [path], rebuilt))
    rebuild_cpu_s = time.process_time() - cpu_s
    assert found == digest, "the delta between files is not lossless"
    _, load_s = timed(load)
    words = np.frombuffer(old, np.uint16) != np.frombuffer(new, np.uint16)
    return Row(
        changed=float(words.mean()),
        full_bytes=len(new),
        delta_bytes=len(payload),
        ratio=len(new) / len(payload),
        encode_s=encode_s,
        change_s=change_s,
        digest_s=digest_s,
        write_s=write_s,
        rebuild_s=rebuild_s,
        rebuild_cpu_s=rebuild_cpu_s,
        load_s=load_s,
    )


def encode_in_memory(old: bytes, new: bytes) -> bytes:
    """Returns the delta. Both files have the same even number of bytes."""
    before, after = np.frombuffer(old, "<u2"), np.frombuffer(new, "<u2")
    pieces = [delta.DELTA_HEAD.pack(delta.MAGIC, len(new))]
    for start in range(0, after.size, delta.CHUNK_WORDS):
        chunk = slice(start, start + delta.CHUNK_WORDS)
        pieces.append(delta.encode_chunk(before[chunk], after[chunk]))
    return b"".join(pieces)


def change_in_memory(old: bytes, data: bytes) -> tuple[np.ndarray, float]:
    """Applies the delta; returns the new words, and the seconds for decoding and for changing them."""
    words = np.frombuffer(old, "<u2").copy()
    payload = delta.DeltaReader(io.BytesIO(data), len(old))
    began_s = time.thread_time()
    for start in range(0, words.size, delta.CHUNK_WORDS):
        payload.next_chunk().apply(words[start : start + delta.CHUNK_WORDS])
    return words, time.thread_time() - began_s


# -- to every worker ----------------------------------------------------------------------------------------


def send_all(scratch: Path, options: argparse.Namespace) -> None:
    """Measures the last step of a rate from the trainer's memory to the engine of every worker, over each link speed."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        key = Key.generate()
        begin = stack.enter_context(children(__file__))
        start = partial(begin_on, begin, options)
        store = shardcast.VersionStore(place / "origin", run="bench", run_key=key.public)
        publisher = make_publisher(store, scratch / "versions", key)
        stack.callback(publisher.close)
        weights = [
            load_file(path) for path in (scratch / "before.safetensors", scratch / "versions" / WEIGHTS_FILE)
        ]
        weights = [{name: one.float() for name, one in tensors.items()} for tensors in weights]
        publish(publisher, weights[0], 0)
        up = start("links", "--target", publisher.origin_url.rsplit(":", 1)[1])
        relay = start(
            "relay", "--dir", place / "relay", "--key", key.public, "--url", url_of(up.ready["ports"][0])
        )
        down = start("links", *(["--target", relay.ready["port"]] * options.workers))
        folders = [place / f"worker{index}" for index in range(options.workers)]
        for folder in folders:
            shutil.copytree(store.path(0), folder / "v0", copy_function=os.link)
            mark_boot(folder)
        workers = [
            start("worker", "--dir", folder, "--key", key.public, "--url", url_of(port))
            for folder, port in zip(folders, down.ready["ports"], strict=True)
        ]
        assert all(worker.ready == {} for worker in workers)
        relay.ask("have 0")
        version = 0
        for mbit in options.links:
            for links in (up, down):
                links.ask(f"rate {mbit}")
            # Alternates between the two weights of the step, so that each version has the same changes. The first is sent whole.
            for number, after in ((version + 1, weights[1]), (version + 3, unlike_any(weights[0], version))):
                send(publisher, after, number, workers, before=version, mbit=mbit)
                relay.ask(f"have {number}")
                version = number


def begin_on(
    begin: Callable[..., Child], options: argparse.Namespace, role: str, *arguments: object
) -> Child:
    return begin(role, "--device", options.device, "--threads", options.threads, *arguments, wait=False)


def unlike_any(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Deletes old versions of the relay, which would otherwise reuse the file and download nothing."""
    name = min(weights, key=lambda one: weights[one].numel())
    return weights | {name: weights[name] * (1 + 2.0 ** -(4 + version))}


def send(
    publisher: Publisher,
    weights: dict[str, torch.Tensor],
    version: int,
    workers: list[Child],
    *,
    before: int,
    mbit: float,
) -> None:
    for worker in workers:
        worker.tell(f"after {before}")
    time.sleep(1.0)  # by now all workers wait for the next version
    began_s = time.monotonic()
    sent = publish(publisher, weights, version)
    published_s = time.monotonic() - began_s
    times = [worker.hear() for worker in workers]
    had_s, loaded_s, generated_s = (
        max(one[what] for one in times) - began_s for what in ("had_s", "loaded_s", "generated_s")
    )
    cpu_s = max(one["made_cpu_s"] for one in times)
    print(
        f"{mbit:g} Mbit/s, {len(workers)} workers, {'whole' if sent.base is None else 'delta'}: "
        f"{sent.follow_bytes / 1e6:.2f} MB to each; published {published_s:.2f} s, last worker has it {had_s:.2f} s "
        f"(fetch, apply, verify: {cpu_s:.2f} s of its CPU), loaded {loaded_s:.2f} s, generates with it {generated_s:.2f} s "
        f"(the report's 14 minutes, scaled: {REPORT_S * sent.num_bytes / REPORT_BYTES:.2f} s)",
        flush=True,
    )


def make_publisher(store: shardcast.VersionStore, model_folder: Path, key: Key) -> Publisher:
    """The trainer's publisher, without announcements to a coordinator."""
    log = Log("bench")
    client = SignedClient("http://127.0.0.1:9", key, log=log)
    publisher = Publisher(
        store,
        model_folder=model_folder,
        run_key=key,
        client=client,
        address=OriginAddress(),
        settings=PublisherSettings(deadline_s=60.0, snapshot_every=1000),
        log=log,
    )
    publisher.start()
    return publisher


def publish(publisher: Publisher, weights: dict[str, torch.Tensor], version: int) -> Manifest:
    if publisher.newest == version - 1:
        changes = publisher.diff.changes({name: partial(weights.__getitem__, name) for name in weights})
        folder = publisher.prepare(changes, version)
    else:
        folder = publisher.prepare_whole(weights.items(), version)
    return publisher.serve(folder, version).body


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def be_links(options: argparse.Namespace) -> None:
    made = [Link(port) for port in options.target]

    def set_rate(line: str) -> dict[str, Any]:
        for link in made:
            link.set_rate(float(line.split()[1]) * 1e6 / 8)
        return {}

    obey({"ports": [link.port for link in made]}, set_rate)


def be_relay(options: argparse.Namespace) -> None:
    config = shardcast.RelayConfig(
        folder=options.dir, run="bench", run_key=options.key, upstreams=(options.url,)
    )
    relay = shardcast.Relay(config, Key.generate(), log=Log("relay"), stop=threading.Event())
    relay.startup()

    def have(line: str) -> dict[str, Any]:
        relay.store.changed.wait(lambda: int(line.split()[1]) in relay.store.complete(), 600.0)
        return {}

    obey({"port": int(relay.url.rsplit(":", 1)[1])}, have)


def be_worker(options: argparse.Namespace) -> None:
    """Has version 0 in its folder and engine; loads new versions as rollout/worker/version_cache.py does."""
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=1, device=options.device)
    engine.load(options.dir / "v0", 0)
    task = make_task(TASKS["any"][0])
    relays = shardcast.RelayChoice([options.url])
    terms: dict[str, Any] = {
        "run_key": options.key,
        "log": Log("worker"),
        "stop": threading.Event(),
        "deadline_s": 600.0,
    }

    def follow(line: str) -> dict[str, Any]:
        after = int(line.split()[1])
        sealed = None
        with Connections() as connections:
            while sealed is None:
                sealed = ask_latest(connections, options.url, after=after, wait_s=20.0)
        cpu_s = time.process_time()
        folder = shardcast.fetch_version(sealed, relays, options.dir, **terms)
        told = {"had_s": time.monotonic(), "made_cpu_s": time.process_time() - cpu_s}
        engine.load(folder, sealed.body.version)
        told["loaded_s"] = time.monotonic()
        list(answer(engine, task, [task.problem("train", 0)], 1, seed=0, max_new_tokens=1))
        told["generated_s"] = time.monotonic()
        shardcast.prune_versions(options.dir, 1)
        return told

    obey({}, follow)


ROLES = {"links": be_links, "relay": be_relay, "worker": be_worker}


def timed(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    started_s = clock()
    value = call()
    return value, clock() - started_s


if __name__ == "__main__":
    main()
