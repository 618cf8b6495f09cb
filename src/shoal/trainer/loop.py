"""The trainer's process.

    inbox ──batch──▶ lockstep ──v+1──┬──▶ publisher ──▶ origin (SHARDCAST) and coordinator
      ▲                              └──▶ checkpoint, every `checkpoint_minutes`
      │                                                                         │
      └────────── GET /v1/batches/v: waits until the workers have made it ──────┘

A version is published as soon as its step is done, in the background, while the next step trains. Only two waits can hold up
training, and both are measured: before the first update of a step, until capture and checkpoint copy have read the weights; and
after the step, until the version before is published. Checkpoints are written in the background at an interval.

A crash is harmless at any point: the next process loads the last checkpoint, makes the versions since then again from the same
batches, compares the last with what was published, and continues from the published weights (_TrainerRun._catch_up). With
several sites merges cannot be made again: a version is checkpointed before it is served, and taken over if that checkpoint is damaged.

With several ranks this file runs on rank 0; the others run Lockstep.follow.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from shoal.diloco.ranks import as_lost_rank, join_ranks
from shoal.diloco.transport.hivemind_mesh import PeerAddress
from shoal.files import folder_bytes
from shoal.model.builtin import create_model
from shoal.model.tokenizer import load_tokenizer
from shoal.net.http_client import SignedClient, fetch_files
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.shardcast.adapter_delta import AdapterMatrices
from shoal.shardcast.file_image import ChangedWords
from shoal.shardcast.publish import SHARD_BYTES
from shoal.shardcast.store import VersionStore
from shoal.tasks.datasets.file_options import run_digests, with_files_from
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.inbox import Inbox
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.distributed.sites import Sites, make_averager
from shoal.trainer.io.background_save import BackgroundSave
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.publisher import OriginAddress, Publisher, PublisherSettings
from shoal.trainer.io.recalibration import MeasureNoise, Recalibration
from shoal.trainer.io.weights_diff import count_changed, record_event
from shoal.trainer.reporting.early_warnings import WarningTracker
from shoal.trainer.reporting.recorder import ExposedTime, StepRecorder
from shoal.trainer.reporting.sinks import check_packages, open_sinks
from shoal.trainer.reporting.step_figures import step_report
from shoal.wire.keys import Key
from shoal.wire.ledger import Rederived
from shoal.wire.messages import Info, StepReport
from shoal.wire.run_spec import RunSpec

FINISH_POLL_S, LAST_LOOKS = 0.5, 6
EXIT_TIMEOUT_S = 5.0
"""How long a process that exits waits for a publication. The next process repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSite:
    """The settings of one trainer process: folders, addresses and keys."""

    folder: Path
    """Holds model/, checkpoints/, versions/, archive/, newest, metrics.jsonl, and reference.safetensors with a KL term."""
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
    measure_noise: MeasureNoise | None = None
    """Repeats the calibration with the model in a folder; None if this machine cannot."""
    rank: int = 0
    num_ranks: int = 1
    """Rank and number of processes, as set by torchrun."""


def run_trainer(config: TrainerConfig, site: TrainerSite, *, stop: threading.Event) -> None:
    """Trains until the run is finished or `stop` is set. Continues from the folder's newest checkpoint."""
    if site.num_threads:
        torch.set_num_threads(site.num_threads)
    log = Log("trainer")
    # Between two commands rank 0 waits at most for a checkpoint, an announcement and a batch, or for a merge with other sites.
    merge_s = config.diloco.deadline_s if config.diloco is not None else 0.0
    ranks = join_ranks(
        rank=site.rank,
        size=site.num_ranks,
        device=site.device,
        command_timeout_s=3 * max(site.deadline_s, merge_s) + 60,
    )
    try:
        _run_rank(config, site, Lockstep(config, ranks, device=site.device, log=log, stop=stop), log, stop)
    except RuntimeError as error:
        if (explained := as_lost_rank(error, ranks)) is not error:
            raise explained from error
        raise
    finally:
        ranks.leave()
    ranks.release()


