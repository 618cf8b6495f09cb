"""How small a version is as a delta: real GRPO steps of a model on its own answers, each published both ways.

    python bench/delta.py --model smollm2-135m --lr 1e-6 3e-6 1e-5 --steps 4
    python bench/delta.py --model path/to/folder --threads 1
    python bench/delta.py --model tiny --lr 1e-3
    python bench/delta.py --lr 1e-6 --steps 1 --links 100 1000       and how long the last of them takes to every worker

For each rate the model starts anew. A step: the engine answers sums, right answers earn 1, groups with signal are
trained on, the weights are rounded to bfloat16 and written, and the delta to the version before is made and applied. Every
file that comes out is compared with the one that went in.

With --links, the last step of each rate is also sent: origin, one relay, and workers that hold the version before, every
one of them behind a link of its own of so many Mbit/s (throttle.py). The clock runs from "the step is done, its weights are
in memory" to "the last worker's engine has them": write, encode, sign, send, apply, verify, load. Beside it, the same without a delta,
and what the INTELLECT-2 report needed, 14 minutes for 62 GB, scaled to the size of the file. All of it shares this machine's cores,
the engines of all workers included.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from throttle import Link

from shoal import shardcast
from shoal.model.builtin import create_model
from shoal.model.load import load_decoder
from shoal.model.tokenizer import Tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.net.server import listen
from shoal.rollout.engine import Finished, Request
from shoal.rollout.torch_engine import TorchEngine
from shoal.shardcast import delta
from shoal.shardcast.boot import mark_boot
from shoal.shardcast.digest import hash_bytes
from shoal.shardcast.upstream import Connections, ask_latest
from shoal.tasks import Problem, Task, make_task
from shoal.telemetry import Log
from shoal.trainer.advantage import group_advantages
from shoal.trainer.batch import Sample, TrainBatch
from shoal.trainer.config import TrainerConfig
from shoal.trainer.learner import Learner
from shoal.trainer.supervised import warm_up
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed
from shoal.wire.run import ProofSpec, TaskSpec

TASKS = {
    # Random weights know nothing, so the tiny model first learns from answers, as in runs/demo.toml.
    "tiny": (TaskSpec(name="add", options={"digits": 1, "style": "bare"}), 150),
    "any": (TaskSpec(name="add", options={"digits": 2, "style": "shots"}), 0),
}
MAX_NEW_TOKENS = 5
MAX_TRIES = 40
REPORT_S, REPORT_BYTES = 14 * 60.0, 62e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One version; seconds are of this process alone."""

    changed: float
    full_bytes: int
    delta_bytes: int
    ratio: float
    encode_s: float
    apply_s: float
    write_s: float
    rebuild_s: float


HEADS = {
    "changed": ("changed", lambda value: f"{value:.2%}"),
    "full_bytes": ("full", lambda value: f"{value / 1e6:.1f} MB"),
    "delta_bytes": ("delta", lambda value: f"{value / 1e6:.3f} MB"),
    "ratio": ("smaller", lambda value: f"{value:.0f} x"),
    "encode_s": ("encode", lambda value: f"{value:.3f} s"),
    "apply_s": ("apply", lambda value: f"{value:.3f} s"),
    "write_s": ("file to file", lambda value: f"{value:.3f} s"),
    "rebuild_s": ("rebuilt", lambda value: f"{value:.3f} s"),
}


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / "model"
        create_model(options.model, folder, 0)
        print(
            f"{options.model}, {options.prompts} prompts x {options.samples} samples a step, {options.steps} steps a rate.\n"
            "encode, apply: in memory, in place. file to file: the delta written from two files, with the old one's digest checked.\n"
            "rebuilt: old file and delta read, the new file hashed and written. Both to the disk.\n"
        )
        print("lr       version " + " ".join(f"{head:>12}" for head, _ in HEADS.values()), flush=True)
        for rate in options.lr:
            report(rate, run(folder, Path(scratch), rate, options))
            for mbit in options.links:
                for whole in (False, True):
                    send(Path(scratch), mbit, whole, options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="tiny, smollm2-135m, or a model folder")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="groups with signal in each step")
    parser.add_argument("--samples", type=int, default=8, help="answers in a group")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--links", type=float, nargs="+", default=[], help="Mbit/s of each link, for sending")
    parser.add_argument("--workers", type=int, default=4, help="to send to")
    parser.add_argument("--scratch", help="where to write the versions; some GB for a large model")
    return parser.parse_args()


