"""Measures what publication costs training: steps with and without it, exposed seconds, seconds and bytes of a version.

    python bench/step.py --shape toy --tokens 512                                         a quick test on any machine
    python bench/step.py --device cuda --shape 0.5B --tokens 32768 --steps 12
    python bench/step.py --device cuda --shape 7B --tokens 65536 --micro-tokens 16384 --recompute --states int8 --warm 1 --steps 3 --plain 1
                                                                                          one H200, random weights, 110 GB
    python bench/step.py --launches --gb 1 --share 0.02                                   only what publishing takes from the main thread

Trains `--plain` versions without publication, then one more and `--steps` beside the publication of the one before (the trainer's own
Publisher, without a coordinator), then again `--plain` without. Weights and samples are random. The base of the first published version is held in memory, as the publisher holds
it, and is not written to disk. Prints one line per version and a summary:

step        seconds from one version to the next
exposed     of these, seconds that training stood still: before its first update for the capture of the last version, and after
            it for the end of the last publication
publish     seconds from the end of a step until its version is served, beside the next step
slowdown    median step with publication, without its exposed seconds, against the median without; other work on host and GPU

With `--launches` no model is trained: the main thread starts one tiny operation after the other, as a trainer starts kernels, while a
file of random weights is published in the background. One half of the cores is the main thread's, the other the background's, and time
for which the main thread waits for a core is not counted. `lost` is the share of operations that it starts less in the same time, `lost_hashing` the same while the file is only
hashed, which needs cores and memory but hardly the interpreter's lock. `locked` is the share of the time of publishing that the main
thread sleeps, which waits for that lock, and `waits` how often it does. `publish_beside_python_s` is the time of publishing while the main thread runs plain Python, as
a trainer does that builds its batch: then each call of the publisher waits for a switch. Linux only.

With `--checkpoint` the middle version is also checkpointed (12 bytes per parameter in host memory and on disk).
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.background import BackgroundTask
from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.load_model import empty_decoder
from shoal.model.shape import Shape
from shoal.net.http_client import SignedClient
from shoal.shardcast import file_image
from shoal.shardcast.delta import DELTA_HEAD, MAGIC
from shoal.shardcast.file_image import RANGE_WORDS, ChangedWords, FileImage, file_hasher
from shoal.shardcast.publish import ImageDelta, Signing, publish_image, shard_size
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.background_save import BackgroundSave
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.publisher import OriginAddress, Publisher, PublisherSettings
from shoal.trainer.io.weights_diff import count_changed, record_event
from shoal.trainer.optim.learner import Learner
from shoal.wire.keys import Key
from shoal.wire.manifest import WEIGHTS_FILE, FileEntry, Manifest
from trainer import SHAPES, draw, make_batch

WAIT_S = 600.0
HEADER_WORDS = 1 << 10
"""Words at the start of a file that stay as they are: its header is among them."""
TOUCHING_THREADS = max(1, min(6, (os.cpu_count() or 2) // 2))
T = TypeVar("T")


def empty_image(tensors: Mapping[str, Tensor]) -> FileImage:
    """Returns the file of a model whose weights are all zero, in memory that several threads have touched: the first write is slow."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [at, at := at + 2 * tensor.numel()],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    image = FileImage(8 + len(text) + at)
    with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
        list(
            threads.map(
                lambda start: image.words[start : start + RANGE_WORDS].fill(0),
                range(0, image.words.size, RANGE_WORDS),
            )
        )
    image.view[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    return image


def unhashed_manifest(image: FileImage, version: int) -> Manifest:
    """Returns a manifest of the image's version before, whose file was neither written nor hashed."""
    shard_bytes = shard_size(image.num_bytes, 2 << 20)
    shards = ("0" * 64,) * -(-image.num_bytes // shard_bytes)
    entry = FileEntry(name=WEIGHTS_FILE, num_bytes=image.num_bytes, blake3="0" * 64, shard_bytes=shard_bytes, shards=shards)  # fmt: skip
    return Manifest(run="bench", version=version, files=(entry,), created_at_s=0.0)


def attempt(name: str, work: Callable[[], T]) -> T | None:
    """Returns what `work` returns; prints its error and returns None if it fails, so that the other parts still run."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  # whatever it is, the other parts are measured
        traceback.print_exc()
        print(json.dumps({"failed": name, "error": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        return None


@dataclass
class Published:
    """One version that was published."""

    capture_s: float = 0.0
    publish_s: float = 0.0
    num_bytes: int = 0
    changed: int = 0


class Bench:
    """A learner with random weights and its publisher."""

    def __init__(self, shape: Shape, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.num_layers = shape.num_layers
        decoder = empty_decoder(shape, torch.float32, options.device)
        torch.manual_seed(0)
        draw(decoder)
        self.parameters = sum(one.numel() for one in decoder.parameters())
        self.batch: TrainBatch = make_batch(shape, "packed", options.tokens)
        width = sum(len(sample.tokens) for sample in self.batch.samples)
        rows = max(1, options.micro_tokens or width)
        config = TrainerConfig(
            learning_rate=options.lr,
            warmup_steps=0,
            row_tokens=max(rows, max(len(sample.tokens) for sample in self.batch.samples)),
            rows_per_micro_batch=1,
            compute_dtype="bfloat16" if self.device.type == "cuda" else "float32",
            activation_checkpointing=options.recompute,
            optimizer_states=options.states,
        )
        log = Log("bench")
        self.lockstep = Lockstep(
            config, SINGLE_PROCESS, device=options.device, log=log, stop=threading.Event()
        )
        self.lockstep.learner = self.learner = Learner(decoder, config)
        key = Key.generate()
        self.publisher = Publisher(
            VersionStore(folder / "versions", 3, run="bench", run_key=key.public),
            model_folder=folder / "model",
            run_key=key,
            client=SignedClient("http://127.0.0.1:9", key, log=log),
            address=OriginAddress(),
            settings=PublisherSettings(
                deadline_s=WAIT_S, device=options.device, snapshot_every=options.snapshot_every
            ),
            log=log,
        )
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=1, log=log)
        self.image: Future[FileImage] | None = None
        self.publication = BackgroundSave[list[ChangedWords]]("version", "to be published")
        self.exposed_s = self.checkpoint_s = 0.0
        self.learner.before_change = self._wait_for_readers

    def _wait_for_readers(self) -> None:
        started_s = time.perf_counter()
        self.publication.wait_for_copy(WAIT_S)
        captured_s = time.perf_counter()
        self.checkpoints.wait_for_copy(WAIT_S)
        self.exposed_s += captured_s - started_s
        self.checkpoint_s += time.perf_counter() - captured_s

    def step(self) -> float:
        """Trains one version and returns its loss."""
        loss = self.lockstep.step(replace(self.batch, version=self.learner.version)).loss
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    def peak_gb(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.device.type == "cuda" else 0.0

    def allocate_image(self) -> None:
        """Starts to allocate the host memory that `begin` fills, in the background."""
        self.image = ThreadPoolExecutor(1).submit(empty_image, dict(self.learner.decoder.named_parameters()))

    def begin_whole(self) -> None:
        """Publishes the current version whole, as the trainer publishes version 0, as the base of the next."""
        version = self.learner.version
        folder = self.publisher.prepare_whole(self.lockstep.whole_weights(self.lockstep.weights()), version)
        self.publisher.serve(folder, version)

    def begin(self) -> float:
        """Makes the current version the base of the next: its file is in memory only, and its delta is empty. Returns its seconds."""
        started_s = time.perf_counter()
        assert self.image is not None, "call allocate_image first"
        version, publisher, image = self.learner.version, self.publisher, self.image.result()
        publisher._set_image(image)
        pinned_s = time.perf_counter()
        for name, value in self.lockstep.weights().items():
            publisher.diff.published(name).copy_(value())
        print(json.dumps({"part": "copied", "s": round(time.perf_counter() - pinned_s, 2)}), flush=True)
        folder = publisher._new_folder(version)
        delta = ImageDelta(
            unhashed_manifest(image, version - 1), iter([DELTA_HEAD.pack(MAGIC, image.num_bytes)])
        )
        publish_image(
            folder, WEIGHTS_FILE, image, version=version, signing=publisher._signing, delta=delta, whole=False
        )
        publisher.serve(folder, version)
        return time.perf_counter() - started_s

    def publish(self, published: Published) -> None:
        """Starts to publish the current version."""
        version, started_s = self.learner.version, time.perf_counter()
        sources = self.lockstep.weights()

        def capture(after: Any) -> list[ChangedWords]:
            changes = self.publisher.diff.changes(sources, after)
            published.capture_s = time.perf_counter() - started_s
            return changes

        def send(changes: list[ChangedWords]) -> None:
            published.changed = count_changed(changes, self.publisher.diff.image)
            manifest = self.publisher.serve(self.publisher.prepare(changes, version), version)
            published.publish_s = time.perf_counter() - started_s
            published.num_bytes = manifest.body.payload_bytes

        self.publication.start(version, partial(capture, record_event(self.device)), send)


def run_plain(bench: Bench, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        started_s = time.perf_counter()
        loss = bench.step()
        times.append(time.perf_counter() - started_s)
        line = {"version": bench.learner.version, "step_s": round(times[-1], 4), "loss": round(loss, 5)}
        print(json.dumps(line | {"peak_gb": bench.peak_gb()}), flush=True)
    return times


def run_published(bench: Bench, steps: int, *, checkpoint: bool) -> list[dict[str, Any]]:
    """Trains a first version with no publication beside it, then `steps` versions beside the publication of the one before."""
    rows: list[dict[str, Any]] = []
    publications: list[Published] = []
    for index in range(steps + 1):
        bench.exposed_s = bench.checkpoint_s = 0.0
        started_s = time.perf_counter()
        loss = bench.step()
        stepped_s = time.perf_counter()
        bench.publication.finish(WAIT_S)
        bench.exposed_s += time.perf_counter() - stepped_s
        show_published(rows, publications)
        if checkpoint and index == steps // 2:
            version = bench.learner.version
            take = bench.lockstep.later_snapshot(bench.checkpoints.shard_folder(version))
            bench.checkpoints.begin(version, take, None)
        if index < steps:
            publications.append(Published())
            bench.publish(publications[-1])
        rows.append(
            {
                "version": bench.learner.version,
                "step_s": time.perf_counter() - started_s,
                "publish_exposed_s": bench.exposed_s,
                "checkpoint_exposed_s": bench.checkpoint_s,
                "loss": loss,
            }
        )
    bench.checkpoints.finish(WAIT_S)
    print(json.dumps({key: round(value, 4) for key, value in rows[-1].items()}), flush=True)
    return rows


def show_published(rows: list[dict[str, Any]], publications: list[Published]) -> None:
    """Adds the figures of the last publication, which has ended, to its version's row, and prints the row."""
    if rows:
        published = publications[-1]
        rows[-1] |= {
            "capture_s": published.capture_s,
            "publish_s": published.publish_s,
            "bytes": published.num_bytes,
            "changed_words": published.changed,
        }
        print(json.dumps({key: round(value, 4) for key, value in rows[-1].items()}), flush=True)


def summary(
    plain: list[float], rows: list[dict[str, Any]], again: list[float], bench: Bench
) -> dict[str, Any]:
    first, rows, published = rows[0], rows[1:], rows[:-1]
    plain = [*plain, first["step_s"]]
    without_s = statistics.median(plain + again)
    step_s = statistics.median(row["step_s"] for row in rows)
    exposed_s = statistics.fmean(row["publish_exposed_s"] for row in rows)
    own_s = statistics.median(
        row["step_s"] - row["publish_exposed_s"] - row["checkpoint_exposed_s"] for row in rows
    )
    return {
        "parameters": bench.parameters,
        "tokens": bench.batch.num_tokens,
        "step_s_without": without_s,
        "steps_s_without": [plain, again],
        "steps_s_with": [row["step_s"] for row in rows],
        "step_s_with": step_s,
        "publish_exposed_s": exposed_s,
        "exposed_share": exposed_s / step_s,
        "slowdown": own_s / without_s - 1,
        "publish_s_median": statistics.median(row["publish_s"] for row in published),
        "publish_s_max": max(row["publish_s"] for row in published),
        "capture_s_median": statistics.median(row["capture_s"] for row in published),
        "bytes_median": statistics.median(row["bytes"] for row in published),
        "changed_share": statistics.fmean(row["changed_words"] for row in published) / bench.parameters,
        "checkpoint_exposed_s": sum(row["checkpoint_exposed_s"] for row in rows),
        "peak_gb": bench.peak_gb(),
    }


def measure(bench: Bench, options: argparse.Namespace) -> int:
    """Runs all parts and prints their figures. Returns 1 if the part with publication failed."""
    bench.allocate_image()
    run_plain(bench, options.warm)
    plain = run_plain(bench, options.plain)
    rows, base_s = None, attempt("base", bench.begin)
    if base_s is not None:
        print(json.dumps({"part": "base", "s": round(base_s, 2)}), flush=True)
        rows = attempt("publish", lambda: run_published(bench, options.steps, checkpoint=options.checkpoint))
    again = attempt("plain", lambda: run_plain(bench, options.plain)) or []
    if rows is None:
        return 1
    found = {"shape": options.shape, "layers": bench.num_layers} | summary(plain, rows, again, bench)
    print(json.dumps(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"summary": found, "versions": rows}, indent=1))
    return 0


def publish_changes(
    into: Path,
    image: FileImage,
    changes: list[ChangedWords],
    version: int,
    signing: Signing,
    before: Manifest,
) -> None:
    hasher = file_hasher()
    delta = ImageDelta(before, image.change(changes, hasher), hasher)
    publish_image(into, WEIGHTS_FILE, image, version=version, signing=signing, delta=delta, whole=False)


def random_image(num_bytes: int) -> FileImage:
    """Returns the file of one tensor of random weights."""
    image = empty_image({"weights": torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="meta")})
    values = (0.02 * torch.randn(1 << 22)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    for start in range(HEADER_WORDS, image.words.size, values.size):
        image.words[start : start + values.size] = values[: image.words.size - start]
    return image


def small_steps(image: FileImage, share: float, seed: int) -> list[ChangedWords]:
    """Returns changes of this share of the words by one unit in the last place."""
    random, changes = np.random.default_rng(seed), []
    for start in range(0, image.words.size, RANGE_WORDS):
        words = image.words[start : start + RANGE_WORDS]
        places = np.flatnonzero(random.random(words.size, np.float32) < share).astype(np.int32)
        places = places[places >= HEADER_WORDS] if start == 0 else places
        steps = random.choice(np.array([1, 0xFFFF], np.uint16), places.size)
        changes.append(ChangedWords(start, places, words[places] + steps))
    return changes


def thread_seconds() -> tuple[float, float]:
    """Returns for how many seconds this thread has run, and for how many it has waited for a core."""
    run, ready = Path("/proc/thread-self/schedstat").read_text().split()[:2]
    return int(run) / 1e9, int(ready) / 1e9


def count_launches(device: str, until: Callable[[], bool]) -> tuple[float, float]:
    """Starts tiny operations until `until()` holds; returns how many a second, and the share of that time spent sleeping."""
    tensor, count, started_s = torch.ones(16, device=device), 0, time.perf_counter()
    run_s, ready_s = thread_seconds()
    while not until():
        for _ in range(100):
            tensor.mul_(1.0)
        count += 100
    run_s, ready_s = (
        after - before for after, before in zip(thread_seconds(), (run_s, ready_s), strict=True)
    )
    had_s = time.perf_counter() - started_s - ready_s
    return count / had_s, 1 - run_s / had_s


def beside(device: str, cores: set[int], work: Callable[[], object]) -> tuple[float, float, float]:
    """Returns the operations started a second while `work` runs on the other cores, the share spent sleeping, and its seconds."""

    def on_cores() -> None:
        os.sched_setaffinity(0, cores)
        work()

    started_s = time.perf_counter()
    task = BackgroundTask("beside", on_cores)
    rate, slept = count_launches(device, lambda: task.done)
    seconds = time.perf_counter() - started_s
    task.result()
    return rate, slept, seconds


def measure_launches(options: argparse.Namespace, folder: Path) -> int:
    """Prints what publishing a file takes from a main thread that starts kernels."""
    image = random_image(int(options.gb * 1e9))
    signing = Signing(run="bench", key=Key.generate())
    before = unhashed_manifest(image, 0)
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[len(cores) // 2 :])
    os.sched_setaffinity(0, cores[: len(cores) // 2])
    # Threads that share a core would stop each other while one holds the lock.
    file_image.NUM_THREADS = min(file_image.NUM_THREADS, len(others))
    rows = []
    for version in range(1, options.steps + 1):
        changes = small_steps(image, options.share, version)
        into = folder / f"v{version}"
        into.mkdir()
        alone, _, _ = beside(options.device, others, partial(time.sleep, 1.0))
        hashing, _, _ = beside(options.device, others, lambda: [image.digest() for _ in range(4)])
        publish = partial(publish_changes, into, image, changes, version, signing, before)
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        publishing, slept, seconds = beside(options.device, others, publish)
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits
        shutil.rmtree(into)
        into.mkdir()
        changes = small_steps(image, options.share, 1000 + version)
        task = BackgroundTask(
            "beside", partial(publish_changes, into, image, changes, version, signing, before)
        )
        started_s = time.perf_counter()
        while not task.done:  # holds the lock, but for the switches that the interpreter forces
            sum(range(100))
        task.result()
        rows.append(
            (
                1 - publishing / alone,
                1 - hashing / alone,
                slept,
                waits,
                seconds,
                time.perf_counter() - started_s,
            )
        )
        shutil.rmtree(into)
    names = ("lost", "lost_hashing", "locked", "waits", "publish_s", "publish_beside_python_s")
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    found = {"gb": options.gb, "share": options.share} | dict(zip(names, medians, strict=True))
    print(json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="toy", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, if memory is short")
    parser.add_argument("--tokens", type=int, default=32768, help="prompt and output tokens of a step")
    parser.add_argument(
        "--micro-tokens", type=int, default=0, help="tokens of a forward pass; 0: all at once"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps with publication")
    parser.add_argument("--plain", type=int, default=4, help="steps without, before and again after them")
    parser.add_argument("--warm", type=int, default=2, help="first steps, which are not counted")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--snapshot-every", type=int, default=1000, help="versions that are also sent whole")
    parser.add_argument("--states", choices=("float32", "int8"), default="float32", help="of the optimizer")
    parser.add_argument("--recompute", action="store_true", help="activation_checkpointing")
    parser.add_argument("--checkpoint", action="store_true", help="also write one checkpoint")
    parser.add_argument("--dir", type=Path, help="where versions are written; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--launches", action="store_true", help="only what publishing takes from the main thread"
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the file, with --launches")
    parser.add_argument(
        "--share", type=float, default=0.02, help="share of words that change, with --launches"
    )
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.layers:
        shape = replace(shape, num_layers=options.layers)
    folder = Path(tempfile.mkdtemp(prefix="shoal-step-", dir=options.dir))
    try:
        if options.launches:
            return measure_launches(options, folder)
        return measure(Bench(shape, options, folder), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
