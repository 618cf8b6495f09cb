"""The trainer's process.

    inbox ──batch──▶ learner ──v+1──▶ checkpoint ──▶ publisher ──▶ origin (SHARDCAST) and coordinator
      ▲                                                                        │
      └───────────────── GET /v1/batches/v: waits until the swarm has made it ─┘

The order makes a crash harmless. Before the checkpoint, the step is made again from the same batch; after it, the same
version is published and announced again, and both take the same thing twice.
"""

import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.model.builtin import create_model
from shoal.model.load import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.net.client import SignedClient
from shoal.net.data_files import fetch_files
from shoal.net.deadline import NotYet, Stopped, wait_for
from shoal.shardcast.publish import SHARD_BYTES
from shoal.shardcast.store import VersionStore
from shoal.tasks import Task, make_task
from shoal.tasks.files import file_digests, with_files_from
from shoal.telemetry import Log, Metrics
from shoal.trainer.batch import TrainBatch
from shoal.trainer.checkpoint import Checkpoints, restore
from shoal.trainer.config import TrainerConfig
from shoal.trainer.inbox import Inbox
from shoal.trainer.learner import Learner, StepFigures
from shoal.trainer.publisher import Address, Publisher
from shoal.trainer.supervised import warm_up
from shoal.wire.keys import Key
from shoal.wire.messages import Info, StepReport
from shoal.wire.run import RunSpec

FINISH_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSite:
    """Where and as whom a trainer runs: all that is not the recipe."""

    folder: Path
    """Holds model/, checkpoints/, versions/ and metrics.jsonl."""
    model: str
    """A name or folder for model.builtin.create_model; looked at only when the run begins."""
    coordinator_url: str
    key: Key
    """The trainer's role key: signs requests."""
    run_key: Key
    """Signs manifests."""
    address: Address
    """Of the origin."""
    device: str = "cpu"
    num_threads: int = 0
    """For torch; 0 leaves torch's own choice."""
    deadline_s: float = 900.0
    """Of each wait for the coordinator or for rollouts."""
    shard_bytes: int = SHARD_BYTES
    """Of the versions it publishes."""
    snapshot_every: int = 8
    """Versions are published as what changed since the last; one divisible by this also whole, for those who come late."""


def run_trainer(config: TrainerConfig, site: TrainerSite, *, stop: threading.Event) -> None:
    """Train until the run is finished or `stop` is set; goes on where the folder's newest checkpoint ends."""
    if site.num_threads:
        torch.set_num_threads(site.num_threads)
    log = Log("trainer")
    client = SignedClient(site.coordinator_url, site.key, log=log, stop=stop)
    metrics = Metrics(site.folder / "metrics.jsonl")
    try:
        spec = _ask_terms(client, site)
        run = _Run(config, site, spec, client=client, metrics=metrics, log=log)
        try:
            run.startup()
            run.main_loop()
        finally:
            run.shutdown()
    except Stopped as stopped:
        log.info("stopped", reason=stopped)
    finally:
        metrics.close()
        client.close()


