"""Heartbeats: a thread of their own with a connection of their own, so that a long step does not look like death."""

import threading
import time
from dataclasses import dataclass

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.rollout.worker.session import Exit, Left, Terms, leaving
from shoal.telemetry import Log
from shoal.wire.messages import Heartbeat, HeartbeatReply

MIN_PAUSE_S = 0.1
LOOK_S = 0.1


class Halt(threading.Event):
    """An event that is also set when `stop` is: this worker ends when it is told to, or when the run has no use for it.

    The process's own `stop` is not ours to set: whoever owns it may run other things by it.
    """

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        end_s = time.monotonic() + timeout if timeout is not None else float("inf")
        while not self._stop.is_set():
            left_s = end_s - time.monotonic()
            if super().wait(max(0.0, min(LOOK_S, left_s))):
                return True
            if left_s <= LOOK_S:
                return self._stop.is_set()
        return True


@dataclass
class Pulse:
    """What the next heartbeat says. Written by the worker, read by the heart."""

    phase: str = "starting"
    policy_version: int | None = None
    tokens_per_s: float = 0.0


class Heart:
    """Beats until `halt` is set, and sets it when the coordinator says that it is over; `left` then says why."""

    def __init__(self, client: SignedClient, terms: Terms, *, halt: Halt, log: Log) -> None:
        self.pulse = Pulse()
        self.left: Left | None = None
        self._client, self._terms, self._halt, self._log = client, terms, halt, log
        self._reachable = True
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_s: float = 2.0) -> None:
        self._halt.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            pause_s = 0.0
            while not self._halt.wait(pause_s):
                pause_s = self._beat()
        except Left as left:
            self.left = left
        finally:
            self._halt.set()

    def _beat(self) -> float:
        pulse = self.pulse
        beat = Heartbeat(
            epoch=self._terms.epoch,
            phase=pulse.phase[:300],
            policy_version=pulse.policy_version,
            tokens_per_s=pulse.tokens_per_s,
        )
        try:
            reply = self._client.call("POST", "/v1/heartbeat", beat, HeartbeatReply)
        except Unreachable as error:
            if self._reachable:
                self._log.warning("the coordinator does not answer heartbeats; going on", reason=error)
            self._reachable = False
            return self._terms.heartbeat_s
        except Refused as refused:
            if left := leaving(refused):
                raise left from None
            self._log.warning("a heartbeat was refused", reason=refused)
            return self._terms.heartbeat_s
        self._reachable = True
        if reply.finished:
            raise Left(Exit.FINISHED, "the coordinator says so")
        return max(reply.next_in_s, MIN_PAUSE_S)
