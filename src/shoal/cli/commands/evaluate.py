"""`shoal eval`: pass@1 and pass@k of a model folder, or of any version a run has published, on held-out problems."""

import argparse
import contextlib
import json
import math
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from shoal.cli.arguments import MAX_NEW_TOKENS
from shoal.cli.commands.connectivity import ask_info, reaching
from shoal.cli.commands.sample_answers import (
    Answer,
    answer,
    load_engine,
    make_draw,
    model_folder,
    pose,
    progress_bar,
    read_task,
    task_spec,
)
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.intervals import pass_at, wilson
from shoal.net.http_client import SignedClient
from shoal.net.ticket_client import Tickets
from shoal.tasks import Outcome
from shoal.tasks.datasets.file_options import digest_of, file_digests, is_file_option
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info, Origin, Stats
from shoal.wire.record import Sealed
from shoal.wire.run_spec import Sampling, TaskSpec

TIMEOUT_S = 20.0
FETCH_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of an evaluation. Intervals are at 95 %."""

    prompts: int
    samples: int
    pass_at_1: float
    pass_at_1_interval: tuple[float, float]
    """Wilson's, of as many trials as there are prompts: samples of one prompt are not independent, so more of them do not
    count as more. For shares that lie between 0 and 1 at each prompt the true interval is narrower."""
    k: int
    pass_at_k: float
    pass_at_k_interval: tuple[float, float]
    reward_mean: float
    wrong: float
    unparseable: float
    cut: float
    """Share of answers that reached max_new_tokens."""
    tokens_mean: float
    off_budget_mean: float | None
    """Tokens too few or too many, if prompts asked for a length."""


@dataclass(frozen=True, slots=True)
class Source:
    """Which version of a run, if it is one, and how the run samples."""

    version: int | None
    sampling: Sampling


def evaluate(options: argparse.Namespace, stop: threading.Event) -> int:
    samples = options.samples or options.k
    if samples < options.k:
        raise ValueError(f"--samples {samples} is fewer than --k {options.k}; raise it")
    with _source(options, stop) as (folder, spec, source):
        task = read_task(spec)
        draw = make_draw(options, samples, source.sampling)
        posed = pose(task, "eval", options.prompts, options.seed)
        engine = load_engine(folder, options)
        with progress_bar("answers", len(posed) * samples) as on_row:
            groups = [group for _, group in answer(engine, task, posed, draw, stop=stop, on_row=on_row)]
    figures = sum_up(groups, k=options.k)
    settings = {"model": options.model, "version": source.version, "task": spec.model_dump(), **asdict(draw)}
    print(json.dumps(settings | asdict(figures)) if options.json else in_words(figures, settings))
    if len(posed) < options.prompts:
        print(f"shoal: the task has only {len(posed)} held-out problems", file=sys.stderr)
    return EXIT_OK


def sum_up(groups: list[tuple[Answer, ...]], *, k: int) -> Figures:
    answers = [one for group in groups for one in group]
    rights = [sum(one.outcome is Outcome.RIGHT for one in group) for group in groups]
    share = sum(rights) / len(answers)
    at_k = [pass_at(k, samples=len(group), right=right) for group, right in zip(groups, rights, strict=True)]
    return Figures(
        prompts=len(groups),
        samples=len(groups[0]),
        pass_at_1=share,
        pass_at_1_interval=wilson(share, len(groups)),
        k=k,
        pass_at_k=math.fsum(at_k) / len(at_k),
        pass_at_k_interval=wilson(math.fsum(at_k) / len(at_k), len(groups)),
        reward_mean=math.fsum(one.value for one in answers) / len(answers),
        wrong=sum(one.outcome is Outcome.WRONG for one in answers) / len(answers),
        unparseable=sum(one.outcome is Outcome.UNPARSEABLE for one in answers) / len(answers),
        cut=sum(one.cut for one in answers) / len(answers),
        tokens_mean=sum(one.num_tokens for one in answers) / len(answers),
        off_budget_mean=_mean_off_budget(answers),
    )


def _mean_off_budget(answers: list[Answer]) -> float | None:
    off = [one.off_budget for one in answers if one.off_budget is not None]
    return sum(off) / len(off) if off else None


def in_words(figures: Figures, settings: dict[str, Any]) -> str:
    version = "" if settings["version"] is None else f", version {settings['version']}"
    low, high = figures.pass_at_1_interval
    lines = [
        f"{settings['model']}{version} on {settings['task']['name']}: {figures.prompts} held-out prompts, "
        f"{figures.samples} answers each, temperature {settings['temperature']:g}, seed {settings['seed']}",
        f"  pass@1        {figures.pass_at_1:7.2%}   95 % interval {low:.2%} to {high:.2%} (Wilson, n = prompts)",
    ]
    if figures.k > 1:
        low, high = figures.pass_at_k_interval
        lines.append(
            f"  {f'pass@{figures.k}':<13} {figures.pass_at_k:7.2%}   95 % interval {low:.2%} to {high:.2%} (Wilson, n = prompts)"
        )
    lines += [
        f"  wrong         {figures.wrong:7.2%}",
        f"  unparseable   {figures.unparseable:7.2%}",
        f"  cut short     {figures.cut:7.2%}   at {settings['max_new_tokens']} tokens",
        f"  reward        {figures.reward_mean:7.4f}",
        f"  tokens        {figures.tokens_mean:7.1f}   an answer",
    ]
    if figures.off_budget_mean is not None:
        lines.append(f"  off budget    {figures.off_budget_mean:7.1f}   tokens too few or too many")
    return "\n".join(lines)


# -- where the model comes from ---------------------------------------------------------------------------


@contextlib.contextmanager
def _source(options: argparse.Namespace, stop: threading.Event) -> Iterator[tuple[Path, TaskSpec, Source]]:
    """The model's folder, the task, and where they come from."""
    if not options.model.startswith(("http://", "https://")):
        if options.task is None:
            raise ValueError("--task says what to evaluate on; docs/tasks.md lists them")
        if options.version is not None:
            raise ValueError("--version goes with a coordinator's URL; a folder is one version")
        with model_folder(options.model) as folder:
            yield folder, task_spec(options), Source(None, Sampling(max_new_tokens=MAX_NEW_TOKENS))
        return
    with tempfile.TemporaryDirectory() as into:
        with httpx2.Client(base_url=options.model, timeout=TIMEOUT_S) as http, reaching(options.model):
            info, folder, version = fetch_published(http, options, Path(into), stop)
        spec = task_spec(options) if options.task is not None else _with_own_files(info.spec.task, options)
        yield folder, spec, Source(version, info.spec.sampling)


