"""Merges this trainer's updates with those of other sites: every H updates one DiLoCo round.

    site A   coordinator, workers ──▶ trainer ──┐   a round: the trainers average how far each has moved,
    site B   coordinator, workers ──▶ trainer ──┘   make one outer step, and all have the same weights

Each site has its own versions, leases and ledger: a batch is trained on once, at the site that made it. The version after
a merge has the merged weights and is published like any other.
"""

import threading
from typing import Any

from shoal.diloco.averaging.averager import Averager, AveragerSettings
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.optimizer import DiLoCo, RoundReport, Schedule
from shoal.diloco.outer import Outer
from shoal.diloco.robust import RobustSettings
from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import DilocoConfig
from shoal.trainer.optim.learner import Learner


def make_averager(
    config: DilocoConfig, address: PeerAddress, run: str, *, log: Log, stop: threading.Event
) -> Averager:
    """Creates the averaging engine that the run file names. `address` says where this site listens and whom it joins."""
    robust = RobustSettings(average=config.average, max_norm_ratio=config.max_norm_ratio)
    if config.engine == "hivemind":
        return PeerAverager(
            HivemindMesh(f"rl-{run}", address),
            log=log,
            codec=config.codec,
            settings=AveragerSettings(
                gather_s=config.deadline_s / 2,
                shared=f"inner_steps = {config.inner_steps}, codec = {config.codec}, "
                f"outer_lr = {config.outer_lr}, outer_momentum = {config.outer_momentum}, {robust.as_text()}",
                robust=robust,
                admit=frozenset(address.admit) or None,
            ),
            stop=stop,
        )
    from shoal.diloco.averaging.torchft_averager import TorchftAverager

    if address.admit:
        raise ValueError('--peer-admit needs trainer.diloco.engine = "hivemind": torchft peers have no keys')
    if len(address.join) != 1:
        raise ValueError(
            'trainer.diloco.engine = "torchft" needs one --peer-join: the lighthouse, such as http://10.0.0.1:8710'
        )
    return TorchftAverager(
        address.join[0], log=log, codec=config.codec, robust=robust, host=address.host, stop=stop
    )


class Sites:
    """Makes the learner's updates and merges them with other sites'. Set it as `learner.sites` on rank 0."""

    def __init__(
        self,
        learner: Learner,
        config: DilocoConfig,
        averager: Averager,
        *,
        metrics: Metrics | None,
        stop: threading.Event,
    ) -> None:
        """Sets up the merges. With several ranks, every other rank must create a SiteFollower at the same time."""
        self._log, self._metrics, self._learner = Log("sites"), metrics, learner
        learner.policy.reshard()
        self._config, self._averager = config, averager
        self._diloco = DiLoCo(
            learner.decoder,
            inner=learner.optimizer,
            averager=averager,
            outer=Outer(lr=config.outer_lr, momentum=config.outer_momentum),
            schedule=Schedule(inner_steps=config.inner_steps, deadline_s=config.deadline_s),
            ranks=learner.ranks,
        )
        self._diloco.stop = stop
        self._diloco.on_round = self._report_round

    def join(self) -> None:
        """Connects to the other sites and takes over their state if it is newer."""
        diloco = self._diloco
        self._learner.policy.reshard()
        adopted = diloco.join(deadline_s=self._config.deadline_s)
        self._log.info(
            "joined the other sites",
            peer=self._averager.peer,
            round=diloco.outer_state.round,
            adopted=adopted,
            addresses=" ".join(self._averager.addresses),
        )

    def count_samples(self, num_samples: float) -> None:
        """Counts the samples behind the next step's gradient."""
        self._diloco.count_samples(num_samples)

    def step(self) -> None:
        """Makes one optimizer step, and a merge if one is due."""
        self._diloco.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed process needs besides weights and AdamW's moments."""
        state = self._diloco.state_dict()
        del state["inner"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`. Call it before `join`, with the weights and moments of the same checkpoint loaded."""
        self._diloco.load_state_dict({**state_dict, "inner": self._learner.optimizer.state_dict()})

    def close(self) -> None:
        """Leaves the other sites."""
        self._diloco.stop = threading.Event()  # a set stop event would abort the goodbye to the other sites
        self._diloco.close()

    def _report_round(self, report: RoundReport) -> None:
        result = report.result
        figures = {
            "round": report.round,
            "outcome": result.outcome.name.lower(),
            "sites": len(result.members),
            "attempts": result.attempts,
            "took_s": round(result.took_s, 3),
            "sent_bytes": result.num_bytes,
            "state": report.state_digest,
        }
        self._log.info("merged", **figures)
        if self._metrics is not None:
            self._metrics.write("merge", version=self._learner.version, **figures)
