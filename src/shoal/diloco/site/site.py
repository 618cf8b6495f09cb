"""One site: a model, its data and its optimiser, trained until the run's last step.

while steps < last:   batch ─▶ inner step ─▶ (round) ─▶ report, validation loss, checkpoint
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.diloco.averaging.averager import Averager
from shoal.diloco.optimizer import DiLoCo, Landed, Schedule
from shoal.diloco.outer import Outer
from shoal.diloco.site.diloco_file import DilocoFile
from shoal.diloco.site.language import (
    load_language_model,
    model_folder,
    next_token_loss,
    num_positions,
    num_words,
    save_language_model,
    text_encoder,
    validation_loss,
)
from shoal.diloco.site.site_checkpoint import OfferedRound, SiteCheckpoints
from shoal.diloco.site.text_data import Samples, Tokens, read_corpus
from shoal.net.waiting import Stopped
from shoal.telemetry import Log, Metrics

MAX_VALIDATION = 256
"""Samples a validation loss is taken over, at most."""


@dataclass(slots=True)
class Progress:
    """Where a site stands, for whoever shows it."""

    steps: int = 0
    last_step: int = 0
    loss: float = math.nan
    validation: float = math.nan
    compute_s: float = 0.0
    waited_s: float = 0.0
    aside_s: float = 0.0
    """In validation and checkpoints, which are nobody's waiting."""
    sent_bytes: int = 0
    landed: Landed | None = None

    @property
    def utilisation(self) -> float:
        """Time in inner steps, over that and the time spent waiting for rounds."""
        total_s = self.compute_s + self.waited_s
        return self.compute_s / total_s if total_s else math.nan


