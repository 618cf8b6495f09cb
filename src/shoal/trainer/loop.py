"""The trainer's process.

    inbox ──batch──▶ lockstep ──v+1──▶ checkpoint ──▶ publisher ──▶ origin (SHARDCAST) and coordinator
      ▲                                                                         │
      └────────── GET /v1/batches/v: waits until the workers have made it ──────┘

A crash is harmless at any point. Before the checkpoint is on disk, the next process makes the same step from the same
batch. After it, the next process publishes and announces the same version again; the origin and the coordinator
accept the repetition. The publication is prepared in a hidden folder while the checkpoint is written; it is served and
announced only when the checkpoint is on disk. Checkpoint and publication run in the background while the next step trains
(publisher.BackgroundPublication), and end before the next version's snapshot.

With several ranks this file runs on rank 0; the others run Lockstep.follow.
"""

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shoal.diloco.transport.hivemind_mesh import PeerAddress
from shoal.model.builtin import create_model
from shoal.model.tokenizer import load_tokenizer
from shoal.net.http_client import Refused, SignedClient, Unreachable, fetch_files
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.shardcast.publish import SHARD_BYTES
from shoal.shardcast.store import VersionStore
from shoal.tasks.datasets.file_options import file_digests, with_files_from
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.inbox import Inbox
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.distributed.ranks import as_lost_rank, join_ranks
from shoal.trainer.distributed.sites import Sites, make_averager
from shoal.trainer.io.checkpoint import Checkpoint, Checkpoints, LearnerSnapshot
from shoal.trainer.io.publisher import BackgroundPublication, OriginAddress, Publisher
from shoal.trainer.reporting.early_warnings import WarningTracker
from shoal.trainer.reporting.sinks import check_packages, open_sinks
from shoal.trainer.reporting.step_figures import step_report, written_evaluations
from shoal.wire.keys import Key
from shoal.wire.messages import Info, Stats, StepReport
from shoal.wire.run_spec import RunSpec, TaskSpec

FINISH_POLL_S, LAST_LOOKS = 0.5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSite:
    """The settings of one trainer process: folders, addresses and keys."""

    folder: Path
    """Holds model/, checkpoints/, versions/, metrics.jsonl, and reference.safetensors if there is a KL term."""
    model: str
    """A name or folder for model.builtin.create_model; used only when the run begins."""
    coordinator_url: str
    key: Key
    """The trainer's role key, which signs requests."""
    run_key: Key
    """The run's key, which signs manifests."""
    address: OriginAddress
    device: str = "cpu"
    num_threads: int = 0
    """Threads of torch; 0 lets torch choose."""
    deadline_s: float = 900.0
    """Timeout of each wait for the coordinator or for rollouts."""
    shard_bytes: int = SHARD_BYTES
    """Size of a shard of the published versions."""
    snapshot_every: int = 8
    """Versions are published as deltas. Versions divisible by this are also published whole, for nodes that join late."""
    peer: PeerAddress = field(default_factory=PeerAddress)
    """Where this trainer meets other sites, if the run file has a [trainer.diloco]."""
    rank: int = 0
    num_ranks: int = 1
    """Rank and number of processes, as set by torchrun."""


def run_trainer(config: TrainerConfig, site: TrainerSite, *, stop: threading.Event) -> None:
    """Trains until the run is finished or `stop` is set. Continues from the folder's newest checkpoint."""
    if site.num_threads:
        torch.set_num_threads(site.num_threads)
    log = Log("trainer")
    if config.diloco is not None and site.num_ranks > 1:
        raise ValueError(
            f"[trainer.diloco] with {site.num_ranks} ranks: a site's trainer must be one process; start it without torchrun"
        )
    # Between two commands rank 0 waits at most for a checkpoint, an announcement and a batch.
    ranks = join_ranks(
        rank=site.rank, size=site.num_ranks, device=site.device, command_timeout_s=3 * site.deadline_s + 60
    )
    lockstep = Lockstep(config, ranks, device=site.device, log=log, stop=stop)
    try:
        if ranks.leads:
            _run_rank_0(config, site, lockstep, log=log, stop=stop)
        else:
            lockstep.follow()
    except RuntimeError as error:
        if (explained := as_lost_rank(error, ranks)) is not error:
            raise explained from error
        raise
    finally:
        ranks.leave()


