"""Stats as a coordinator would send them, with as little said as possible."""

from typing import Any

from shoal.wire.messages import Evaluation, NodeView, Stats, StepReport

LIAR, HONEST = "11" * 32, "22" * 32


def stats(**values: Any) -> Stats:
    plain: dict[str, Any] = {
        "run": "test",
        "newest_version": 3,
        "last_version": 10,
        "finished": False,
        "waiting_for": "rollouts: 1 of 4 groups ready, 2 leases open on 2 live workers",
        "ready_groups": 1,
        "groups_needed": 4,
        "open_leases": 2,
        "queued_checks": 0,
        "submissions": {"accepted": 5, "reject.forged_proof": 1, "reject.copied": 1, "void.stale": 3},
        "batches": 3,
        "trained_groups": 12,
        "generation_tokens_per_s": 1234.5,
        "latest": step(),
        "evaluations": (),
        "nodes": (),
        "relays": (),
        "bytes_published": 2_500_000,
        "ledger_seq": 40,
        "server_time_s": 0.0,
    }
    return Stats(**plain | values)


def step(**values: Any) -> StepReport:
    plain: dict[str, Any] = {
        "version": 3,
        "loss": 0.0,
        "reward_mean": 0.25,
        "groups": 4,
        "dropped_groups": 0,
        "rollouts": 16,
        "tokens": 100,
        "lag_mean": 1.5,
        "lag_max": 2,
        "grad_norm": 1.0,
        "clip_fraction": 0.0,
        "logprob_gap": 0.0,
        "learning_rate": 1e-3,
        "wait_s": 1.0,
        "train_s": 1.0,
        "tokens_per_s": 9876.0,
    }
    return StepReport(**plain | values)


def node(key: str, **values: Any) -> NodeView:
    plain: dict[str, Any] = {
        "node": key,
        "trust": "trusted",
        "liveness": "live",
        "phase": "generating",
        "policy_version": 3,
        "tokens_per_s": 100.0,
        "accepted": 5,
        "rejected": 0,
        "void": 0,
        "credit": 12345,
        "last_code": "accepted",
        "last_detail": "",
    }
    return NodeView(**plain | values)


def evaluation(version: int, reward_mean: float, *, complete: bool = True) -> Evaluation:
    return Evaluation(version=version, reward_mean=reward_mean, rollouts=128, complete=complete)
