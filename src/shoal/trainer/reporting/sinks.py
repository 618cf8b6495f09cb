"""Where a run's figures go besides metrics.jsonl: TensorBoard, a Prometheus endpoint, Weights & Biases.

Each is named in the run file and takes the numbers of every event, under `shoal/` and by policy version. Packages that
not everybody has are imported here, when they are asked for.
"""

import importlib
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.http_server import Server, listen
from shoal.telemetry import Sink

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def open_sinks(names: Iterable[str], *, folder: Path, run: str) -> list[Sink]:
    """The sinks a run file names; ValueError says what is missing for one."""
    sinks: list[Sink] = []
    for name in names:
        kind, _, where = name.partition(":")
        if kind == "tensorboard":
            sinks.append(TensorBoardSink(folder / "tensorboard"))
        elif kind == "prometheus":
            host, _, port = where.rpartition(":")
            sinks.append(PrometheusSink(host or "127.0.0.1", int(port), run=run))
        else:
            assert kind == "wandb", f"config let {name!r} through"
            sinks.append(WandbSink(folder, run=run))
    return sinks


def check_packages(names: Iterable[str]) -> None:
    """ValueError for a sink whose package is not installed; before anything is waited for."""
    for name in names:
        if name in PACKAGES:
            _import(PACKAGES[name], asked_for=name)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values; a list of numbers (rollouts by lag) becomes one each."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
        elif isinstance(value, list | tuple):
            found |= {
                f"{name}_{place}": float(part)
                for place, part in enumerate(value)
                if isinstance(part, int | float)
            }
    return found


def _import(module: str, *, asked_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f'metrics = ["{asked_for}"] needs a package that is not here ({error}): '
            f"pip install 'shoal-rl[{asked_for}]'"
        ) from None


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        board = _import(PACKAGES["tensorboard"], asked_for="tensorboard")
        self._writer = board.SummaryWriter(str(folder))

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        version = int(values.get("version", 0))
        if event == "warning":
            self._writer.add_text("shoal/warnings", str(values["sentence"]), version)
            return
        for name, number in numbers_of(values).items():
            self._writer.add_scalar(f"shoal/{name}", number, version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusSink:
    """GET /metrics in Prometheus's text format: the newest number of each name, and how many warnings of each kind."""

    def __init__(self, host: str, port: int, *, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._warnings: dict[str, int] = {}
        app = Starlette(routes=[Route("/metrics", self._answer)])
        self._server = Server(app, listen(host, port))
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        with self._lock:
            if event == "warning":
                kind = str(values["kind"])
                self._warnings[kind] = self._warnings.get(kind, 0) + 1
            else:
                self._gauges |= numbers_of(values)

    def close(self) -> None:
        self._server.close()

    def text(self) -> str:
        with self._lock:
            gauges, warnings = dict(self._gauges), dict(self._warnings)
        lines = []
        for name, number in sorted(gauges.items()):
            lines += [f"# TYPE shoal_{name} gauge", f'shoal_{name}{{run="{self._run}"}} {number!r}']
        if warnings:
            lines.append("# TYPE shoal_warnings_total counter")
            lines += [
                f'shoal_warnings_total{{run="{self._run}",kind="{kind}"}} {count}'
                for kind, count in sorted(warnings.items())
            ]
        return "\n".join([*lines, ""])

    def _answer(self, request: Request) -> Response:
        return Response(self.text(), media_type="text/plain; version=0.0.4")


class WandbSink:
    """Weights & Biases; its own environment variables say where and as whom. Only if the run file asks for it."""

    def __init__(self, folder: Path, *, run: str) -> None:
        wandb = _import(PACKAGES["wandb"], asked_for="wandb")
        self._run = wandb.init(project="shoal", name=run, dir=str(folder))

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        version = int(values.get("version", 0))
        if event == "warning":
            self._run.alert(title=str(values["kind"]), text=str(values["sentence"]))
            return
        self._run.log({f"shoal/{name}": number for name, number in numbers_of(values).items()}, step=version)

    def close(self) -> None:
        self._run.finish()
