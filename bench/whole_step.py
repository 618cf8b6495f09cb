"""Measures one whole RL step on one device, with one copy of the weights: generate, check, train, publish adapters, merge.

    python bench/whole_step.py --shape toy --prompts 2 --samples 4 --prompt-tokens 16 --cap 48         a quick test on any machine
    python bench/whole_step.py --device cuda --shape 32B --prompts 4 --samples 8

The second is QwQ-32B's shape (`--shape 7B` for a smaller one) with rows that fill one row of 32,768 tokens in the trainer. Weights are
random, and drawn on the device once; engine, validator's recomputation and trainer use the same tensors. The parts, in order:

    generate   TorchEngine with TOPLOC proofs; nearly every row runs to the cap, because random weights seldom end an answer
    check      the validator's recomputation of every row: proofs, log-probs, draws. Nothing is judged: there is no calibration
    train      the trainer's Learner: adapters, bfloat16, recomputed layers, one update. A row's reward is its share of even tokens
    image      not part of a step: the file of version 0 in host memory, as the publisher holds it (65.5 GB at 32B)
    publish    adapters rounded and merged, compared with the image, hashed, encoded, signed, written to --dir
    merge      the merged weights take the base's place on the device, as a worker swaps them
    again      two short rows generated with version 1 and checked

Engine and trainer share one card in turns: the engine's cache is freed before training. What is left out: tasks, coordinator, transport,
and the way back from merged weights to the frozen ones, which the trainer would need for a second step (they come from version 0's
file). Version 0's file is not written, so its digest in the manifest's base is not computed. Each line is printed when its part ends:
`peak_gb` of the device's memory, `held_gb` when it began. If a part fails, those that do not need it still run.
"""

import argparse
import gc
import json
import math
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from step import attempt, empty_image, unhashed_manifest
from torch import Tensor

from shoal.model import packed_prefill
from shoal.model.builtin import ALPHABET
from shoal.model.decoder import Decoder
from shoal.model.fused import fuse
from shoal.model.load_model import empty_decoder
from shoal.model.shape import Shape
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.rollout.engine import torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest, generate
from shoal.shardcast.adapter_delta import encode_adapters
from shoal.shardcast.publish import ImageDelta, Signing, publish_image
from shoal.swarm.validator.prefill import DEVICE_BATCH_TOKENS, LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms, recompute
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample, group_advantages
from shoal.trainer.io.weights_diff import WeightsDiff, count_changed
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.policy import adapted_weights, add_adapters, frozen_weight, rounded_adapters
from shoal.wire.keys import Key
from shoal.wire.manifest import WEIGHTS_FILE, Manifest
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec, Sampling
from shoal.wire.seeded_draw import sample_seed
from trainer import SHAPES, draw

SEED = "00" * 32
T = TypeVar("T")