def report(rate: float, rows: Iterator[Row]) -> None:
    seen = []
    for version, row in enumerate(rows, 1):
        seen.append(row)
        print(f"{rate:<8g} {version:>7} " + line(row), flush=True)
    mean = Row(**{field.name: fmean(getattr(row, field.name) for row in seen) for field in fields(Row)})
    print(f"{rate:<8g} {'mean':>7} " + line(mean) + "\n", flush=True)


def line(row: Row) -> str:
    return " ".join(f"{show(getattr(row, name)):>12}" for name, (_, show) in HEADS.items())


def run(model: Path, scratch: Path, rate: float, options: argparse.Namespace) -> Iterator[Row]:
    folder = scratch / "versions"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    spec, supervised_steps = TASKS.get(options.model, TASKS["any"])
    task = make_task(spec)
    # No rate warm-up: every step counted here is one at the rate it is counted under.
    config = TrainerConfig(
        learning_rate=rate,
        warmup_steps=0,
        row_tokens=128,
        rows_per_micro_batch=4,
        supervised_steps=supervised_steps,
    )
    learner = Learner(load_decoder(folder, torch.float32, options.device), config, temperature=1.0)
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=64, device=options.device)
    engine.load(folder, 0)
    warm_up(learner, task, engine.tokenizer, log=Log("bench"), stop=threading.Event())
    before, after = scratch / "before.safetensors", folder / WEIGHTS_FILE
    for version in range(options.steps):
        save_weights(learner.decoder, after)
        engine.load(folder, version)
        learner.step(make_batch(engine, task, version, options), threading.Event())
        after.replace(before)
        save_weights(learner.decoder, after)
        yield measure(before, after, scratch)


def make_batch(engine: TorchEngine, task: Task, version: int, options: argparse.Namespace) -> TrainBatch:
    """As many groups with signal as are asked for, all by the version itself."""
    samples: list[Sample] = []
    rewards_seen: list[float] = []
    num_groups = dropped = 0
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
            rewards_seen += rewards
            if min(rewards) == max(rewards):
                dropped += 1
            elif num_groups < options.prompts:
                num_groups += 1
                samples += to_samples(rows, group_advantages(rewards, "std"))
        if num_groups == options.prompts:
            break
    if not samples:
        raise SystemExit(
            f"no group of {MAX_TRIES * options.prompts} had both right and wrong answers; raise --samples"
        )
    return TrainBatch(
        version=version,
        samples=tuple(samples),
        num_groups=num_groups,
        dropped_groups=dropped,
        reward_mean=fmean(rewards_seen),
    )


def answer(
    engine: TorchEngine, task: Task, problems: list[Problem], num_samples: int, *, seed: int
) -> Iterator[tuple[Problem, list[Finished]]]:
    engine.submit(
        [
            Request(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=encoded(engine.tokenizer, task, problem),
                sample_seed=seed << 32 | index << 16 | sample,
                max_new_tokens=MAX_NEW_TOKENS,
                temperature=1.0,
            )
            for index, problem in enumerate(problems)
            for sample in range(num_samples)
        ]
    )
    done: list[Finished] = []
    while engine.has_work:
        done += engine.step()
    for index, problem in enumerate(problems):
        yield problem, [row for row in done if row.request.prompt_index == index]


def encoded(tokenizer: Tokenizer, task: Task, problem: Problem) -> tuple[int, ...]:
    return tuple(tokenizer.encode_prompt(problem.prompt, chat=task.chat))


