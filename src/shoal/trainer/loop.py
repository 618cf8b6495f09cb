"""The trainer's process.

    inbox ──batch──▶ crew ──v+1──▶ checkpoint ──▶ publisher ──▶ origin (SHARDCAST) and coordinator
      ▲                                                                     │
      └────────────── GET /v1/batches/v: waits until the swarm has made it ─┘

The order makes a crash harmless. Before the checkpoint, the step is made again from the same batch; after it, the same
version is published and announced again, and both take the same thing twice. While the checkpoint is written the
publication is prepared, out of sight: it is served and announced only when the checkpoint is on the disk. All of that goes
on beside the next step (outbox.py), which begins as soon as there is a batch for it; it ends before the next version's.

Of several ranks, this is rank 0; the others are in crew.follow().
"""

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shoal.diloco.transport.hivemind_mesh import Address as PeerAddress
from shoal.model.builtin import create_model
from shoal.model.tokenizer import load_tokenizer
from shoal.net.http_client import SignedClient, fetch_files
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.shardcast.publish import SHARD_BYTES
from shoal.shardcast.store import VersionStore
from shoal.tasks.datasets.file_options import file_digests, with_files_from
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.inbox import Inbox
from shoal.trainer.distributed.lockstep import Crew, in_words
from shoal.trainer.distributed.ranks import join_ranks
from shoal.trainer.distributed.sites import Sites, make_averager
from shoal.trainer.io.background_publish import Outbox
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.publisher import Address, Publisher
from shoal.trainer.io.weight_snapshot import Capture
from shoal.trainer.reporting.early_warnings import Watch
from shoal.trainer.reporting.sinks import check_packages, open_sinks
from shoal.trainer.reporting.step_report import step_report
from shoal.wire.keys import Key
from shoal.wire.messages import Info, StepReport
from shoal.wire.run_spec import RunSpec, TaskSpec

FINISH_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSite:
    """Where and as whom a trainer runs: all that is not the recipe."""

    folder: Path
    """Holds model/, checkpoints/, versions/, metrics.jsonl, and reference.safetensors where there is a KL term."""
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
    peer: PeerAddress = field(default_factory=PeerAddress)
    """How this trainer stands towards other sites, where the run file has a [trainer.diloco]."""
    rank: int = 0
    num_ranks: int = 1
    """As torchrun numbers the processes."""


def run_trainer(config: TrainerConfig, site: TrainerSite, *, stop: threading.Event) -> None:
    """Train until the run is finished or `stop` is set; goes on where the folder's newest checkpoint ends."""
    if site.num_threads:
        torch.set_num_threads(site.num_threads)
    log = Log("trainer")
    if config.diloco is not None and site.num_ranks > 1:
        raise ValueError(
            f"[trainer.diloco] with {site.num_ranks} ranks: a site's trainer is one process so far; start it without torchrun"
        )
    # Between two words of rank 0 lie at most: a checkpoint, an announcement, the wait for a batch.
    ranks = join_ranks(
        rank=site.rank, size=site.num_ranks, device=site.device, speech_s=3 * site.deadline_s + 60
    )
    crew = Crew(config, ranks, device=site.device, log=log, stop=stop)
    try:
        if ranks.leads:
            _lead(config, site, crew, log=log, stop=stop)
        else:
            crew.follow()
    except RuntimeError as error:
        if (worded := in_words(error, ranks)) is not error:
            raise worded from error
        raise
    finally:
        ranks.leave()


def _lead(config: TrainerConfig, site: TrainerSite, crew: Crew, *, log: Log, stop: threading.Event) -> None:
    check_packages(config.metrics)
    client = SignedClient(site.coordinator_url, site.key, log=log, stop=stop)
    metrics = Metrics(site.folder / "metrics.jsonl")
    reason = "failed"
    try:
        spec = _ask_terms(client, site)
        metrics.add_sinks(open_sinks(config.metrics, folder=site.folder, run=spec.run))
        run = _Run(config, site, spec, crew=crew, client=client, metrics=metrics, log=log)
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
        crew.end(reason)


