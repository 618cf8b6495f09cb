"""One learner on all ranks. Rank 0 broadcasts a command, then every rank executes it at the same time.

    rank 0       loop.py: lockstep.step(batch) ──Ranks.broadcast(_follow_step, header)──▶ other ranks: follow()
                               │                                                               │
                               └──────────── Learner.step ◀──── collectives ────▶ _follow_step: Learner.step

A command is a method of Lockstep with its arguments. Commands travel as pickled objects through Ranks.broadcast and Ranks.receive
alone. With a single process nothing is sent, and the calls are the same.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from safetensors import safe_open
from torch import Tensor

from shoal.background import BackgroundTask
from shoal.diloco.averaging.averager import Averager
from shoal.diloco.ranks import Ranks
from shoal.diloco.site_ranks import SiteFollower
from shoal.model.decoder import Decoder
from shoal.model.load_model import DTYPES, empty_decoder, load_causal
from shoal.model.shape import Shape, read_json
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformers_model import empty_transformers_model
from shoal.model.weights import WEIGHTS_FILE
from shoal.net.waiting import Stopped
from shoal.shardcast.adapter_delta import AdapterMatrices
from shoal.tasks import make_task
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import BatchTensors, TrainBatch
from shoal.trainer.distributed.sites import Sites
from shoal.trainer.io.checkpoint import Checkpoint, LearnerSnapshot, take_snapshot
from shoal.trainer.io.load_checkpoint import load_checkpoint
from shoal.trainer.io.weights_diff import Sources, record_event
from shoal.trainer.memory import check_memory
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.policy import (
    Causal,
    adapted_weights,
    add_adapters,
    frozen_weight,
    rounded_adapters,
    taken_adapters,
)
from shoal.trainer.optim.reference import Reference, save_reference
from shoal.trainer.optim.supervised import warm_up
from shoal.trainer.reporting.step_figures import StepFigures
from shoal.wire.run_spec import TaskSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Command:
    """A method of Lockstep that the other ranks call, with its arguments."""

    method: Callable[..., object]
    arguments: tuple[object, ...]
    named: dict[str, object]


@dataclass(frozen=True, slots=True)
class EndRun:
    """Return from `follow`. The reason is written to the log."""

    reason: str


class Lockstep:
    """The learner of this rank. Rank 0 calls the public methods; every other rank calls `follow` once."""

    learner: Learner
    _model_weights: Path
    """The weights file of the model that `create_learner` has loaded, on rank 0."""

    def __init__(
        self, config: TrainerConfig, ranks: Ranks, *, device: str, log: Log, stop: threading.Event
    ) -> None:
        self._config, self._ranks, self._device = config, ranks, device
        self._log, self._stop = log, ranks.shared_stop(stop)
        self.adapters: list[AdapterMatrices] = []
        """The adapters that the last call of `weights` has added, on rank 0."""
        self._saving: BackgroundTask[None] | None = None
        self._executing = False

    # -- rank 0 -------------------------------------------------------------------------------------------

    def create_learner(self, folder: Path, max_new_tokens: int = 0) -> None:
        """Loads the model of a folder; the other ranks receive their shards from here."""
        check_memory(folder, self._config, device=self._device, ranks=self._ranks.size)
        self._model_weights = folder / WEIGHTS_FILE
        model = load_causal(folder, self._dtype, self._device if self._ranks.size == 1 else "cpu")
        architecture = model.shape if isinstance(model, Decoder) else read_json(folder / "config.json")
        packs = isinstance(model, Decoder) or model.packs
        with self._command(Lockstep._create_learner, architecture, packs, max_new_tokens):
            self._create_learner(architecture, packs, max_new_tokens, loaded=model)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Sets the learner of every rank to the state in a checkpoint."""
        with self._command(Lockstep._load_checkpoint, checkpoint):
            self._load_checkpoint(checkpoint)

    def set_reference(self, path: Path) -> None:
        """Sets version 0's weights as the reference of the KL term, if there is one.

        They are read from `path`; at version 0 they are the learner's, and are written there.
        """
        if self._config.kl:
            if not path.exists():
                weights = {} if self.learner.version else self.snapshot().weights
                save_reference(path, weights, self.learner.version)
                del weights  # as large as the model
            with self._command(Lockstep._set_reference):
                self._set_reference(path)

    def create_sites(self, averager: Averager, *, metrics: Metrics, stop: threading.Event) -> Sites:
        """Creates the merger of this learner's updates with other sites' on every rank. It does not connect yet."""
        assert self._config.diloco is not None, "the run file has no [trainer.diloco]"
        with self._command(Lockstep._follow_sites):
            sites = Sites(self.learner, self._config.diloco, averager, metrics=metrics, stop=stop)
        self.learner.sites = sites
        return sites

    def join_sites(self, sites: Sites) -> None:
        """Connects to the other sites; every rank takes over their weights if they are newer."""
        with self._command(Lockstep._follow_join):
            sites.join()

    def warm_up(self, tasks: tuple[TaskSpec, ...], tokenizer: Tokenizer) -> None:
        """Trains on the tasks' own answers before version 0."""
        with self._command(Lockstep._warm_up, tasks, tokenizer):
            self._warm_up(tasks, tokenizer)

    def step(self, batch: TrainBatch) -> StepFigures:
        """Trains on a batch: version v becomes v + 1."""
        if self._ranks.size == 1:
            return self.learner.step(batch, self._stop)
        with self._command(Lockstep._follow_step, replace(batch, samples=()), BatchTensors.of(batch)):
            return self.learner.step(batch, self._stop)

    def check_beginning(self, published: int) -> None:
        """Raises ValueError if a site of several would begin again although it has published versions: its merges are lost."""
        if self._config.diloco is not None and published >= 0:
            raise ValueError(
                f"version {published} is published, but no checkpoint is intact, and merges with other sites cannot be made again; restore "
                "a checkpoint, or start this site as a new run in another folder: it takes over the other sites' state"
            )

    def skip_to(self, version: int, *, is_here: bool) -> None:
        """Sets the version without training; the caller takes over its published weights.

        The updates since the checkpoint may be in the other sites' state already. Made again, they would count twice, and the next
        merge would take back what the others have added since.
        """
        if not is_here:
            raise ValueError(
                f"the checkpoint has version {self.learner.version}, version {version} is published but its files are lost or damaged, "
                "and merges with other sites cannot be made again; restore the folder `versions` or the newest checkpoint"
            )
        with self._command(Lockstep._skip_to, version):
            self._skip_to(version)

    def snapshot(self, shard_folder: Path | None = None) -> LearnerSnapshot:
        """Copies the learner's state to host memory. With several ranks, each starts to write its shards to `shard_folder`."""
        with self._command(Lockstep._take_snapshot, shard_folder):
            return self._take_snapshot(shard_folder)

    def later_snapshot(self, shard_folder: Path) -> Callable[[], LearnerSnapshot]:
        """Returns a function that copies the learner's state to host memory, in any thread before the next update.

        With several ranks or sites the copy is made now, because all of them take part.
        """
        if self._ranks.size > 1 or self.learner.sites is not None:
            snapshot = self.snapshot(shard_folder)
            return lambda: snapshot
        return partial(take_snapshot, self.learner, after=record_event(self.learner.device))

    def weights(self) -> Sources:
        """Returns, for every published tensor that training changes, a function that returns its current value.

        The functions read the learner: call them before the next update. With several ranks each of them gathers one tensor
        from all ranks: call every one once, in the order of their names, before anything else is done with the ranks.
        """
        if not self._config.lora_rank:
            if self._ranks.size > 1:
                self._ranks.broadcast(Command(Lockstep._follow_gathering, (), {}))
                return self._gathered_weights()
            return {name: tensor.detach for name, tensor in self.learner.trained_parameters().items()}
        self.adapters = rounded_adapters(self._whole_trained(), self._config)
        if self._ranks.size == 1:
            return adapted_weights(self.adapters, partial(frozen_weight, self.learner.decoder))
        return adapted_weights(self.adapters, self._frozen_weight)

    def _whole_trained(self) -> dict[str, Tensor]:
        """Returns the whole values of the adapters' parameters."""
        if self._ranks.size == 1:
            return dict(self.learner.trained_parameters())
        self._ranks.broadcast(Command(Lockstep._follow_gathering, (), {}))
        return {name: value() for name, value in self._gathered_weights().items()}

    def whole_weights(self, sources: Sources) -> Iterator[tuple[str, Tensor]]:
        """Yields every published tensor: those that training changes, and with adapters also all others."""
        yield from ((name, value()) for name, value in sources.items())
        if self._config.lora_rank:
            with safe_open(self._model_weights, framework="pt", device="cpu") as file:
                names = [name for name in file.keys() if name not in sources]  # noqa: SIM118
                yield from ((name, file.get_tensor(name)) for name in names)

    def take_weights(self, published: Callable[[str], Tensor]) -> None:
        """Sets every weight that, rounded to bfloat16, differs from the published one to the published one.

        All others keep their float32 value. Not possible with adapters, which cannot be computed from the published sum.
        """
        assert not self._config.lora_rank, "published weights do not determine the adapters"
        with self._command(Lockstep._take_weights):
            self._take_weights(published)

    def take_adapters(self, published: Sequence[AdapterMatrices]) -> None:
        """Sets the adapters that, rounded, differ from the published ones to those."""
        own = taken_adapters(self._whole_trained(), published, self._config)
        with self._command(Lockstep._set_adapters):
            self._set_adapters(own)

    @property
    def _dtype(self) -> torch.dtype:
        """The number format in which the model is loaded. Frozen weights are held once, in the format that computes."""
        return DTYPES[self._config.compute_dtype] if self._config.lora_rank else torch.float32

    def _frozen_weight(self, name: str) -> Tensor:
        with safe_open(self._model_weights, framework="pt", device="cpu") as file:
            weight: Tensor = file.get_tensor(name)
        return weight

    def end(self, reason: str) -> None:
        """Ends `follow` on the other ranks.

        If this rank failed in the middle of a command, the others are inside its collectives and would not receive
        this one. They fail when this process ends.
        """
        if not self._executing:
            self._ranks.broadcast(EndRun(reason))

    @contextmanager
    def _command(
        self, method: "Callable[Concatenate[Lockstep, P], object]", *arguments: P.args, **named: P.kwargs
    ) -> Iterator[None]:
        """Makes the other ranks call a method; the block is what rank 0 does at the same time."""
        self._ranks.broadcast(Command(method, arguments, named))
        self._executing = True
        try:
            yield
        except Stopped:
            self._executing = False  # all ranks stopped at the same place and wait for the next command
            raise
        self._executing = False

    # -- the other ranks ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Executes rank 0's commands until it ends the run."""
        while True:
            command: Command | EndRun = self._ranks.receive()
            if isinstance(command, EndRun):
                self._wait_for_shards()  # the process group must outlive the thread that uses it
                self._log.info("rank 0 is done", rank=self._ranks.rank, reason=command.reason)
                return
            try:
                command.method(self, *command.arguments, **command.named)
            except Stopped:
                continue  # all ranks stopped at the same place; rank 0 says what comes next

    def _follow_sites(self) -> None:
        """Takes part in merges with other sites from now on."""
        self.learner.policy.reshard()
        self.learner.sites = SiteFollower(
            self.learner.decoder, inner=self.learner.optimizer, ranks=self._ranks
        )

    def _follow_join(self) -> None:
        """Receives the weights that rank 0 takes over from other sites."""
        assert isinstance(self.learner.sites, SiteFollower), "_follow_sites comes first"
        self.learner.policy.reshard()
        self.learner.sites.join()

    def _follow_step(self, header: TrainBatch, tensors: BatchTensors) -> StepFigures:
        """Makes the next version from a batch: its header without samples, and these as tensors."""
        return self.learner.step(tensors.batch(header), self._stop)

    def _follow_gathering(self) -> None:
        for value in self._gathered_weights().values():
            value()

    # -- all ranks ----------------------------------------------------------------------------------------

    def _load_checkpoint(self, checkpoint: Checkpoint) -> None:
        load_checkpoint(self.learner, checkpoint)  # all ranks read the folder

    def _skip_to(self, version: int) -> None:
        self.learner.version = version

    def _warm_up(self, tasks: tuple[TaskSpec, ...], tokenizer: Tokenizer) -> None:
        made = [make_task(task) for task in tasks]
        warm_up(self.learner, made, tokenizer, specs=tasks, log=self._log, stop=self._stop)

    def _create_learner(
        self,
        architecture: "Shape | dict[str, Any]",
        packs: bool,
        max_new_tokens: int,
        loaded: Causal | None = None,
    ) -> None:
        """Builds the learner of our decoder's shape or of a transformers model's config.json; rank 0 scatters its weights.

        `packs` says whether the model can hold several samples in one row. `loaded` is the model with its weights, on rank 0 only.
        """
        model = loaded if loaded is not None else _empty_model(architecture, packs, self._dtype)
        if self._config.lora_rank:
            # The adapters' first values are random and must not depend on what ran before in this process.
            torch.manual_seed(self._config.seed)
            add_adapters(model, self._config)
            if self._ranks.size == 1:
                model.to(self._device)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.learner = Learner(model, self._config, max_new_tokens=max_new_tokens, ranks=self._ranks)
        if self._ranks.size > 1:
            for name, parameter in model.named_parameters():
                self._ranks.scatter(values.pop(name) if self._ranks.leads else None, parameter)

    def _set_reference(self, path: Path | None = None) -> None:
        """Scatters version 0's weights, which rank 0 reads from `path`, through the learner's parameters."""
        self.learner.policy.reshard()
        reference = Reference(self.learner.decoder)
        with nullcontext() if path is None else safe_open(path, framework="pt", device="cpu") as file:
            for name, parameter in self.learner.trained_parameters().items():
                self._ranks.scatter(None if file is None else file.get_tensor(name), parameter)
        reference.swap_with(self.learner.decoder)  # the learner's own weights again
        self.learner.reference = reference

    def _take_snapshot(self, shard_folder: Path | None) -> LearnerSnapshot:
        self._wait_for_shards()  # two checkpoints must not use the same process group at once
        snapshot = take_snapshot(self.learner, shard_folder)
        self._saving = snapshot.saving
        return snapshot

    def _gathered_weights(self) -> Sources:
        # Adapters are small, and their product is rounded only once.
        dtype = torch.float32 if self._config.lora_rank else torch.bfloat16

        def gather(parameter: Tensor) -> Tensor:
            return self._ranks.full(parameter.detach().to(dtype))

        parameters = sorted(self.learner.trained_parameters().items())
        return {name: partial(gather, parameter) for name, parameter in parameters}

    @property
    def captures_now(self) -> bool:
        """Returns whether the functions of `weights` must be called at once, in this thread."""
        return self._ranks.size > 1

    def _take_weights(self, published: Callable[[str], Tensor] | None = None) -> None:
        """Receives this rank's shards of the published weights, and takes those over that differ from the learner's."""
        self.learner.policy.reshard()
        with torch.no_grad():
            for name, parameter in self.learner.trained_parameters().items():
                wanted = torch.empty_like(parameter)
                self._ranks.scatter(None if published is None else published(name), wanted)
                differs = parameter.to(torch.bfloat16) != wanted.to(torch.bfloat16)
                parameter.copy_(torch.where(differs, wanted, parameter))

    def _set_adapters(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Receives this rank's shards of the adapters."""
        self.learner.policy.reshard()
        for name, parameter in self.learner.trained_parameters().items():
            self._ranks.scatter(None if values is None else values[name], parameter)

    def _wait_for_shards(self) -> None:
        if self._saving is not None:
            self._saving.wait()


def _empty_model(architecture: "Shape | dict[str, Any]", packs: bool, dtype: torch.dtype) -> Causal:
    if isinstance(architecture, Shape):
        return empty_decoder(architecture, dtype)
    model = empty_transformers_model(architecture, dtype, "cpu")
    model.packs = packs
    return model
