"""One site: a model, its data and its optimizer, trained until the run's last step, with checkpoints.

while steps < last:   batch ─▶ inner step ─▶ (round) ─▶ report, validation loss, checkpoint

checkpoints/step-00000120-<first 16 hex digits of its BLAKE3>.pt     weights, inner and outer state, data position
"""

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from shoal.diloco.averaging.averager import Averager
from shoal.diloco.optimizer import DiLoCo, RoundReport
from shoal.diloco.outer import Outer
from shoal.diloco.ranks import SINGLE_PROCESS, Ranks
from shoal.diloco.site.diloco_file import DilocoFile, InnerSection
from shoal.diloco.site.language import (
    Samples,
    Tokens,
    load_language_model,
    model_folder,
    next_token_loss,
    read_corpus,
    save_language_model,
    text_encoder,
    validation_loss,
)
from shoal.diloco.site_ranks import RankCommand, SiteCommand, SiteFollower
from shoal.files import (
    explain_full_disk,
    flush_folder,
    restore_disk_error,
    write_atomically,
    write_bytes_atomically,
)
from shoal.model.load_model import read_model_limits
from shoal.net.waiting import Stopped
from shoal.telemetry import Log, Metrics

MAX_VALIDATION = 256
"""Largest number of samples in a validation loss."""


@dataclass(slots=True)
class SiteProgress:
    """A site's progress, for display."""

    steps: int = 0
    last_step: int = 0
    loss: float = math.nan
    validation: float = math.nan
    compute_s: float = 0.0
    waited_s: float = 0.0
    overhead_s: float = 0.0
    """Seconds in validation and checkpoints; not counted as waiting for peers."""
    sent_bytes: int = 0
    last_round: RoundReport | None = None

    @property
    def utilisation(self) -> float:
        """Returns the time in inner steps divided by that time plus the time spent waiting for rounds."""
        total_s = self.compute_s + self.waited_s
        return self.compute_s / total_s if total_s else math.nan