class Site:
    def __init__(
        self,
        file: DilocoFile,
        averager: Averager,
        *,
        folder: Path,
        device: str,
        peer: str,
        stop: threading.Event,
    ) -> None:
        self.file, self._device, self._stop = file, device, stop
        self.log = Log("site")
        self.progress = Progress(last_step=file.run.steps)
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.model_folder = folder / "model"
        """Where the trained model is, once the run is over."""
        self._source = model_folder(file.run.model, folder / "models", file.run.seed)
        torch.manual_seed(file.run.seed)
        self.model: nn.Module = load_language_model(self._source, device)
        self._load_data(folder, peer)
        self.optimizer = self._make_optimizer(averager)
        self._checkpoints = SiteCheckpoints(folder / "checkpoints", log=self.log)
        self._offered = OfferedRound(folder / "offered")

    def train(self, *, join_s: float) -> Progress:
        self._resume()
        self.optimizer.stop = self._stop
        self.optimizer.on_round = self._landed
        self.optimizer.on_offer = self._offered.write
        adopted = self.optimizer.join(deadline_s=join_s)
        averager = self.optimizer.averager
        self.log.info("joined", peer=averager.peer, round=self.optimizer.outer_state.round)
        for address in averager.addresses:
            self.log.info("others may join by this site", address=address)
        if adopted:
            self.metrics.write("adopted", step=self.optimizer.steps)
        try:
            while self.optimizer.steps < self.file.run.steps:
                if self._stop.is_set():
                    raise Stopped("stopped between two inner steps")
                self._step()
        except Stopped:
            self._save()
            self.log.info("stopped and saved; the same command goes on from here", step=self.optimizer.steps)
            raise
        self.progress.validation = self._validate()
        self._save()
        save_language_model(self.model, self._source, self.model_folder)
        return self.progress

    def close(self) -> None:
        self.optimizer.close()
        self.metrics.close()

    def _step(self) -> None:
        inner, started_s = self.file.inner, time.monotonic()
        elsewhere_s = self.progress.waited_s + self.progress.aside_s
        batch = self._samples.take(inner.batch)
        loss = 0.0
        for at in range(0, inner.batch, inner.micro_batch):
            micro = batch[at : at + inner.micro_batch]
            loss += self._backward(micro, share=len(micro) / inner.batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                inner.lr, self.optimizer.steps, inner.warmup_steps, self.file.run.steps
            )
        self.optimizer.saw(inner.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.steps, self.progress.loss = self.optimizer.steps, loss
        elsewhere_s = self.progress.waited_s + self.progress.aside_s - elsewhere_s
        self.progress.compute_s += time.monotonic() - started_s - elsewhere_s
        if self.optimizer.steps % 10 == 0:
            self.metrics.write("step", step=self.optimizer.steps, loss=round(loss, 5))
        self.on_progress(self.progress)

    def _backward(self, rows: Tokens, *, share: float) -> float:
        tokens_BT = torch.from_numpy(rows).to(self._device)
        half = self.file.inner.compute_dtype == "bfloat16"
        kind = torch.device(self._device).type
        with torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext():
            loss = next_token_loss(self.model, tokens_BT) * share
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _landed(self, landed: Landed) -> None:
        result, progress, rounds = landed.result, self.progress, self.file.rounds
        progress.waited_s += landed.waited_s
        progress.sent_bytes += result.num_bytes
        progress.landed = landed
        started_s = time.monotonic()
        evaluated = landed.round % rounds.eval_every == 0
        if evaluated:
            progress.validation = self._validate()
        self.metrics.write(
            "round",
            round=landed.round,
            step=landed.step,
            outcome=result.outcome.name.lower(),
            peers=len(result.members),
            attempts=result.attempts,
            took_s=round(result.took_s, 3),
            waited_s=round(landed.waited_s, 3),
            sent_bytes=result.num_bytes,
            validation=round(progress.validation, 5) if evaluated else None,
            utilisation=round(progress.utilisation, 4) if progress.compute_s else None,
            state=landed.state_digest,
        )
        self.log.info(
            "round",
            round=landed.round,
            outcome=result.outcome.name.lower(),
            peers=len(result.members),
            took_s=result.took_s,
            validation=progress.validation,
        )
        if landed.round % rounds.checkpoint_every == 0 and not self.optimizer.in_flight:
            self._save()
        progress.aside_s += time.monotonic() - started_s

    def _validate(self) -> float:
        return validation_loss(
            self.model, self._held_out, batch=self.file.inner.micro_batch, device=self._device
        )

    def _load_data(self, folder: Path, peer: str) -> None:
        data, seed = self.file.data, self.file.run.seed
        encode = text_encoder(self._source)
        tokens_N = read_corpus(data.files, encode, folder / "tokens")
        if data.validation:
            held_N = read_corpus(data.validation, encode, folder / "tokens")
        else:
            cut = max(len(tokens_N) - max(len(tokens_N) // 100, 2 * data.sequence + 1), 0)
            tokens_N, held_N = tokens_N[:cut], tokens_N[cut:]
        words, positions = num_words(self.model), num_positions(self.model)
        if data.sequence > positions:
            raise ValueError(
                f"data.sequence = {data.sequence}, and the model has {positions} positions; lower the first"
            )
        self._samples = Samples(tokens_N, sequence=data.sequence, peer=peer, seed=seed, num_words=words)
        held = Samples(held_N, sequence=data.sequence, peer="validation", seed=0, num_words=words)
        self._held_out: Tokens = held.take(min(held.num_samples, MAX_VALIDATION))

    def _make_optimizer(self, averager: Averager) -> DiLoCo:
        inner, rounds = self.file.inner, self.file.rounds
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": inner.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=inner.lr,
            betas=(0.9, 0.95),
        )
        return DiLoCo(
            self.model,
            inner=adamw,
            averager=averager,
            outer=Outer(lr=self.file.outer.lr, momentum=self.file.outer.momentum),
            schedule=Schedule(
                inner_steps=rounds.inner_steps,
                deadline_s=rounds.deadline_s,
                fragments=rounds.fragments,
                overlap_steps=rounds.overlap_steps,
                mix=rounds.mix,
            ),
        )

    def _save(self) -> None:
        content = {
            "run": self.file.run.name,
            "model": {name: value.detach().cpu() for name, value in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "position": self._samples.position,
        }
        self._checkpoints.save(self.optimizer.steps, content)

    def _resume(self) -> None:
        kept = self._checkpoints.newest()
        if kept is None:
            return
        name = kept.get("run", self.file.run.name)  # one of before has none
        if name != self.file.run.name:
            # Its work would count for more than that of sites that have just begun, and they would all take it over.
            raise ValueError(
                f"the checkpoint there is of the run {name!r}, the file is of {self.file.run.name!r}; "
                "give the site another --dir"
            )
        own = dict(self.model.named_parameters())
        if shapes(kept["model"]) != shapes(own):
            raise ValueError(
                "the checkpoint holds another model than the file names; give the site another --dir"
            )
        with torch.no_grad():
            for name, value in kept["model"].items():
                own[name].copy_(value)
        self.optimizer.load_state_dict(kept["optimizer"])
        self._samples.position = kept["position"]
        # A share that was offered after this checkpoint may have been merged: it must not count again.
        self.optimizer.carries = self._offered.read() < self.optimizer.outer_state.round
        self.log.info("resumed", step=self.optimizer.steps, round=self.optimizer.outer_state.round)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def learning_rate(top: float, step: int, warmup_steps: int, last_step: int) -> float:
    """Linear up, then a cosine down to a tenth."""
    if step < warmup_steps:
        return top * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, last_step - warmup_steps))
    return top * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