def fetch_published(
    http: httpx2.Client, options: argparse.Namespace, into: Path, stop: threading.Event
) -> tuple[Info, Path, int]:
    """A published version through SHARDCAST, verified under the run's key; with `--key`, also from private relays."""
    from shoal.shardcast import RelayChoice, fetch_version

    version, log = options.version, Log("eval")
    info = ask_info(http)
    sealed = Sealed[Manifest].parse(_get(http, f"/v1/policies/{'latest' if version is None else version}"))
    stats = Stats.parse(_get(http, "/v1/stats"))
    places = [relay.url for relay in stats.relays if relay.liveness != "offline"]
    places = places or [Origin.parse(_get(http, "/v1/origin")).url]
    with contextlib.ExitStack() as stack:
        ticket = None
        if options.key is not None:
            client = SignedClient(options.model, Key.load(options.key), log=log, stop=stop)
            stack.callback(client.close)
            ticket = Tickets(client, log=log)
        choice = RelayChoice(_open_to_us(places, ticket), ticket=ticket)
        folder = fetch_version(
            sealed, choice, into, run_key=info.run_key, log=log, stop=stop, deadline_s=FETCH_S
        )
    return info, folder, sealed.body.version


def _open_to_us(places: list[str], ticket: Tickets | None) -> list[str]:
    """Those that would serve us. A fetch would go on asking the others for as long as it has time."""
    header = ticket() if ticket is not None else ""
    headers = {"Authorization": header} if header else {}
    refused = [place for place in places if _refuses(place, headers)]
    if refused == places:
        what = "accept no ticket that --key gets" if ticket is not None else "serve members of the run only"
        raise ValueError(
            f"{', '.join(places)} {what}; give --key FILE: node.key of a worker that joined, or a role's key of the run"
        )
    return [place for place in places if place not in refused]


def _refuses(place: str, headers: dict[str, str]) -> bool:
    try:
        answer = httpx2.get(f"{place}/ticket", headers=headers, timeout=TIMEOUT_S)
    except httpx2.HTTPError:
        return False  # it may come back while others serve
    return answer.status_code in (401, 403)


def _with_own_files(spec: TaskSpec, options: argparse.Namespace) -> TaskSpec:
    """A run's task. Its terms name files by digest; one's own copies are given as options."""
    given = dict(options.option)
    for name, value in given.items():
        if is_file_option(name) and spec.options.get(name) != f"sha256:{digest_of(Path(str(value)))}":
            raise ValueError(
                f"--option {name}={value} is not the run's file, which is {spec.options.get(name)}"
            )
    spec = spec.model_copy(update={"options": dict(spec.options) | given})
    if file_digests(spec):
        missing = [name for name in spec.options if is_file_option(name) and name not in given]
        raise ValueError(
            f"the run's task {spec.name!r} reads files that are not sent to strangers; give your own copies: "
            + " ".join(f"--option {name}=FILE" for name in missing)
        )
    return spec


def _get(http: httpx2.Client, path: str) -> bytes:
    response = http.get(path)
    if response.status_code == 404:
        raise ValueError(f"{http.base_url} has no {path}; GET /v1/policies/latest names the newest version")
    return response.raise_for_status().content