def _run_rank_0(
    config: TrainerConfig, site: TrainerSite, lockstep: Lockstep, *, log: Log, stop: threading.Event
) -> None:
    check_packages(config.metrics)
    client = SignedClient(site.coordinator_url, site.key, log=log, stop=stop)
    metrics = Metrics(site.folder / "metrics.jsonl")
    reason = "failed"
    try:
        spec = _fetch_spec(client, site)
        metrics.add_sinks(open_sinks(config.metrics, folder=site.folder, run=spec.run))
        run = _TrainerRun(config, site, spec, lockstep=lockstep, client=client, metrics=metrics, log=log)
        try:
            run.startup()
            run.main_loop()
            reason = "finished"
        finally:
            run.shutdown()
    except Stopped as stopped:
        reason = f"stopped: {stopped}"
        log.info("stopped", reason=stopped)
    finally:
        metrics.close()
        client.close()
        lockstep.end(reason)


class _TrainerRun:
    """The run of rank 0: startup, main_loop, shutdown."""

    def __init__(
        self,
        config: TrainerConfig,
        site: TrainerSite,
        spec: RunSpec,
        *,
        lockstep: Lockstep,
        client: SignedClient,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._config, self._site, self._spec, self._lockstep = config, site, spec, lockstep
        self._client, self._metrics, self._log = client, metrics, log
        self._stop = client.stop
        self._warnings = WarningTracker()
        self._evaluated = written_evaluations(site.folder / "metrics.jsonl")
        self._sites: Sites | None = None
        self._model_folder = site.folder / "model"
        self._checkpoints = Checkpoints(site.folder / "checkpoints", keep=config.keep_checkpoints, log=log)
        self._publication = BackgroundPublication()
        self._inbox = Inbox(
            client,
            config,
            max_lag=spec.max_lag,
            deadline_s=site.deadline_s,
            while_waiting=self._publication.check,
        )
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
        """Serves the origin; loads, publishes and announces the version that the last process reached, or version 0."""
        self._publisher.start()
        if not self._model_folder.exists():
            create_model(self._site.model, self._model_folder, self._config.seed)
        sampling = self._spec.sampling
        self._lockstep.create_learner(self._model_folder, sampling.temperature, sampling.max_new_tokens)
        checkpoint = self._checkpoints.newest()
        if checkpoint is None:
            self._begin()
        else:
            self._resume(checkpoint)

    def main_loop(self) -> None:
        """Makes one version per batch until the last version is published."""
        learner = self._lockstep.learner
        while learner.version < self._spec.last_version:
            started_s = time.monotonic()
            batch = self._inbox.take(learner.version)
            wait_s = time.monotonic() - started_s
            figures = self._lockstep.step(batch)
            report = self._warnings.with_warnings(step_report(batch, figures, wait_s))
            self._wait_for_publication()  # before the snapshot: host memory holds only one
            snapshot = self._lockstep.snapshot(self._checkpoints.shard_folder(learner.version))
            self._checkpoints.begin(snapshot, report)
            self._publication.start(snapshot.version, partial(self._publish, snapshot, report))
        self._wait_for_publication()
        self._serve_until_finished()

    def shutdown(self) -> None:
        """Leaves the other sites and closes what was opened."""
        if self._sites is not None:
            self._sites.close()
        self._publication.close()
        self._checkpoints.close()
        self._publisher.close()
        self._log.info("shut down")

    def _begin(self) -> None:
        self._lockstep.warm_up(self._task(), load_tokenizer(self._model_folder))
        self._create_sites()
        snapshot = self._lockstep.snapshot(self._checkpoints.shard_folder(0))
        self._lockstep.set_reference(self._reference_path, snapshot)
        if self._sites is not None:
            self._sites.join()  # a new site's first version has the weights that the others have reached
            snapshot = self._lockstep.snapshot()
        self._checkpoints.begin(snapshot, None)
        parameters = sum(one.numel() for one in self._lockstep.learner.decoder.parameters())
        self._metrics.write("begun", version=0, parameters=parameters)
        self._publish(snapshot, None)

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._create_sites()
        self._lockstep.load_checkpoint(checkpoint)
        version = self._lockstep.learner.version
        self._log.info("resumed", version=version, checkpoint=checkpoint.folder)
        self._metrics.write("resumed", version=version)
        snapshot = self._lockstep.snapshot()
        self._lockstep.set_reference(self._reference_path, snapshot)
        self._publish(snapshot, checkpoint.state.report)
        # Joined only now: joining may change the weights, and this version must be published with the same ones again.
        if self._sites is not None:
            self._sites.join()

    @property
    def _reference_path(self) -> Path:
        return self._site.folder / "reference.safetensors"

    def _create_sites(self) -> None:
        """Creates the merger of updates, if the run has several sites. It does not connect yet."""
        diloco = self._config.diloco
        if diloco is None:
            return
        log, learner = Log("sites"), self._lockstep.learner
        averager = make_averager(diloco, self._site.peer, self._spec.run, log=log, stop=self._stop)
        self._sites = Sites(learner, diloco, averager, metrics=self._metrics, stop=self._stop)
        learner.sites = self._sites

    def _task(self) -> TaskSpec:
        """Returns the run's task, after fetching its files to this machine."""
        data = self._site.folder / "data"
        fetch_files(self._client, file_digests(self._spec.task), data, deadline_s=self._site.deadline_s)
        return with_files_from(self._spec.task, data)

    def _publish(self, snapshot: LearnerSnapshot, report: StepReport | None) -> None:
        """Publishes and announces a version once its checkpoint is on disk, and writes the step to the metrics.

        After a crash all three are repeated: a step may occur twice in the metrics with equal values, but none is missing.
        """
        folder = self._publisher.prepare(
            self._lockstep.published_weights(snapshot),
            snapshot.version,
            shard_bytes=self._site.shard_bytes,
            snapshot_every=self._site.snapshot_every,
        )
        self._checkpoints.finish(self._site.deadline_s)
        manifest = self._publisher.serve(folder, snapshot.version)
        self._publisher.announce(manifest, report)
        if report is not None:
            self._metrics.write("step", **report.model_dump(exclude={"warnings"}))
            for warning in report.warnings:
                kind, _, sentence = warning.partition(": ")
                self._log.warning(sentence, version=report.version, kind=kind)
                self._metrics.write("warning", version=report.version, kind=kind, sentence=sentence)
            self._write_evaluations()

    def _write_evaluations(self) -> None:
        """Writes held-out results to the metrics that the coordinator has completed since the last call."""
        try:
            known = self._client.call("GET", "/v1/stats", None, Stats).evaluations
        except (Refused, Unreachable):
            return  # the next version asks again
        for one in known:
            if one.complete and one.version not in self._evaluated:
                self._evaluated.add(one.version)
                self._metrics.write(
                    "evaluation",
                    version=one.version,
                    held_out_reward=one.reward_mean,
                    held_out_rollouts=one.rollouts,
                    held_out_answer_tokens=one.answer_tokens_mean,
                )

    def _wait_for_publication(self) -> None:
        # A publication waits for its checkpoint and for the coordinator, each for `deadline_s` at most; preparing it takes time too.
        self._publication.wait(3 * self._site.deadline_s)

    def _serve_until_finished(self) -> None:
        """Serves the last version until its evaluation is complete: workers still fetch it."""

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
        for _ in range(LAST_LOOKS):  # the coordinator's answer may be a second old
            self._write_evaluations()
            if self._spec.last_version in self._evaluated or self._stop.wait(FINISH_POLL_S):
                return


def _fetch_spec(client: SignedClient, site: TrainerSite) -> RunSpec:
    info = client.call_until(
        f"the coordinator at {client.url}", "GET", "/v1/info", None, Info, deadline_s=site.deadline_s
    )
    if info.run_key != site.run_key.public:
        raise ValueError(
            f"the run's key is {info.run_key[:16]}…, this trainer has {site.run_key.public[:16]}…; "
            "copy run.key from the coordinator's keys folder"
        )
    return info.spec