class Bench:
    """One model's weights on the device and the parts that use them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.shape: Shape = SHAPES[options.shape]
        if options.layers:
            self.shape = replace(self.shape, num_layers=options.layers)
        self.decoder: Decoder = empty_decoder(self.shape, self.dtype, options.device)
        torch.manual_seed(0)
        draw(self.decoder)
        self.decoder.requires_grad_(False)
        self.failed = False
        self.image_memory = ThreadPoolExecutor(1).submit(empty_image, dict(self.decoder.named_parameters()))
        # Engine and recomputation would each join matrices into a copy of their own.
        self.fused = packed_prefill._FUSED[self.decoder] = fuse(self.decoder)
        write_config(folder, self.shape)

    def part(self, name: str, work: Callable[[], T], **figures: Callable[[T], Any]) -> T | None:
        """Runs a part of the step and prints its seconds, its peak memory and figures of its result; returns None if it fails."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held_gb = round(torch.cuda.memory_allocated() / 1e9, 1) if self.cuda else 0.0
        started_s = time.perf_counter()

        def finish() -> T:
            found = work()
            if self.cuda:
                torch.cuda.synchronize()
            return found

        result = attempt(name, finish)
        if result is None:
            self.failed = True
            return None
        line: dict[str, Any] = {"part": name, "s": round(time.perf_counter() - started_s, 2)}
        if self.cuda:
            line |= {"held_gb": held_gb, "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}
        print(json.dumps(line | {key: of(result) for key, of in figures.items()}), flush=True)
        return result

    def generate(self, version: int, requests: Sequence[GenerationRequest]) -> list[FinishedRow]:
        engine = torch_engine.TorchEngine(
            compute_dtype="bfloat16" if self.cuda else "float32",
            proof=ProofSpec(),
            max_rows=len(requests),
            device=self.options.device,
            graphs=self.options.graphs,
        )
        shared: dict[str, Any] = {"load_decoder": lambda *_: self.decoder, "fuse": lambda _: self.fused}
        with mock.patch.multiple(torch_engine, **shared):
            engine.load(self.folder, version)
        return [row for rows in generate(engine, requests, None) for row in rows]

    def check(self, version: int, rows: Sequence[FinishedRow]) -> float:
        """Recomputes every row; returns the mean |difference| of log-probs. Raises Rejected for a proof that is not one."""
        policy = LoadedPolicy(
            version, self.decoder, load_tokenizer(self.folder), DEVICE_BATCH_TOKENS if self.cuda else 4096
        )
        terms = CalibrationTerms(SEED, Sampling(), ProofSpec())
        facts = recompute([row.to_rollout() for row in rows], terms, policy, control_seed=1)
        gaps = [abs(one.logprobs_T - np.array(row.logprobs)) for one, row in zip(facts, rows, strict=True)]
        return float(np.concatenate(gaps).mean())

    def learner(self) -> Learner:
        """Returns a learner whose frozen weights are the decoder's tensors."""
        with torch.device("meta"):
            twin = Decoder(self.shape)
        twin.load_state_dict(dict(self.decoder.named_parameters()), assign=True)
        config = TrainerConfig(
            learning_rate=self.options.lr,
            warmup_steps=0,
            row_tokens=self.options.tokens,
            rows_per_micro_batch=1,
            compute_dtype="bfloat16" if self.cuda else "float32",
            activation_checkpointing=True,
            lora_rank=self.options.lora,
        )
        add_adapters(twin, config)
        return Learner(twin, config)

    def image(self) -> WeightsDiff:
        """Returns the file of the weights, in host memory that was touched since the start, pinned once and filled."""
        diff = WeightsDiff(self.image_memory.result(), self.device)
        for name, tensor in self.decoder.named_parameters():
            diff.published(name).copy_(tensor)
        return diff

    def publish(
        self, learner: Learner, diff: WeightsDiff
    ) -> tuple[Manifest, dict[str, Callable[[], Tensor]], int]:
        """Writes version 1 as adapters. Returns its manifest, the merged weights and the number of words that changed."""
        adapters = rounded_adapters(learner.trained_parameters(), learner.config)
        merged = adapted_weights(adapters, partial(frozen_weight, learner.decoder))
        image, key = diff.image, Key.generate()
        changes = diff.changes(merged)
        num_changed = count_changed(changes, image)
        for _ in image.change(changes):
            pass
        pieces = iter([encode_adapters(adapters, image.num_bytes)])
        folder = self.folder / "v1"
        folder.mkdir()
        sealed = publish_image(
            folder,
            WEIGHTS_FILE,
            image,
            version=1,
            signing=Signing(run="bench", key=key),
            delta=ImageDelta(unhashed_manifest(image, 0), pieces),
            whole=False,
        )
        return sealed.body, merged, num_changed

    def merge(self, learner: Learner, merged: dict[str, Callable[[], Tensor]]) -> int:
        with torch.no_grad():
            for name, value in merged.items():
                frozen_weight(learner.decoder, name).copy_(value())
        return len(merged)

    def requests(self, num_prompts: int, num_samples: int, cap: int) -> list[GenerationRequest]:
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, self.shape.vocab_size, (num_prompts, self.options.prompt_tokens)).tolist()
        return [
            GenerationRequest(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=tuple(prompt),
                sample_seed=sample_seed(SEED, index, sample),
                max_new_tokens=cap,
                temperature=1.0,
            )
            for index, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]