def to_samples(rows: list[Finished], advantages: list[float]) -> list[Sample]:
    return [
        Sample(
            tokens=row.request.prompt_tokens + row.output_tokens,
            prompt_len=len(row.request.prompt_tokens),
            logprobs=row.logprobs,
            advantage=advantage,
            lag=0,
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def measure(before: Path, after: Path, scratch: Path) -> Row:
    old, new = before.read_bytes(), after.read_bytes()
    payload, encode_s = timed(lambda: delta.encode(old, new))
    made = bytearray(old)
    _, apply_s = timed(lambda: delta.apply_in_place(made, payload))
    assert made == new, "the delta is not lossless"
    old_blake3, path, rebuilt = hash_bytes(old), scratch / "delta", scratch / "rebuilt"
    _, write_s = timed(
        lambda: delta.write_delta(before, after, path, old_blake3=old_blake3, max_bytes=len(new))
    )
    digest, rebuild_s = timed(lambda: delta.apply_deltas(before, [path], rebuilt))
    assert digest == hash_bytes(new), "the delta between files is not lossless"
    words = np.frombuffer(old, np.uint16) != np.frombuffer(new, np.uint16)
    return Row(
        changed=float(words.mean()),
        full_bytes=len(new),
        delta_bytes=len(payload),
        ratio=len(new) / len(payload),
        encode_s=encode_s,
        apply_s=apply_s,
        write_s=write_s,
        rebuild_s=rebuild_s,
    )


# -- to every worker ----------------------------------------------------------------------------------------


def send(scratch: Path, mbit: float, whole: bool, options: argparse.Namespace) -> None:
    """The last step of a rate, from the trainer's memory into the engine of every worker."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        key, log, stop = Key.generate(), Log("bench"), threading.Event()
        stack.callback(stop.set)

        def link(port: int) -> str:
            made = Link(port, bytes_per_s=mbit * 1e6 / 8)
            stack.callback(made.close)
            return made.url

        store = shardcast.VersionStore(place / "origin", run="bench", run_key=key.public)
        first = write_version(scratch, store, "before.safetensors", 0)
        sealed = shardcast.publish(first, run="bench", version=0, key=key)
        store.adopt(0)
        origin = shardcast.RelayServer(store, listen("127.0.0.1", 0), log=log)
        origin.start()
        stack.callback(origin.close)
        stack.callback(store.close)
        workers = [
            Worker(place / f"worker{index}", sealed, first, key, options) for index in range(options.workers)
        ]
        shutil.copytree(first, place / "relay" / "v0", copy_function=os.link)
        config = shardcast.RelayConfig(
            folder=place / "relay", run="bench", run_key=key.public, upstreams=(link(origin.port),)
        )
        relay = shardcast.Relay(config, key, log=log, stop=stop)
        relay.startup()
        stack.callback(relay.shutdown)
        urls = [link(int(relay.url.rsplit(":", 1)[1])) for _ in workers]
        decoder = load_decoder(write_version(scratch, store, WEIGHTS_FILE, 1), torch.float32, options.device)
        threads = [
            threading.Thread(target=worker.follow, args=(url, stop))
            for worker, url in zip(workers, urls, strict=True)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # everybody waits for word by now
        began_s = time.monotonic()
        save_weights(decoder, store.path(1) / WEIGHTS_FILE)
        written_s = time.monotonic() - began_s
        base = None if whole else shardcast.Base(folder=first, snapshot_every=1000)
        sent = shardcast.publish(store.path(1), run="bench", version=1, key=key, base=base).body
        store.adopt(1)
        published_s = time.monotonic() - began_s
        for thread in threads:
            thread.join()
        num_bytes = sent.num_bytes
        print(
            f"{mbit:g} Mbit/s, {len(workers)} workers, {'whole' if whole else 'delta'}: {sent.follow_bytes / 1e6:.2f} MB sent to each; "
            f"written {written_s:.2f} s, published {published_s:.2f} s, "
            f"last worker has it {max(one.had_s for one in workers) - began_s:.2f} s, "
            f"its engine {max(one.loaded_s for one in workers) - began_s:.2f} s "
            f"(the report's, scaled: {REPORT_S * num_bytes / REPORT_BYTES:.2f} s)",
            flush=True,
        )


def write_version(scratch: Path, store: shardcast.VersionStore, weights: str, version: int) -> Path:
    """The folder of a version, not yet published, with the weights of that file."""
    folder = store.path(version)
    shutil.copytree(scratch / "versions", folder, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    source = scratch / weights if version == 0 else scratch / "versions" / weights
    shutil.copyfile(source, folder / WEIGHTS_FILE)
    return folder


class Worker:
    """Holds version 0, in its folder and in its engine."""

    def __init__(
        self, into: Path, sealed: Sealed[Manifest], first: Path, key: Key, options: argparse.Namespace
    ) -> None:
        self._into, self._key = into, key
        shutil.copytree(first, into / "v0", copy_function=os.link)
        mark_boot(into)
        assert sealed.body.version == 0
        self._engine = TorchEngine(
            compute_dtype="float32", proof=ProofSpec(), max_rows=1, device=options.device
        )
        self._engine.load(into / "v0", 0)
        self.had_s = self.loaded_s = 0.0

    def follow(self, url: str, stop: threading.Event) -> None:
        terms = {"run_key": self._key.public, "log": Log("worker"), "stop": stop, "deadline_s": 600.0}
        sealed = None
        with Connections() as connections:
            while sealed is None:
                sealed = ask_latest(connections, url, after=0, wait_s=20.0)
        folder = shardcast.fetch_version(sealed, [url], self._into, **terms)
        self.had_s = time.monotonic()
        self._engine.load(folder, 1)
        self.loaded_s = time.monotonic()


def timed(call):  # type: ignore[no-untyped-def]
    started_s = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started_s


if __name__ == "__main__":
    main()