class _Run:
    """One process's life: startup, main_loop, shutdown."""

    def __init__(
        self,
        config: TrainerConfig,
        site: TrainerSite,
        spec: RunSpec,
        *,
        crew: Crew,
        client: SignedClient,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._config, self._site, self._spec, self._crew = config, site, spec, crew
        self._client, self._metrics, self._log = client, metrics, log
        self._stop = client.stop
        self._watch = Watch()
        self._sites: Sites | None = None
        self._model_folder = site.folder / "model"
        self._checkpoints = Checkpoints(site.folder / "checkpoints", keep=config.keep_checkpoints, log=log)
        self._outbox = Outbox()
        self._inbox = Inbox(
            client, config, max_lag=spec.max_lag, deadline_s=site.deadline_s, meanwhile=self._outbox.check
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
        """Serve the origin, then be at the version the last process reached, published and announced."""
        self._publisher.start()
        self._resume_or_begin()

    def main_loop(self) -> None:
        while self._crew.learner.version < self._spec.last_version:
            started_s = time.monotonic()
            batch = self._inbox.take(self._crew.learner.version)
            wait_s = time.monotonic() - started_s
            figures = self._crew.step(batch)
            report = step_report(batch, figures, wait_s)
            self._settle()  # before the capture: memory holds one
            capture = self._crew.capture()
            self._checkpoints.begin(capture, report)
            self._outbox.send(capture.version, partial(self._send_out, capture, report))
        self._settle()
        self._serve_until_finished()

    def shutdown(self) -> None:
        if self._sites is not None:
            self._sites.close()
        self._outbox.close()
        self._checkpoints.close()
        self._publisher.close()
        self._log.info("left")

    def _resume_or_begin(self) -> None:
        if not self._model_folder.exists():
            create_model(self._site.model, self._model_folder, self._config.seed)
        sampling = self._spec.sampling
        self._crew.begin(self._model_folder, sampling.temperature, sampling.max_new_tokens)
        checkpoint = self._checkpoints.newest()
        if checkpoint is not None:
            self._meet_sites()
            self._crew.resume(checkpoint)
            version = self._crew.learner.version
            self._log.info("resumed", version=version, checkpoint=checkpoint.folder)
            self._metrics.write("resumed", version=version)
            capture = self._crew.capture()
            self._crew.keep_reference(self._site.folder / "reference.safetensors", capture)
            self._send_out(capture, checkpoint.state.report)
            # Only now: what was published as this version before must be published again.
            self._join_sites()
            return
        self._crew.warm_up(self._task(), load_tokenizer(self._model_folder))
        self._meet_sites()
        capture = self._crew.capture()
        self._crew.keep_reference(self._site.folder / "reference.safetensors", capture)
        if self._sites is not None:
            self._join_sites()  # a newcomer's first version is what the others have reached
            capture = self._crew.capture()
        self._checkpoints.begin(capture, None)
        parameters = sum(one.numel() for one in self._crew.learner.decoder.parameters())
        self._metrics.write("begun", version=0, parameters=parameters)
        self._send_out(capture, None)

    def _meet_sites(self) -> None:
        """Where the run has several: updates go through the one who merges them. Nobody is spoken to yet."""
        diloco = self._config.diloco
        if diloco is None:
            return
        log, learner = Log("sites"), self._crew.learner
        averager = make_averager(diloco, self._site.peer, self._spec.run, log=log, stop=self._stop)
        self._sites = Sites(learner, diloco, averager, metrics=self._metrics, stop=self._stop)
        learner.sites = self._sites

    def _join_sites(self) -> None:
        if self._sites is not None:
            self._sites.join()

    def _task(self) -> TaskSpec:
        """The run's task, with its files fetched to this machine."""
        data = self._site.folder / "data"
        fetch_files(self._client, file_digests(self._spec.task), data, deadline_s=self._site.deadline_s)
        return with_files_from(self._spec.task, data)

    def _send_out(self, capture: Capture, report: StepReport | None) -> None:
        """Publish and announce a version once its checkpoint is on the disk, and note the step that made it.

        After a crash all three are done again: a step may stand in the metrics twice, in the same words, but none is missing.
        """
        folder = self._publisher.prepare(
            self._crew.published(capture),
            capture.version,
            shard_bytes=self._site.shard_bytes,
            snapshot_every=self._site.snapshot_every,
        )
        self._checkpoints.finish(self._site.deadline_s)
        manifest = self._publisher.serve(folder, capture.version)
        self._publisher.announce(manifest, report)
        if report is not None:
            self._metrics.write("step", **report.model_dump())
            for warning in self._watch.after(report):
                self._log.warning(warning.sentence, version=report.version, kind=warning.kind)
                self._metrics.write(
                    "warning", version=report.version, kind=warning.kind, sentence=warning.sentence
                )

    def _settle(self) -> None:
        """A publication waits for its checkpoint and for the coordinator, each for `deadline_s` at most."""
        self._outbox.settle(3 * self._site.deadline_s)

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