def write_config(folder: Path, shape: Shape) -> None:
    """Writes config.json and a tokenizer, which is all of a model's folder but the weights."""
    config = {
        "model_type": "qwen2" if shape.qkv_bias else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    CharTokenizer(ALPHABET).save(folder)


def batch_of(rows: Sequence[FinishedRow], num_samples: int) -> TrainBatch:
    """Returns the rows as a batch of version 0, with advantages inside each group."""
    ordered = sorted(rows, key=lambda row: (row.request.prompt_index, row.request.sample_index))
    rewards = [sum(token % 2 == 0 for token in row.output_tokens) / len(row.output_tokens) for row in ordered]
    advantages: list[float] = []
    for first in range(0, len(rewards), num_samples):
        advantages += group_advantages(rewards[first : first + num_samples], "std")
    samples = tuple(
        TrainSample(
            tokens=row.request.prompt_tokens + row.output_tokens,
            prompt_len=len(row.request.prompt_tokens),
            logprobs=row.logprobs,
            advantage=advantage,
            lag=0,
        )
        for row, advantage in zip(ordered, advantages, strict=True)
    )
    return TrainBatch(version=0, samples=samples, num_groups=len(rewards) // num_samples)


def random_rows(requests: Sequence[GenerationRequest], vocab_size: int) -> list[FinishedRow]:
    """Returns rows as long as they may be, to train on if generating has failed."""
    rng = np.random.default_rng(1)
    return [
        FinishedRow(
            request=one,
            output_tokens=tuple(rng.integers(3, vocab_size, one.max_new_tokens).tolist()),
            logprobs=(-math.log(vocab_size),) * one.max_new_tokens,
            finish=Finish.LENGTH,
            proof=b"",
        )
        for one in requests
    ]


def whole_step(options: argparse.Namespace, folder: Path) -> int:
    began_s = time.perf_counter()
    bench = Bench(options, folder)
    part = bench.part
    part("weights", lambda: sum(one.numel() for one in bench.decoder.parameters()), parameters=int)
    requests = bench.requests(options.prompts, options.samples, options.cap)
    rows = part(
        "generate",
        lambda: bench.generate(0, requests),
        rows=len,
        tokens=lambda rows: sum(len(row.output_tokens) for row in rows),
    )
    if rows is not None:
        part("check", lambda: bench.check(0, rows), logprob_gap=lambda gap: gap)
    learner = part("adapters", bench.learner, trained=lambda one: sum(p.numel() for p in one.trained_parameters().values()))  # fmt: skip
    if learner is None:
        return 1
    batch = batch_of(rows or random_rows(requests, bench.shape.vocab_size), options.samples)
    part(
        "train",
        lambda: learner.step(batch, threading.Event()),
        tokens=lambda _: batch.num_tokens,
        loss=lambda figures: figures.loss,
        grad_norm=lambda figures: figures.grad_norm,
        logprob_gap=lambda figures: figures.logprob_gap,
    )
    diff = part("image", bench.image, gb=lambda diff: round(diff.image.num_bytes / 1e9, 1))
    published = None if diff is None else part(
        "publish",
        lambda: bench.publish(learner, diff),
        bytes=lambda found: found[0].payload_bytes,
        changed_words=lambda found: found[2],
    )  # fmt: skip
    if published is not None:
        part("merge", lambda: bench.merge(learner, published[1]))
        again = bench.requests(1, 2, min(64, options.cap))
        part("again", lambda: bench.check(1, bench.generate(1, again)), logprob_gap=lambda gap: gap)
    print(json.dumps({"all_s": round(time.perf_counter() - began_s, 1)}), flush=True)
    if diff is not None:
        diff.close()
    return int(bench.failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="toy", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="rows of each prompt")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument(
        "--tokens", type=int, default=32768, help="of the trainer's row, which has all samples"
    )
    parser.add_argument("--prompt-tokens", type=int, help="default: 64, or a quarter of a short sample")
    parser.add_argument(
        "--cap", type=int, help="output tokens of a row, at most; default: what fills the trainer's row"
    )
    parser.add_argument("--lora", type=int, default=32, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="decode without CUDA graphs")
    parser.add_argument(
        "--dir", type=Path, help="where the version is written; a temporary folder by default"
    )
    options = parser.parse_args()
    share = options.tokens // (options.prompts * options.samples)
    options.prompt_tokens = options.prompt_tokens or max(1, min(64, share // 4))
    options.cap = options.cap or max(2, share - options.prompt_tokens)
    folder = Path(tempfile.mkdtemp(prefix="shoal-whole-step-", dir=options.dir))
    try:
        return whole_step(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
