"""`shoal eval`: pass@1 and pass@k of a model folder, or of any version a run has published, on held-out problems."""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx2

from shoal.cli.commands.sample_answers import (
    GradedAnswer,
    PosedProblem,
    answer,
    load_engine,
    load_task,
    make_draw,
    model_folder,
    pose,
    task_spec,
)
from shoal.cli.public_api import TIMEOUT_S, PublicApi
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_folder import NEWEST, RunFolder, is_run_folder, named_version
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import MAX_NEW_TOKENS, is_url, pass_at, wilson
from shoal.files import write_bytes_atomically
from shoal.net.http_client import SignedClient, Tickets
from shoal.shardcast import RelayChoice, fetch_version
from shoal.tasks import Outcome
from shoal.tasks.datasets.file_options import digest_of, file_digests, is_file_option
from shoal.telemetry import Log, printable
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info, Stats
from shoal.wire.record import Sealed
from shoal.wire.run_spec import Sampling, TaskSpec

SHOWN = 4
"""Answers to one problem that are printed."""
SHOWN_CHARACTERS = 2000
FETCH_S = 1800.0
"""Seconds to try for a published version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results of an evaluation. Intervals are at 95 %."""

    prompts: int
    samples: int
    pass_at_1: float
    pass_at_1_interval: tuple[float, float]
    """Wilson's interval with one trial per prompt, because samples of one prompt are not independent. The true interval is
    narrower where a prompt is sometimes answered right and sometimes wrong."""
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
    """Mean number of tokens above or below the budget, if prompts asked for a length."""


class EvaluatedModel(NamedTuple):
    """The folder of a model, the task that it is evaluated on, its version if it is a run's, and the default sampling."""

    folder: Path
    task: TaskSpec
    version: int | None
    sampling: Sampling


def evaluate(options: argparse.Namespace, stop: threading.Event) -> int:
    samples = options.samples or options.k
    if samples < options.k:
        raise ValueError(f"--samples {samples} is fewer than --k {options.k}; raise it")
    with _open_model(options, stop) as (folder, spec, version, sampling):
        task = load_task(spec)
        draw = make_draw(options, samples, sampling)
        posed = pose(task, "eval", options.prompts, options.seed)
        engine = load_engine(folder, options)
        with progress("answers", len(posed) * samples) as advance:
            answered = list(answer(engine, task, posed, draw, spec=spec, stop=stop, advance=advance))
    figures = compute_figures([group for _, group in answered], k=options.k)
    if options.answers is not None:
        write_answers(options.answers, answered)
    if options.show and not options.json:
        print(format_answers(answered[: options.show]))
    settings = {"model": options.model, "version": version, "task": spec.model_dump(), **asdict(draw)}
    print(json.dumps(settings | asdict(figures)) if options.json else format_figures(figures, settings))
    if len(posed) < options.prompts:
        print(f"shoal: the task has only {len(posed)} held-out problems; all were used", file=sys.stderr)
    return EXIT_OK


def format_answers(answered: Sequence[tuple[PosedProblem, tuple[GradedAnswer, ...]]]) -> str:
    """Returns problems with the right answer and what the model answered."""
    lines = []
    for one, group in answered:
        lines += [f"prompt    {_in_lines(one.problem.prompt)}", f"expected  {_in_lines(one.problem.answer)}"]
        lines += [
            f"answer    {_in_lines(given.text)}   [{given.outcome.value}, reward {given.value:g}]"
            for given in group[:SHOWN]
        ]
        lines += [f"          and {len(group) - SHOWN} more answers"] if len(group) > SHOWN else []
        lines.append("")
    return "\n".join(lines)


def _in_lines(text: str) -> str:
    """Returns a text with its further lines indented, truncated if it is long."""
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    return printable(shown.strip("\n"), keep="\n\t").replace("\n", "\n          ")


def write_answers(path: Path, answered: Sequence[tuple[PosedProblem, tuple[GradedAnswer, ...]]]) -> None:
    """Writes one line of JSON for each answer."""
    lines = (
        json.dumps(
            {
                "prompt": one.problem.prompt,
                "expected": one.problem.answer,
                "answer": given.text,
                "reward": given.value,
                "outcome": given.outcome.value,
                "tokens": given.num_tokens,
                "cut": given.cut,
            }
        )
        for one, group in answered
        for given in group
    )
    write_bytes_atomically(path, "".join(f"{line}\n" for line in lines).encode(), durable=False)


def compute_figures(groups: list[tuple[GradedAnswer, ...]], *, k: int) -> Figures:
    answers = [one for group in groups for one in group]
    rights = [sum(one.outcome is Outcome.RIGHT for one in group) for group in groups]
    share = sum(rights) / len(answers)
    off_budget = [one.off_budget for one in answers if one.off_budget is not None]
    at_k = [pass_at(k, samples=len(group), right=right) for group, right in zip(groups, rights, strict=True)]
    return Figures(
        prompts=len(groups),
        samples=len(groups[0]),
        pass_at_1=share,
        pass_at_1_interval=wilson(share, len(groups)),
        k=k,
        pass_at_k=fmean(at_k),
        pass_at_k_interval=wilson(fmean(at_k), len(groups)),
        reward_mean=fmean(one.value for one in answers),
        wrong=sum(one.outcome is Outcome.WRONG for one in answers) / len(answers),
        unparseable=sum(one.outcome is Outcome.UNPARSEABLE for one in answers) / len(answers),
        cut=sum(one.cut for one in answers) / len(answers),
        tokens_mean=fmean(one.num_tokens for one in answers),
        off_budget_mean=fmean(off_budget) if off_budget else None,
    )


