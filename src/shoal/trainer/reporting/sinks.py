"""Sends a run's figures to TensorBoard, a Prometheus endpoint or Weights & Biases, besides metrics.jsonl.

The run file names the sinks. Each gets the numbers of every event, under `shoal/` and by policy version. Optional packages
are imported only when a sink needs them.
"""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.http_server import Server, listen
from shoal.telemetry import Sink

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def open_sinks(names: Iterable[str], *, folder: Path, run: str) -> list[Sink]:
    """Opens the sinks that a run file names. Raises ValueError if a package is missing."""
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
    """Raises ValueError for a sink whose package is not installed, before the run waits for anything."""
    for name in names:
        if name in PACKAGES:
            _import(PACKAGES[name], asked_for=name)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among the values; each element of a list (rollouts by lag) gets its own name."""
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
            f'metrics = ["{asked_for}"] needs a package that is not installed ({error}): '
            f"pip install 'shoal-rl[{asked_for}]'"
        ) from None


class TensorBoardSink:
    """Writes event files for TensorBoard."""

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
    """Serves GET /metrics for Prometheus: the newest value of each number, and the count of warnings by kind."""

    def __init__(self, host: str, port: int, *, run: str) -> None:
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._warnings = Counter(
            "shoal_warnings", "Early warnings by kind.", ["run", "kind"], registry=self._registry
        )
        self._server = Server(Starlette(routes=[Route("/metrics", self._answer)]), listen(host, port))
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        if event == "warning":
            self._warnings.labels(self._run, str(values["kind"])).inc()
            return
        for name, number in numbers_of(values).items():
            if event == "evaluation" and name == "version":
                name = "held_out_version"  # the gauge `version` must not go back
            name, _, task = name.partition("/")  # reward_mean/LABEL: the figure of one task
            kind = f"{name}_of_task" if task else name
            if kind not in self._gauges:
                labels = ["run", "task"] if task else ["run"]
                self._gauges[kind] = Gauge(
                    f"shoal_{kind}", f"Newest {name}.", labels, registry=self._registry
                )
            self._gauges[kind].labels(self._run, *([task] if task else [])).set(number)

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


class WandbSink:
    """Logs to Weights & Biases, whose own environment variables set the server and the account."""

    def __init__(self, folder: Path, *, run: str) -> None:
        wandb = _import(PACKAGES["wandb"], asked_for="wandb")
        self._run = wandb.init(project="shoal", name=run, dir=str(folder))

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        version = int(values.get("version", 0))
        if event == "warning":
            self._run.alert(title=str(values["kind"]), text=str(values["sentence"]))
            return
        numbers = {f"shoal/{name}": number for name, number in numbers_of(values).items()}
        if event == "evaluation":
            # It belongs to an earlier version, and W&B drops what is logged for a step before the newest one.
            numbers["shoal/held_out_version"] = numbers.pop("shoal/version")
            self._run.log(numbers, commit=False)
            return
        self._run.log(numbers, step=version)

    def close(self) -> None:
        self._run.finish()