class Site:
    """Trains one site's model in a folder of its own.

    With several ranks every rank has the whole model and computes its part of each batch; rank 0 calls `train`, the others call
    `follow`. All ranks read the folder, rank 0 alone writes to it.
    """

    def __init__(
        self,
        file: DilocoFile,
        averager: Averager | None,
        *,
        folder: Path,
        device: str,
        peer: str,
        stop: threading.Event,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        """Loads model and data. `averager` is None on every rank but 0."""
        self.file, self._device, self._stop, self._ranks = file, device, stop, ranks
        if not ranks.leads:
            ranks.wait_for_all()  # rank 0 makes the model's folder and the files of tokens first
        self.log = Log("site")
        self.progress = SiteProgress(last_step=file.run.steps)
        self.on_progress: Callable[[SiteProgress], None] = lambda progress: None
        self.metrics = None if averager is None else Metrics(folder / "metrics.jsonl")
        """None on every rank but 0."""
        self.model_folder = folder / "model"
        """Where the trained model is written at the end of the run."""
        self._source = model_folder(file.run.model, folder / "models", file.run.seed)
        torch.manual_seed(file.run.seed)
        self.model: nn.Module = load_language_model(self._source, device)
        self._load_data(folder, peer)
        if ranks.leads:
            ranks.wait_for_all()
        self._optimizer = self._make_optimizer(averager)
        self._checkpoints = SiteCheckpoints(folder / "checkpoints", log=self.log)
        self._offered_file = folder / "offered"

    @property
    def optimizer(self) -> DiLoCo:
        """Returns rank 0's optimizer."""
        assert isinstance(self._optimizer, DiLoCo), "rank 0 has it"
        return self._optimizer

    def train(self, *, join_s: float) -> SiteProgress:
        """Resumes from the newest checkpoint, joins the swarm and trains to the end. Raises Stopped after saving."""
        self._resume()
        self.optimizer.stop = self._stop
        self.optimizer.on_round = self._report_round
        self.optimizer.on_offer = self._record_offer
        adopted = self.optimizer.join(deadline_s=join_s)
        averager = self.optimizer.averager
        self.log.info("joined", peer=averager.peer, round=self.optimizer.outer_state.round)
        for address in averager.addresses:
            self.log.info("other sites can join by this address", address=address)
        if adopted and self.metrics is not None:
            self.metrics.write("adopted", step=self.optimizer.steps)
        try:
            while self.optimizer.steps < self.file.run.steps:
                if self._stop.is_set():
                    raise Stopped("stopped between two inner steps")
                self._tell(SiteCommand.STEP)
                self._step()
        except Stopped:
            self._save()
            self.log.info("stopped and saved; run the same command to continue", step=self.optimizer.steps)
            raise
        self.progress.validation = self._validate()
        self._save()
        save_language_model(self.model, self._source, self.model_folder)
        return self.progress

    def follow(self) -> None:
        """Does another rank's part of rank 0's `train`, until rank 0 ends."""
        follower = self._optimizer
        assert isinstance(follower, SiteFollower), "rank 0 trains"
        self._resume()
        try:
            follower.join()
            while (command := follower.follow()) is not SiteCommand.END:
                if command is SiteCommand.STEP:
                    self._step()
        except Stopped:
            while follower.follow() is not SiteCommand.END:
                pass  # takes part while rank 0 writes its checkpoint
        self.log.info("rank 0 is done", step=follower.steps)

    def close(self) -> None:
        """Leaves the swarm, and ends `follow` on the other ranks."""
        self._optimizer.close()
        if self.metrics is not None:
            self.metrics.close()
        self._tell(SiteCommand.END)

    def _tell(self, command: SiteCommand) -> None:
        if self._ranks.leads:
            self._ranks.broadcast(RankCommand(command))

    def _step(self) -> None:
        inner, started_s = self.file.inner, time.monotonic()
        other_s = self.progress.waited_s + self.progress.overhead_s
        batch, loss = self._samples.take(inner.batch)[self._ranks.rank :: self._ranks.size], 0.0
        for at in range(0, len(batch), inner.micro_batch):
            micro = batch[at : at + inner.micro_batch]
            loss += self._backward(micro, share=len(micro) / inner.batch)
        self._ranks.add_up(one.grad for one in self.model.parameters() if one.grad is not None)
        loss = self._ranks.total(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(
                inner.lr,
                self._optimizer.steps,
                inner.warmup_steps,
                self.file.run.steps,
                final_share=inner.final_lr_share,
            )
        self._optimizer.count_samples(inner.batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.progress.steps, self.progress.loss = self._optimizer.steps, loss
        other_s = self.progress.waited_s + self.progress.overhead_s - other_s
        self.progress.compute_s += time.monotonic() - started_s - other_s
        if self.metrics is not None and self._optimizer.steps % 10 == 0:
            self.metrics.write("step", step=self._optimizer.steps, loss=round(loss, 5))
        self.on_progress(self.progress)

    def _backward(self, rows: Tokens, *, share: float) -> float:
        tokens_BT = torch.from_numpy(rows).to(self._device)
        half = self.file.inner.compute_dtype == "bfloat16"
        kind = torch.device(self._device).type
        with torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext():
            loss = next_token_loss(self.model, tokens_BT) * share
        loss.backward()
        return float(loss.detach())

    def _report_round(self, report: RoundReport) -> None:
        result, progress, rounds = report.result, self.progress, self.file.rounds
        progress.waited_s += report.waited_s
        progress.sent_bytes += result.num_bytes
        progress.last_round = report
        started_s = time.monotonic()
        evaluated = report.round % rounds.eval_every == 0
        if evaluated:
            progress.validation = self._validate()
        assert self.metrics is not None, "rank 0 reports"
        self.metrics.write(
            "round",
            round=report.round,
            step=report.step,
            outcome=result.outcome.name.lower(),
            peers=len(result.members),
            attempts=result.attempts,
            took_s=round(result.took_s, 3),
            waited_s=round(report.waited_s, 3),
            sent_bytes=result.num_bytes,
            validation=round(progress.validation, 5) if evaluated else None,
            utilisation=round(progress.utilisation, 4) if progress.compute_s else None,
            state=report.state_digest,
        )
        self.log.info(
            "round",
            round=report.round,
            outcome=result.outcome.name.lower(),
            peers=len(result.members),
            took_s=result.took_s,
            validation=progress.validation,
        )
        if report.round % rounds.checkpoint_every == 0 and not self.optimizer.in_flight:
            self._save()
        progress.overhead_s += time.monotonic() - started_s

    def _record_offer(self, round: int) -> None:
        """Writes the number of a round to disk before this site's pseudo-gradient of it is sent to any peer.

        Without it, a site that is killed between a round and its next checkpoint would contribute the same work twice.
        """
        write_bytes_atomically(self._offered_file, f"{round}\n".encode())

    def _validate(self) -> float:
        return validation_loss(
            self.model, self._held_out, batch=self.file.inner.micro_batch, device=self._device
        )

    def _load_data(self, folder: Path, peer: str) -> None:
        data = self.file.data
        encode = text_encoder(self._source)
        tokens_N = read_corpus(data.files, encode, folder / "tokens")
        if data.validation:
            held_N = read_corpus(data.validation, encode, folder / "tokens")
        else:
            cut = max(len(tokens_N) - max(len(tokens_N) // 100, 2 * data.sequence + 1), 0)
            tokens_N, held_N = tokens_N[:cut], tokens_N[cut:]
        limits = read_model_limits(self._source)
        if data.sequence > limits.max_positions:
            raise ValueError(
                f"data.sequence = {data.sequence} exceeds the model's {limits.max_positions} positions; lower data.sequence"
            )
        samples = partial(Samples, sequence=data.sequence, vocab_size=limits.vocab_size)
        self._samples = samples(tokens_N, peer=peer, seed=self.file.run.seed)
        held = samples(held_N, peer="validation", seed=0)
        self._held_out: Tokens = held.take(min(held.num_samples, MAX_VALIDATION))

    def _make_optimizer(self, averager: Averager | None) -> DiLoCo | SiteFollower:
        inner, rounds = self.file.inner, self.file.rounds
        adamw = torch.optim.AdamW(inner_groups(self.model, inner), lr=inner.lr, betas=(0.9, 0.95))
        if averager is None:
            return SiteFollower(self.model, inner=adamw, ranks=self._ranks, num_fragments=rounds.fragments)
        return DiLoCo(
            self.model,
            inner=adamw,
            averager=averager,
            outer=Outer(lr=self.file.outer.lr, momentum=self.file.outer.momentum),
            schedule=rounds.schedule,
            ranks=self._ranks,
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
        name = kept["run"]
        if name != self.file.run.name:
            # Its state has more work behind it than that of sites that have just started, so all would adopt it.
            raise ValueError(
                f"the checkpoint belongs to the run {name!r}, the file to {self.file.run.name!r}; "
                "give the site another --dir"
            )
        own = dict(self.model.named_parameters())
        saved = {name: value.shape for name, value in kept["model"].items()}
        if saved != {name: value.shape for name, value in own.items()}:
            raise ValueError(
                "the checkpoint contains another model than the file names; give the site another --dir"
            )
        with torch.no_grad():
            for name, value in kept["model"].items():
                own[name].copy_(value)
        self._optimizer.load_state_dict(kept["optimizer"])
        self._samples.position = kept["position"]
        if not isinstance(self._optimizer, DiLoCo):
            return
        # A pseudo-gradient offered after this checkpoint may be in the swarm's state: it must not count twice.
        offered = int(self._offered_file.read_text()) if self._offered_file.exists() else -1
        self.optimizer.keep_local_work = offered < self.optimizer.outer_state.round
        self.log.info("resumed", step=self.optimizer.steps, round=self.optimizer.outer_state.round)


def inner_groups(model: nn.Module, inner: InnerSection) -> list[dict[str, Any]]:
    """Returns the parameter groups of the inner optimizer: matrices, then norms and biases."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": inner.weight_decay},
        {
            "params": [p for p in model.parameters() if p.dim() <= 1],
            "weight_decay": inner.weight_decay if inner.decay_norms else 0.0,
        },
    ]


def learning_rate(
    top: float, step: int, warmup_steps: int, last_step: int, *, final_share: float = 0.1
) -> float:
    """Returns a learning rate that rises linearly, then falls along a cosine to `final_share` of `top`."""
    if step < warmup_steps:
        return top * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, last_step - warmup_steps))
    return top * (final_share + 0.5 * (1 - final_share) * (1 + math.cos(math.pi * done)))


KEPT = 2
"""Checkpoints that stay."""
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})\.pt")


class SiteCheckpoints:
    """Checkpoint files with their BLAKE3 in the name. Each is complete or absent; the newest intact one is loaded."""

    def __init__(self, folder: Path, *, log: Log) -> None:
        self._folder, self._log = folder, log
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Writes a checkpoint, removes old ones and returns its path. Raises DiskFull."""
        complete = self._folder / "complete.tmp"
        for unfinished in self._folder.glob(".complete.tmp.*.partial"):  # left by a process that was killed
            unfinished.unlink(missing_ok=True)
        with (
            explain_full_disk(self._folder),
            write_atomically(complete) as file,
            restore_disk_error(complete, RuntimeError),
        ):
            torch.save(content, file)
        path = self._folder / f"step-{step:08d}-{_digest(complete)}.pt"
        os.replace(complete, path)
        flush_folder(self._folder)
        for old in self._newest_first()[KEPT:]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> dict[str, Any] | None:
        """Returns the newest checkpoint that matches its digest, or None."""
        for path in self._newest_first():
            match = _NAME.fullmatch(path.name)
            assert match is not None
            if _digest(path) == match[2]:
                content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return content
            self._log.warning(
                "damaged checkpoint skipped", checkpoint=path, reason="it does not match its digest"
            )
        return None

    def _newest_first(self) -> list[Path]:
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)


def _digest(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()[:16]
