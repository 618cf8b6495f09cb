"""The learner on every rank. What rank 0 does with it, it first tells the others, and all do it together.

    rank 0    loop.py:  crew.step(batch)  ──tells "step", batch──▶  the others, in crew.follow()
                              │                                          │
                              └────────── learner.step ◀─ collectives ─▶ learner.step

With one process there is nobody to tell, and the lines are the same.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.model.decoder import Decoder
from shoal.model.load_model import empty_decoder, load_causal
from shoal.model.shape import Shape, read_json
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformers_model import empty_foreign
from shoal.model.weights import WEIGHTS_FILE
from shoal.net.waiting import Stopped
from shoal.tasks import make_task
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.distributed.ranks import RankLost, Ranks
from shoal.trainer.io.checkpoint import Checkpoint, read_capture
from shoal.trainer.io.weight_snapshot import Capture, put, take, trained
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.lora import add_adapters, merged
from shoal.trainer.optim.policy import Causal
from shoal.trainer.optim.reference import Reference, Weights, kept_weights
from shoal.trainer.optim.supervised import warm_up
from shoal.trainer.reporting.step_figures import StepFigures
from shoal.wire.run_spec import TaskSpec

_END = "end"


class Crew:
    """Rank 0 calls the methods without an underscore; the others `follow`."""

    def __init__(
        self, config: TrainerConfig, ranks: Ranks, *, device: str, log: Log, stop: threading.Event
    ) -> None:
        self._config, self._ranks, self._device = config, ranks, device
        self._log, self._stop = log, ranks.agreed(stop)
        self._loaded: Causal | None = None
        self._stored: Capture | None = None
        self._reference: Weights = {}
        self._base: Path | None = None
        self._amid = False

    # -- what rank 0 asks for -----------------------------------------------------------------------------

    def begin(self, folder: Path, temperature: float, max_new_tokens: int = 0) -> None:
        """Load the model of a folder; the others get their parts of it from here."""
        self._base = folder / WEIGHTS_FILE
        self._loaded = load_causal(folder, torch.float32, self._device if self._ranks.size == 1 else "cpu")
        if isinstance(self._loaded, Decoder):
            self._together("_begin", self._loaded.shape, True, temperature, max_new_tokens)
        else:
            config = read_json(folder / "config.json")
            self._together("_begin", config, self._loaded.packs, temperature, max_new_tokens)

    def resume(self, checkpoint: Checkpoint) -> None:
        self._stored = read_capture(checkpoint, self.learner)
        self._together("_resume")

    def keep_reference(self, path: Path, capture: Capture) -> None:
        """Where there is a KL term: have version 0's weights at hand, from `path` or, at version 0, the capture's own."""
        if self._config.kl:
            self._reference = kept_weights(path, capture.weights, capture.version)
            self._together("_set_reference")

    def warm_up(self, task: TaskSpec, tokenizer: Tokenizer) -> None:
        self._together("_warm_up", task, tokenizer)

    def step(self, batch: TrainBatch) -> StepFigures:
        figures: StepFigures = self._together("_step", batch)
        return figures

    def capture(self) -> Capture:
        capture: Capture = self._together("_take")
        return capture

    def published(self, capture: Capture) -> Iterable[tuple[str, Tensor]]:
        """The weights that others get: those trained, or the model's own with the adapters added."""
        if not self._config.lora_rank:
            return capture.weights.items()
        assert self._base is not None, "begin comes first"
        return merged(self._base, capture.weights, self._config)

    def end(self, reason: str) -> None:
        """Let the others go; the reason is for their logs.

        If this rank failed amid something the others are still at, they would not hear it: they learn by its end.
        """
        if not self._amid:
            self._ranks.tell((_END, (reason,)))

    # -- what all do --------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what rank 0 says until it says that it is over."""
        while True:
            act, given = self._ranks.listen()
            if act == _END:
                self._log.info("rank 0 is done", rank=self._ranks.rank, reason=given[0])
                return
            try:
                getattr(self, act)(*given)
            except Stopped:
                continue  # all ranks agreed on it; rank 0 says what comes next

    def _together(self, act: str, *given: object) -> Any:
        self._ranks.tell((act, given))
        self._amid = True
        try:
            result = getattr(self, act)(*given)
        except Stopped:
            self._amid = False  # all ranks agreed on it
            raise
        self._amid = False
        return result

    def _begin(
        self, kind: "Shape | dict[str, Any]", packs: bool, temperature: float, max_new_tokens: int
    ) -> None:
        model = self._loaded if self._loaded is not None else _empty(kind, packs)
        self._loaded = None
        if self._config.lora_rank:
            torch.manual_seed(self._config.seed)  # adapters are drawn
            add_adapters(model, self._config)
            if self._ranks.size == 1:
                model.to(self._device)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.learner = Learner(
            model,
            self._config,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            ranks=self._ranks,
        )
        if self._ranks.size > 1:
            for name, parameter in model.named_parameters():
                self._ranks.spread(values.pop(name) if self._ranks.leads else None, parameter)

    def _resume(self) -> None:
        put(self.learner, self._stored)
        self._stored = None

    def _set_reference(self) -> None:
        """Every rank's part of version 0's weights, by way of the learner's, which get their own back."""
        self.learner.policy.reread()
        own = Reference(self.learner.decoder)
        for name, parameter in trained(self.learner).items():
            self._ranks.spread(self._reference[name].detach() if self._ranks.leads else None, parameter)
        self.learner.reference = Reference(self.learner.decoder)
        own.copy_to(self.learner.decoder)
        self._reference = {}

    def _warm_up(self, task: TaskSpec, tokenizer: Tokenizer) -> None:
        warm_up(self.learner, make_task(task), tokenizer, log=self._log, stop=self._stop)

    def _step(self, batch: TrainBatch) -> StepFigures:
        return self.learner.step(batch, self._stop)

    def _take(self) -> Capture:
        return take(self.learner)


def in_words(error: RuntimeError, ranks: Ranks) -> Exception:
    """A collective that failed inside a step speaks of sockets; say that it was another rank."""
    said = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
    if ranks.size > 1 and any(word in said.lower() for word in ("gloo", "nccl", "connection", "timed out")):
        return RankLost(
            f"rank {ranks.rank}: another rank has ended or did not come in time; its log says why ({said})"
        )
    return error


def _empty(kind: "Shape | dict[str, Any]", packs: bool) -> Causal:
    if isinstance(kind, Shape):
        return empty_decoder(kind)
    model = empty_foreign(kind, torch.float32, "cpu")
    model.packs = packs
    return model