def format_figures(figures: Figures, settings: dict[str, Any]) -> str:
    version = "" if settings["version"] is None else f", version {settings['version']}"
    low, high = figures.pass_at_1_interval
    lines = [
        f"{settings['model']}{version} on {printable(settings['task']['name'])}: {figures.prompts} held-out prompts, "
        f"{figures.samples} {'answer' if figures.samples == 1 else 'answers'} each, temperature {settings['temperature']:g}, seed {settings['seed']}",
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
def _open_model(options: argparse.Namespace, stop: threading.Event) -> Iterator[EvaluatedModel]:
    """Yields the model. A version of a run is written into a temporary folder."""
    if is_run_folder(Path(options.model)):
        with RunFolder(Path(options.model)) as run, tempfile.TemporaryDirectory() as into:
            version = run.find_version(NEWEST if options.version is None else options.version)
            run.restore(version, Path(into))
            spec = run.local_spec().task if options.task is None else task_spec(options)
            yield EvaluatedModel(Path(into), spec, version, run.spec.sampling.of(spec))
        return
    if not is_url(options.model):
        if options.task is None:
            raise ValueError(
                f"--task is missing: {options.model} is neither a run's folder nor a URL, whose task would be taken; `shoal tasks` lists "
                "the tasks"
            )
        if options.version is not None:
            raise ValueError(
                "--version needs a run's folder or a coordinator's URL as MODEL; leave it out for a model folder"
            )
        with model_folder(options.model) as folder:
            yield EvaluatedModel(folder, task_spec(options), None, Sampling(max_new_tokens=MAX_NEW_TOKENS))
        return
    with tempfile.TemporaryDirectory() as into:
        with PublicApi(options.model) as api:
            name = options.version or NEWEST
            info, folder, version = fetch_published(api, name, Path(into), options.key, stop)
        spec = task_spec(options) if options.task is not None else _with_own_files(info.spec.task, options)
        yield EvaluatedModel(folder, spec, version, info.spec.sampling.of(spec))


def fetch_published(
    api: PublicApi, name: str, into: Path, key: Path | None, stop: threading.Event
) -> tuple[Info, Path, int]:
    """Fetches the version that `best`, `newest` or a number names, and verifies it with the run's key.

    `key` is a member's key, for relays that are private.
    """
    log = Log("eval")
    version = named_version(name, api.url, lambda: api.read("/v1/stats", Stats).evaluations)
    info = api.read("/v1/info", Info)
    found = api.find(f"/v1/policies/{'latest' if version is None else version}")
    if found is None:
        which = "a version" if version is None else f"version {version}"
        raise ValueError(f"{api.url} has not published {which}; the newest is {info.newest_version}")
    sealed = Sealed[Manifest].parse(found)
    stats = api.read("/v1/stats", Stats)
    sources = [relay.url for relay in stats.relays if relay.liveness != "offline" and not relay.problem]
    sources += [stats.origin] if stats.origin else []
    with contextlib.ExitStack() as stack:
        ticket = None
        if key is not None:
            client = SignedClient(api.url, Key.load(key), log=log, stop=stop)
            stack.callback(client.close)
            ticket = Tickets(client, log=log)
        willing = _willing(sources, ticket)
        last = stats.origin if stats.origin in willing else ""
        choice = RelayChoice([url for url in willing if url != last], last=last, ticket=ticket)
        folder = fetch_version(
            sealed,
            choice,
            into,
            run_key=info.run_key,
            log=log,
            stop=stop,
            deadline_s=FETCH_S,
            while_growing=True,
        )
    return info, folder, sealed.body.version


def _willing(sources: list[str], ticket: Tickets | None) -> list[str]:
    """Returns the sources that do not refuse this client. A fetch would keep asking the others until its deadline."""
    header = ticket() if ticket is not None else ""
    headers = {"Authorization": header} if header else {}
    status = {source: _status(source, headers) for source in sources}
    if not any(status.values()):
        tried = f"neither relays nor origin answer ({', '.join(sources)})" if sources else "no relay is live"
        raise ValueError(
            f"the weights cannot be fetched: {tried}; try again when `shoal doctor URL` finds one"
        )
    refused = [source for source in sources if status[source] in (401, 403)]
    if len(refused) == len(sources):
        what = "accept no ticket that --key gets" if ticket is not None else "serve members of the run only"
        raise ValueError(
            f"{', '.join(sources)} {what}; give --key FILE: node.key of a worker that joined, or a role's key of the run"
        )
    return [source for source in sources if source not in refused]


def _status(source: str, headers: dict[str, str]) -> int | None:
    """Returns the status with which a source answers; None if it does not."""
    try:
        with httpx2.stream("GET", f"{source}/ticket", headers=headers, timeout=TIMEOUT_S) as answer:
            return answer.status_code
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return None  # it may be reachable again later, while others serve


def _with_own_files(spec: TaskSpec, options: argparse.Namespace) -> TaskSpec:
    """Returns a run's task with the user's copies of its files. The run's terms name files by their digests only."""
    given = dict(options.option)
    for name, value in given.items():
        if is_file_option(name) and spec.options.get(name) != f"sha256:{digest_of(Path(str(value)))}":
            raise ValueError(
                f"--option {name}={value} is not the file of the run, which has {spec.options.get(name)}; give that file"
            )
    # The lists of unusable rows are found again from the user's own copies.
    own = {name: value for name, value in spec.options.items() if not name.endswith("checks_path")}
    spec = spec.model_copy(update={"options": own | given})
    if file_digests(spec):
        missing = [name for name in spec.options if is_file_option(name) and name not in given]
        raise ValueError(
            f"the run's task {spec.name!r} reads files that are not public; give your own copies: "
            + " ".join(f"--option {name}=FILE" for name in missing)
        )
    return spec
