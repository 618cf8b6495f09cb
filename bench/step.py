"""Measures what publication costs training: steps with and without it, exposed seconds, seconds and bytes of a version.

    python bench/step.py --shape toy --tokens 512                                         a quick test on any machine
    python bench/step.py --device cuda --shape 0.5B --tokens 32768 --steps 12
    python bench/step.py --device cuda --shape 7B --tokens 65536 --micro-tokens 16384 --recompute --states int8 --steps 3
                                                                                          one H200, random weights, 110 GB

Trains `--steps` versions without publication, then as many with it (the trainer's own Publisher, without a coordinator), then again
without. Weights and samples are random. Prints one line per version and a summary:

step        seconds from one version to the next
exposed     of these, seconds that training stood still: before its first update for the capture of the last version, and after
            it for the end of the last publication
publish     seconds from the end of a step until its version is served, beside the next step
slowdown    median step with publication, without its exposed seconds, against the median without; other work on host and GPU

With `--checkpoint` the middle version is also checkpointed (12 bytes per parameter in host memory and on disk).
"""

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.load_model import empty_decoder
from shoal.model.shape import Shape
from shoal.net.http_client import SignedClient
from shoal.shardcast.file_image import ChangedWords
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
from trainer import SHAPES, draw, make_batch

WAIT_S = 600.0


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
        decoder = empty_decoder(shape, torch.float32, options.device)
        torch.manual_seed(0)
        draw(decoder)
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

    def begin(self) -> None:
        """Publishes the current version whole, as the base of the next."""
        version = self.learner.version
        folder = self.publisher.prepare_whole(self.lockstep.whole_weights(self.lockstep.weights()), version)
        self.publisher.serve(folder, version)

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
        bench.step()
        times.append(time.perf_counter() - started_s)
        print(json.dumps({"version": bench.learner.version, "step_s": round(times[-1], 4)}), flush=True)
    return times


def run_published(bench: Bench, steps: int, *, checkpoint: bool) -> list[dict[str, Any]]:
    """Trains and publishes `steps` versions after a first one whose publication only fills the pipeline."""
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
    bench.publication.finish(WAIT_S)
    bench.checkpoints.finish(WAIT_S)
    show_published(rows, publications)
    return rows[1:]


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
    before_s, after_s = statistics.median(plain), statistics.median(again)
    without_s = statistics.median(plain + again)
    step_s = statistics.median(row["step_s"] for row in rows)
    exposed_s = statistics.fmean(row["publish_exposed_s"] for row in rows)
    own_s = statistics.median(
        row["step_s"] - row["publish_exposed_s"] - row["checkpoint_exposed_s"] for row in rows
    )
    parameters = sum(one.numel() for one in bench.learner.decoder.parameters())
    cuda = bench.device.type == "cuda"
    return {
        "parameters": parameters,
        "tokens": bench.batch.num_tokens,
        "step_s_without": without_s,
        "step_s_without_before_and_after": [before_s, after_s],
        "step_s_with": step_s,
        "publish_exposed_s": exposed_s,
        "exposed_share": exposed_s / step_s,
        "slowdown": own_s / without_s - 1,
        "publish_s_median": statistics.median(row["publish_s"] for row in rows),
        "publish_s_max": max(row["publish_s"] for row in rows),
        "capture_s_median": statistics.median(row["capture_s"] for row in rows),
        "bytes_median": statistics.median(row["bytes"] for row in rows),
        "changed_share": statistics.fmean(row["changed_words"] for row in rows) / parameters,
        "checkpoint_exposed_s": sum(row["checkpoint_exposed_s"] for row in rows),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
    }


def main() -> None:
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
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--snapshot-every", type=int, default=1000, help="versions that are also sent whole")
    parser.add_argument("--states", choices=("float32", "int8"), default="float32", help="of the optimizer")
    parser.add_argument("--recompute", action="store_true", help="activation_checkpointing")
    parser.add_argument("--checkpoint", action="store_true", help="also write one checkpoint")
    parser.add_argument("--dir", type=Path, help="where versions are written; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.layers:
        shape = replace(shape, num_layers=options.layers)
    folder = Path(tempfile.mkdtemp(prefix="shoal-step-", dir=options.dir))
    try:
        bench = Bench(shape, options, folder)
        run_plain(bench, 2)
        plain = run_plain(bench, options.steps)
        started_s = time.perf_counter()
        bench.begin()
        print(f"first version written in {time.perf_counter() - started_s:.1f} s", flush=True)
        rows = run_published(bench, options.steps, checkpoint=options.checkpoint)
        again = run_plain(bench, options.steps)
        found = {"shape": options.shape, "layers": shape.num_layers} | summary(plain, rows, again, bench)
        print(json.dumps(found, indent=1))
        if options.json:
            options.json.write_text(json.dumps({"summary": found, "versions": rows}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