class _Run:
    """One process's life: startup, main_loop, shutdown."""

    def __init__(
        self,
        config: TrainerConfig,
        site: TrainerSite,
        spec: RunSpec,
        *,
        client: SignedClient,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._config, self._site, self._spec = config, site, spec
        self._client, self._metrics, self._log = client, metrics, log
        self._stop = client.stop
        self._model_folder = site.folder / "model"
        self._checkpoints = Checkpoints(site.folder / "checkpoints", keep=config.keep_checkpoints, log=log)
        self._inbox = Inbox(client, config, max_lag=spec.max_lag, deadline_s=site.deadline_s)
        self._publisher = Publisher(
            VersionStore(
                site.folder / "versions", spec.keep_versions, run=spec.run, run_key=site.run_key.public
            ),
            model_folder=self._model_folder,
            run_key=site.run_key,
            client=client,
            address=site.address,
            deadline_s=site.deadline_s,
            log=log,
        )

    def startup(self) -> None:
        """Serve the origin, then be at the version the last process reached, published and announced."""
        self._publisher.start()
        self._learner, report = self._resume_or_begin()
        self._send_out(report)

    def main_loop(self) -> None:
        while self._learner.version < self._spec.last_version:
            started_s = time.monotonic()
            batch = self._inbox.take(self._learner.version)
            wait_s = time.monotonic() - started_s
            figures = self._learner.step(batch, self._stop)
            report = step_report(batch, figures, wait_s)
            self._checkpoints.save(self._learner, report)
            self._send_out(report)
        self._serve_until_finished()

    def shutdown(self) -> None:
        self._publisher.close()
        self._log.info("left")

    def _resume_or_begin(self) -> tuple[Learner, StepReport | None]:
        if not self._model_folder.exists():
            create_model(self._site.model, self._model_folder, self._config.seed)
        decoder = load_decoder(self._model_folder, torch.float32, self._site.device)
        learner = Learner(decoder, self._config, temperature=self._spec.sampling.temperature)
        checkpoint = self._checkpoints.newest()
        if checkpoint is not None:
            restore(checkpoint, learner)
            self._log.info("resumed", version=learner.version, checkpoint=checkpoint.folder)
            self._metrics.write("resumed", version=learner.version)
            return learner, checkpoint.state.report
        warm_up(
            learner,
            self._make_task(),
            load_tokenizer(self._model_folder),
            log=self._log,
            stop=self._stop,
        )
        self._checkpoints.save(learner, None)
        self._metrics.write("begun", version=0, parameters=sum(p.numel() for p in decoder.parameters()))
        return learner, None

    def _make_task(self) -> Task:
        data = self._site.folder / "data"
        fetch_files(self._client, file_digests(self._spec.task), data, deadline_s=self._site.deadline_s)
        return make_task(with_files_from(self._spec.task, data))

    def _send_out(self, report: StepReport | None) -> None:
        """Publish and announce the learner's version, and note the step that made it.

        After a crash all three are done again: a step may stand in the metrics twice, in the same words, but none is missing.
        """
        manifest = self._publisher.publish(
            self._learner.decoder,
            self._learner.version,
            shard_bytes=self._site.shard_bytes,
            snapshot_every=self._site.snapshot_every,
        )
        self._publisher.announce(manifest, report)
        if report is not None:
            self._metrics.write("step", **report.model_dump())

    def _serve_until_finished(self) -> None:
        """The last version is out; workers still fetch it to be evaluated."""

        def attempt() -> None:
            info = self._client.call_until(
                "the coordinator", "GET", "/v1/info", None, Info, deadline_s=self._site.deadline_s
            )
            if not info.finished:
                raise NotYet("its evaluation is not complete", FINISH_POLL_S)

        wait_for(
            f"the evaluation of the last version, {self._spec.last_version}",
            attempt,
            deadline_s=self._site.deadline_s,
            log=self._log,
            stop=self._stop,
        )


def step_report(batch: TrainBatch, figures: StepFigures, wait_s: float) -> StepReport:
    """What the coordinator and the metrics get to know. Tokens count prompts and outputs of the rollouts trained on."""
    lags = [sample.lag for sample in batch.samples]
    return StepReport(
        version=batch.version + 1,
        reward_mean=batch.reward_mean,
        groups=batch.num_groups,
        dropped_groups=batch.dropped_groups,
        dropped_share=batch.dropped_share,
        unparseable=batch.unparseable,
        rollouts=len(batch.samples),
        tokens=batch.num_tokens,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        wait_s=wait_s,
        tokens_per_s=batch.num_tokens / max(figures.train_s, 1e-9),
        **asdict(figures),
    )


def _ask_terms(client: SignedClient, site: TrainerSite) -> RunSpec:
    info = client.call_until(
        f"the coordinator at {client.url}", "GET", "/v1/info", None, Info, deadline_s=site.deadline_s
    )
    if info.run_key != site.run_key.public:
        raise ValueError(
            f"the run's key is {info.run_key[:16]}…, this trainer holds {site.run_key.public[:16]}…; "
            "copy run.key from the coordinator's keys folder"
        )
    return info.spec
