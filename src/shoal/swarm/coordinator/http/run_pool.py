"""Several runs behind one address: each is a coordinator of its own, with its own folder, keys, ledger and trust.

/runs/NAME/...   the run of that name
/v1/runs         all of them, the one that needs workers most first
/healthz, /readyz   whether all of them are well
anything else    the first one's, so that a pool of one is a coordinator as ever
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http.responses import problem, send_json, to_json
from shoal.swarm.coordinator.http.router import Entrance
from shoal.swarm.coordinator.views import stats
from shoal.wire.messages import RunList, RunView

PREFIX = "/runs/"


@dataclass(frozen=True, slots=True)
class Hosted:
    coordinator: Coordinator
    app: Entrance


class Pool:
    """An ASGI app over several coordinators' apps."""

    def __init__(self, hosted: Sequence[Hosted]) -> None:
        self._hosted = {one.coordinator.spec.run: one for one in hosted}
        assert len(self._hosted) == len(hosted), "two runs of one name"
        self._first = hosted[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        name, path = self._split(scope["path"])
        if path == "/v1/runs" and scope["method"] == "GET":
            await self._send_list(send)
        elif name is None:
            await self._answer_for_all(scope, receive, send)
        elif name in self._hosted:
            # `raw_path` stays as it was sent: it is what the signature covers.
            await self._hosted[name].app({**scope, "path": path}, receive, send)
        else:
            now_s = self._first.coordinator.clock()
            known = ", ".join(self._hosted)
            refusal = problem(
                "request.not_found", f"no run {name[:80]!r} here; there are {known}", now_s=now_s
            )
            await refusal(scope, receive, send)

    def close_feeds(self) -> None:
        for one in self._hosted.values():
            one.app.feed.close()

    @staticmethod
    def _split(path: str) -> tuple[str | None, str]:
        """The run's name and what is left of the path; no name where there is none."""
        if not path.startswith(PREFIX):
            return None, path
        name, slash, rest = path.removeprefix(PREFIX).partition("/")
        return name, slash + rest or "/"

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        for one in self._hosted.values():
            await run_in_threadpool(one.app.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer_for_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/readyz":
            for one in self._hosted.values():
                if stalled := one.coordinator.vitals.stalled():
                    now_s = one.coordinator.clock()
                    told = f"{one.coordinator.spec.run}: {'; '.join(stalled)}"
                    await problem("request.not_ready", told, now_s=now_s)(scope, receive, send)
                    return
        await self._first.app(scope, receive, send)

    async def _send_list(self, send: Send) -> None:
        await send_json(send, to_json(await run_in_threadpool(self._list)))

    def _list(self) -> RunList:
        """By need: a run that is over last, then by live workers for each group of a step."""
        found: list[tuple[bool, float, RunView]] = []
        for name, one in self._hosted.items():
            with one.coordinator.database.read() as db:
                view = stats.runs(db, one.coordinator).runs[0]
            path = "" if len(self._hosted) == 1 else PREFIX + name
            share = view.live_workers / one.coordinator.config.groups_per_step
            found.append((view.finished, share, view.model_copy(update={"path": path})))
        found.sort(key=lambda entry: entry[:2])
        return RunList(runs=tuple(view for _, _, view in found))