def _run_rank(
    config: TrainerConfig, site: TrainerSite, lockstep: Lockstep, log: Log, stop: threading.Event
) -> None:
    if site.rank:
        lockstep.follow()
        return
    check_packages(config.metrics)
    client = SignedClient(site.coordinator_url, site.key, log=log, stop=stop)
    metrics = Metrics(site.folder / "metrics.jsonl")
    reason = "failed"
    try:
        info = _fetch_info(client, site)
        if info.run_key != site.run_key.public:
            raise ValueError(
                f"the run's key is {info.run_key[:16]}…, this trainer has {site.run_key.public[:16]}…; "
                "copy run.key from the coordinator's keys folder"
            )
        spec = info.spec
        metrics.add_sinks(open_sinks(config.metrics, folder=site.folder, run=spec.run))
        run = _TrainerRun(config, site, spec, lockstep=lockstep, client=client, metrics=metrics, log=log)
        try:
            run.startup()
            run.main_loop()
            reason = "finished"
        except Stopped:
            run.save_on_stop()
            raise
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
        self._exposed = ExposedTime()
        self._announced = -1
        """The newest version that this process has announced."""
        self._newest_report: StepReport | None = None
        """The report of the newest version, for its checkpoint."""
        self._checkpoint_at_s = time.monotonic() + 60 * config.checkpoint_minutes
        """When the next checkpoint is due."""
        self._recorder = StepRecorder(site.folder / "metrics.jsonl", metrics, client, log)
        self._sites: Sites | None = None
        self._model_folder = site.folder / "model"
        self._checkpoints = Checkpoints(site.folder / "checkpoints", keep=config.keep_checkpoints, log=log)
        self._publication = BackgroundSave[list[ChangedWords]]("version", "to be published")
        self._inbox = Inbox(
            client,
            config,
            max_lag=spec.max_lag,
            temperatures={task.title: spec.sampling.of(task).temperature for task in spec.tasks},
            deadline_s=site.deadline_s,
            while_waiting=self._while_waiting,
        )
        self._publisher = Publisher(
            VersionStore(
                site.folder / "versions", spec.keep_versions, run=spec.run, run_key=site.run_key.public
            ),
            model_folder=self._model_folder,
            run_key=site.run_key,
            client=client,
            address=site.address,
            settings=PublisherSettings(
                deadline_s=site.deadline_s,
                device=site.device,
                shard_bytes=site.shard_bytes,
                snapshot_every=site.snapshot_every,
                last_version=spec.last_version,
                archive=config.archive,
                recalibration=Recalibration(spec, site.folder, self._model_folder, site.measure_noise, log),
            ),
            log=log,
        )

    def startup(self) -> None:
        """Serves the origin; brings the learner to the newest published version, or makes and publishes version 0."""
        self._publisher.start()
        if not self._model_folder.exists():
            create_model(self._site.model, self._model_folder, self._config.seed)
        longest = max(self._spec.sampling.of(task).max_new_tokens for task in self._spec.tasks)
        self._lockstep.create_learner(self._model_folder, longest)
        self._lockstep.learner.before_change = self._wait_for_readers
        checkpoint = self._checkpoints.newest()
        if checkpoint is None:
            self._begin()
            self._catch_up(None)
            if self._checkpoints.covered is None:
                # Nobody has to wait for it: the model gives the same version 0 again.
                self._start_checkpoint(self._newest_report)
            return
        self._create_sites()
        self._lockstep.load_checkpoint(checkpoint)
        version = self._lockstep.learner.version
        self._log.info("resumed", version=version, checkpoint=checkpoint.folder)
        self._metrics.write("resumed", version=version)
        self._lockstep.set_reference(self._reference_path)
        self._catch_up(checkpoint.state.report)
        # Joined only now: joining may change the weights, and this version must be published with the same ones again.
        if self._sites is not None:
            self._lockstep.join_sites(self._sites)

    def main_loop(self) -> None:
        """Makes one version per batch until the last version is published."""
        learner = self._lockstep.learner
        while learner.version < self._spec.last_version:
            report = self._newest_report = self._step()
            if self._config.diloco is not None or (
                not self._checkpoints.running and time.monotonic() >= self._checkpoint_at_s
            ):
                self._start_checkpoint(report)
            with self._exposed.publishing():
                capture = self._make_capture()
            publish = partial(self._publish, learner.version, report, self._adapters_to_send())
            self._publication.start(learner.version, capture, publish)
        self._wait_for_publication()
        self._save()
        self._serve_until_finished()

    def _make_capture(self) -> Callable[[], list[ChangedWords]]:
        """Returns a function that finds the words that changed. Several ranks find them now: all of them take part."""
        sources = self._lockstep.weights()
        event = record_event(self._lockstep.learner.device)
        capture = partial(self._publisher.diff.changes, sources, event)
        if not self._lockstep.captures_now:
            return capture
        changes = capture()
        return lambda: changes

    def save_on_stop(self) -> None:
        """Writes a checkpoint of the version that was reached.

        Not if the stop came between two updates of a step or in a merge, whose update is in the weights already: the next process
        would train on the batch again. Nor if the version before is not announced: the next process must make that one again first,
        because versions are announced in order.
        """
        learner = self._lockstep.learner
        if self._announced >= 0 and not learner.between_versions and learner.version <= self._announced + 1:
            self._save()

    def shutdown(self) -> None:
        """Leaves the other sites and closes what was opened."""
        if self._sites is not None:
            self._sites.close()
        if self._publication.close(EXIT_TIMEOUT_S):
            self._publisher.write_newest_whole()
        self._checkpoints.close(self._site.deadline_s)
        self._publisher.close()
        self._log.info("shut down")

    # -- a step -------------------------------------------------------------------------------------------

    def _step(self) -> StepReport:
        """Makes the next version and returns its report, after the version before it is published."""
        started_s = time.monotonic()
        batch = self._inbox.take(self._lockstep.learner.version)
        wait_s = time.monotonic() - started_s
        before_s = self._exposed.total_s
        figures = self._lockstep.step(batch)
        exposed_s = self._exposed.total_s - before_s
        self._wait_for_publication()
        exposed, self._exposed = self._exposed, ExposedTime()
        report = step_report(
            batch,
            replace(figures, train_s=figures.train_s - exposed_s),
            wait_s,
            disk_bytes=folder_bytes(self._site.folder),
            publish_exposed_s=exposed.publish_s,
            checkpoint_exposed_s=exposed.checkpoint_s,
            train_passes=self._lockstep.learner.config.passes_per_token,
        )
        return self._warnings.with_warnings(report)

    def _while_waiting(self) -> None:
        if not self._publication.running:
            self._publisher.recalibrate()

    def _wait_for_readers(self) -> None:
        """Waits until nobody reads the weights: the publication's capture and the checkpoint's copy are complete."""
        with self._exposed.publishing():
            self._publication.wait_for_copy(self._site.deadline_s)
        with self._exposed.checkpointing():
            self._checkpoints.wait_for_copy(self._site.deadline_s)

    def _wait_for_publication(self) -> None:
        # A publication waits for its checkpoint and for the coordinator, each for `deadline_s` at most; preparing it takes time too.
        with self._exposed.publishing():
            self._publication.finish(3 * self._site.deadline_s)

    # -- checkpoints --------------------------------------------------------------------------------------

    def _start_checkpoint(self, report: StepReport | None) -> None:
        version = self._lockstep.learner.version
        self._checkpoint_at_s = time.monotonic() + 60 * self._config.checkpoint_minutes
        with self._exposed.checkpointing():  # several ranks copy their shards now
            take = self._lockstep.later_snapshot(self._checkpoints.shard_folder(version))
        self._checkpoints.begin(version, take, report)

    def _save(self) -> None:
        """Writes a checkpoint of the current version, unless there is one, and waits for it."""
        self._checkpoints.finish(self._site.deadline_s)
        if self._checkpoints.covered != self._lockstep.learner.version:
            self._start_checkpoint(self._newest_report)
            self._checkpoints.finish(self._site.deadline_s)

    # -- the beginning ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Makes version 0, with its checkpoint after supervised steps, which are not made again after a crash."""
        self._lockstep.check_beginning(self._newest_published())
        data = self._site.folder / "data"
        digests = run_digests(self._spec, to_grade=False)
        fetch_files(self._client, digests, data, deadline_s=self._site.deadline_s)
        tasks = tuple(with_files_from(task, data) for task in self._spec.tasks)
        self._lockstep.warm_up(tasks, load_tokenizer(self._model_folder))
        self._create_sites()
        self._lockstep.set_reference(self._reference_path)
        if self._sites is not None:
            # A new site's first version has the weights that the others have reached.
            self._lockstep.join_sites(self._sites)
        parameters = sum(one.numel() for one in self._lockstep.learner.decoder.parameters())
        self._metrics.write("begun", version=0, parameters=parameters)
        if self._config.supervised_steps or self._sites is not None:
            self._save()

    def _catch_up(self, report: StepReport | None) -> None:
        """Brings the learner to the newest published version and announces that; publishes the learner's version if it is newer.

        Versions after the checkpoint are made again from the same batches. Where they come out differently, the learner
        takes over the published weights and keeps its own optimizer state.
        """
        learner = self._lockstep.learner
        first = learner.version
        published = self._newest_published()
        if self._sites is not None and learner.version < published:
            self._lockstep.skip_to(published, is_here=self._publisher.open_version(published))
            report = None
        while learner.version < published:
            report = self._step()
            self._log.info("version made again", version=learner.version, published=published)
            self._recorder.record(report)
        self._newest_report = report
        version = learner.version
        if version <= published and self._publisher.open_version(version):
            differing = self._compare_with_published()
            manifest = self._publisher.manifest(version)
            assert manifest is not None, "a version that was opened has a manifest"
        else:
            differing, manifest = 0, self._publisher.serve(self._prepare_now(version), version)
        rederived = None
        if first < version or differing:
            rederived = Rederived(checkpoint_version=first, differing_words=differing)
            self._metrics.write("rederived", version=version, checkpoint=first, differing_words=differing)
            self._checkpoint_at_s = time.monotonic()
        self._publisher.announce(manifest, report, rederived)
        self._publisher.measure_distance(version)
        if report is not None:
            self._recorder.record(report)
        self._announced = version

    def _newest_published(self) -> int:
        """Returns the newest version that others may have: announced, or served by the process before. -1 if there is none."""
        known = (_fetch_info(self._client, self._site).newest_version, self._publisher.newest)
        return max((version for version in known if version is not None), default=-1)

    def _compare_with_published(self) -> int:
        """Takes over the published weights or adapters where the learner's differ; returns the number of words that did.

        Adapters stay if the version was sent as words, which do not determine them.
        """
        diff, version = self._publisher.diff, self._lockstep.learner.version
        differing = count_changed(diff.changes(self._lockstep.weights()), diff.image)
        if differing:
            adapters = self._publisher.adapters(version) if self._config.lora_rank else []
            stays = self._config.lora_rank and not adapters
            goes_on = "the adapters made again" if stays else "the published weights"
            message = (
                f"the version made again differs from the published one; training continues from {goes_on}"
            )
            self._log.warning(message, version=version, differing_words=differing)
            if adapters:
                self._lockstep.take_adapters(adapters)
            elif not stays:
                self._lockstep.take_weights(diff.published)
        return differing

    def _prepare_now(self, version: int) -> Path:
        """Writes the learner's version, as a delta if the version before it is here."""
        sources = self._lockstep.weights()
        if version and self._publisher.open_version(version - 1):
            changes = self._publisher.diff.changes(sources)
            return self._publisher.prepare(changes, version, self._adapters_to_send())
        return self._publisher.prepare_whole(self._lockstep.whole_weights(sources), version)

    @property
    def _reference_path(self) -> Path:
        return self._site.folder / "reference.safetensors"

    def _create_sites(self) -> None:
        """Creates the merger of updates, if the run has several sites. It does not connect yet."""
        if (diloco := self._config.diloco) is None:
            return
        averager = make_averager(diloco, self._site.peer, self._spec.run, log=Log("sites"), stop=self._stop)
        self._sites = self._lockstep.create_sites(averager, metrics=self._metrics, stop=self._stop)

    def _adapters_to_send(self) -> list[AdapterMatrices]:
        """Returns the adapters of `lockstep.weights`, if adding them to version 0 gives the published weights.

        Supervised steps train the adapters before version 0, which then has more than the frozen weights.
        """
        return [] if self._config.supervised_steps else self._lockstep.adapters

    def _publish(
        self, version: int, report: StepReport, adapters: list[AdapterMatrices], changes: list[ChangedWords]
    ) -> None:
        """Publishes and announces a version and writes the step to the metrics. Runs in the background."""
        started_s = time.monotonic()
        folder = self._publisher.prepare(changes, version, adapters)
        if self._config.diloco is not None:
            self._checkpoints.finish(self._site.deadline_s)
        manifest = self._publisher.serve(folder, version)
        self._publisher.announce(manifest, report)
        publish_s = time.monotonic() - started_s
        self._announced = version
        moved = self._publisher.measure_distance(version)
        self._metrics.write(
            "published",
            version=version,
            publish_s=round(publish_s, 3),
            bytes=manifest.body.payload_bytes,
            **({} if moved is None else {"moved": round(moved, 5)}),
        )
        self._recorder.record(report)

    def _serve_until_finished(self) -> None:
        """Serves the last version until its evaluation is complete: workers still fetch it."""

        def attempt() -> None:
            self._publisher.recalibrate()
            if not _fetch_info(self._client, self._site).finished:
                raise NotYet("its evaluation is not complete", FINISH_POLL_S)

        wait_for(
            f"the evaluation of the last version, {self._spec.last_version}",
            attempt,
            deadline_s=self._site.deadline_s,
            log=self._log,
            stop=self._stop,
        )
        titles = [one.task.title for one in self._spec.evals] or [task.title for task in self._spec.tasks]
        for _ in range(LAST_LOOKS):  # the coordinator's answer may be a second old
            self._recorder.write_evaluations()
            if self._recorder.has_all(self._spec.last_version, titles) or self._stop.wait(FINISH_POLL_S):
                return


def _fetch_info(client: SignedClient, site: TrainerSite) -> Info:
    return client.call_until(
        f"the coordinator at {client.url}", "GET", "/v1/info", None, Info, deadline_s=site.deadline_s
    )
