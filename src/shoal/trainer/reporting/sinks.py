"""Sends a run's figures to TensorBoard, Weights & Biases, Trackio, MLflow or a Prometheus endpoint, besides metrics.jsonl.

The run file names the sinks. Each gets the numbers of every event, under `shoal/` and by policy version. Optional packages
are imported only when a sink needs them.
"""

import importlib
import os
import time
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

PROJECT = "shoal"


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
        elif kind == "mlflow":
            sinks.append(MlflowSink(folder, run=run))
        elif kind == "trackio":
            sinks.append(TrackioSink(run=run))
        else:
            assert kind == "wandb", f"config let {name!r} through"
            sinks.append(WandbSink(folder, run=run))
    return sinks


def check_packages(names: Iterable[str]) -> None:
    """Raises ValueError for a sink whose package is not installed, before the run waits for anything."""
    for name in names:
        if not name.startswith("prometheus:"):
            _import(name)


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


def _import(name: str) -> Any:
    """Imports the package of a sink, which has its name, except that of TensorBoard."""
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        raise ValueError(
            f'metrics = ["{name}"] needs a package that is not installed ({error}): '
            f"pip install 'shoal-rl[{name}]'"
        ) from None


class TensorBoardSink:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._writer = _import("tensorboard").SummaryWriter(str(folder))

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


class TrackioSink:
    """Logs to Trackio: to its folder on this machine, or where its own environment variables say."""

    def __init__(self, *, run: str) -> None:
        self._run = _import("trackio").init(project=PROJECT, name=run, resume="allow", embed=False)

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        if event == "warning":
            self._run.alert(title=str(values["kind"]), text=str(values["sentence"]))
            return
        numbers = {f"shoal/{name}": number for name, number in numbers_of(values).items()}
        self._log(event, numbers, int(values.get("version", 0)))

    def close(self) -> None:
        self._run.finish()

    def _log(self, event: str, numbers: dict[str, float], version: int) -> None:
        self._run.log(numbers, step=version)


class WandbSink(TrackioSink):
    """Logs to Weights & Biases, whose own environment variables set the server and the account. Trackio has its interface."""

    def __init__(self, folder: Path, *, run: str) -> None:
        self._run = _import("wandb").init(project=PROJECT, name=run, dir=str(folder))

    def _log(self, event: str, numbers: dict[str, float], version: int) -> None:
        if event == "evaluation":
            # It belongs to an earlier version, and W&B drops what is logged for a step before the newest one.
            numbers["shoal/held_out_version"] = numbers.pop("shoal/version")
            self._run.log(numbers, commit=False)
        else:
            super()._log(event, numbers, version)


class MlflowSink:
    """Logs to MLflow: to MLFLOW_TRACKING_URI, else to mlflow.db in the trainer's folder. A resumed run continues its MLflow run."""

    def __init__(self, folder: Path, *, run: str) -> None:
        mlflow = _import("mlflow")
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=where)
        self._metric = mlflow.entities.Metric
        self._id = self._open(run, folder / "mlflow-run.txt")

    def _open(self, run: str, kept: Path) -> str:
        """Returns the id of the MLflow run, which is kept in a file."""
        if kept.exists():
            return kept.read_text(encoding="utf-8")
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = self._client.create_experiment(PROJECT) if found is None else found.experiment_id
        created = str(self._client.create_run(experiment, run_name=run).info.run_id)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(created, encoding="utf-8")
        return created

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        version = int(values.get("version", 0))
        if event == "warning":
            self._client.set_tag(
                self._id, f"shoal.warning.{values['kind']}", f"version {version}: {values['sentence']}"
            )
            return
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(f"shoal/{name}", number, now_ms, version)
            for name, number in numbers_of(values).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)
