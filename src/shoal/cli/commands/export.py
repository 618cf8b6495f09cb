"""Uses what a run has made: `shoal export` writes a version as a Hugging Face folder, `shoal push` uploads it, `shoal chat` talks to it."""

import argparse
import contextlib
import hashlib
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import __version__
from shoal.cli.public_api import PublicApi
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_folder import RunFolder, is_run_folder
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.questions import ask_line
from shoal.cli.ui.values import held_out_means, is_url
from shoal.telemetry import printable
from shoal.wire.ledger import LedgerHead
from shoal.wire.messages import History
from shoal.wire.record import Sealed
from shoal.wire.run_spec import RunSpec, TaskSpec
from shoal.wire.seeded_draw import sample_seed

if TYPE_CHECKING:
    from shoal.rollout.engine.api import Engine

CURVE_ROWS = 24
"""Most rows of the curve in a model card."""
CARD = "README.md"


# -- export and push ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a model card says of the run."""

    spec: RunSpec
    version: int
    base_model: str
    """The run file's `model`; empty if it is not known."""
    history: History
    head: LedgerHead
    run_key: str
    weights_digest: str


def export(options: argparse.Namespace, stop: threading.Event) -> int:
    """Writes a version and its model card to --out."""
    out: Path = options.out
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another --out")
    with _open_version(options, stop) as (folder, facts):
        _write_export(folder, out, facts)
    name = printable(facts.spec.run)
    reward = _held_out(facts)
    shown = f", held-out reward {reward}" if reward else ""
    print(f"{out}: version {facts.version} of run {name}{shown}, with a model card in {CARD}")
    print(f"  load it           transformers: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    print(f"  talk to it        shoal chat {out}")
    return EXIT_OK


def push(options: argparse.Namespace, stop: threading.Event) -> int:
    """Uploads a version with its model card, or a model folder as it is."""
    from shoal.model.hub import push_folder

    is_model = Path(options.run).is_dir() and not is_run_folder(Path(options.run))
    if is_model and not (Path(options.run) / "config.json").exists():
        raise ValueError(f"{options.run} is neither a run's folder nor a model folder: it has no config.json")
    with contextlib.ExitStack() as stack:
        folder, message = Path(options.run), f"Upload by shoal {__version__}"
        if not is_model:
            source, facts = stack.enter_context(_open_version(options, stop))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            _write_export(source, folder, facts)
            message = f"Version {facts.version} of run {facts.spec.run}"
        with progress(f"uploading to {options.repo}"):
            address = push_folder(folder, options.repo, private=options.private, message=message)
    print(f"pushed: {address}")
    return EXIT_OK


def _write_export(source: Path, out: Path, facts: RunFacts) -> None:
    from shoal.model.plain_folder import write_plain_folder

    out.parent.mkdir(parents=True, exist_ok=True)
    write_plain_folder(source, out)
    # A card of the base model is a link to its file, which must not change.
    (out / CARD).unlink(missing_ok=True)
    (out / CARD).write_text(model_card(facts), encoding="utf-8")


@contextlib.contextmanager
def _open_version(options: argparse.Namespace, stop: threading.Event) -> Iterator[tuple[Path, RunFacts]]:
    """Yields a temporary folder with the version that --version names, and what its card says."""
    if is_url(options.run):
        with tempfile.TemporaryDirectory(prefix=".export-") as into:
            yield _fetch(options, Path(into), stop)
    else:
        # The run is opened first: a path that holds none is named by its error. The folder is on the run's disk, for links.
        with (
            RunFolder(Path(options.run)) as run,
            tempfile.TemporaryDirectory(dir=options.run, prefix=".export-") as into,
        ):
            yield _restore(run, options.version, Path(into))


def _restore(run: RunFolder, name: str, into: Path) -> tuple[Path, RunFacts]:
    version = run.find_version(name)
    with progress(f"restoring version {version}"):
        manifest = run.restore(version, into / "version")
    last = list(run.events())[-1]
    head = LedgerHead(run=run.spec.run, seq=last.seq, hash=last.hash, time_s=last.time_s)
    facts = RunFacts(
        spec=run.spec,
        version=version,
        base_model=run.base_model,
        history=run.history(),
        head=head,
        run_key=run.run_key,
        weights_digest=manifest.weights_digest,
    )
    return into / "version", facts


def _fetch(options: argparse.Namespace, into: Path, stop: threading.Event) -> tuple[Path, RunFacts]:
    from shoal.cli.commands.evaluate import fetch_published
    from shoal.shardcast.manifest_files import read_manifest

    with PublicApi(options.run) as api:
        info, folder, version = fetch_published(api, options.version, into, options.key, stop)
        head = Sealed[LedgerHead].parse(api.get("/v1/ledger/head"))
        history = api.read("/v1/history", History)
    manifest = read_manifest(folder)
    assert manifest is not None, "a fetched version has its manifest"
    return folder, RunFacts(
        spec=info.spec,
        version=version,
        base_model="",
        history=history,
        head=head.open(info.run_key),
        run_key=info.run_key,
        weights_digest=manifest.body.weights_digest,
    )


def _held_out(facts: RunFacts) -> str:
    found = held_out_means(facts.history.evaluations).get(facts.version)
    return "" if found is None else f"{found:.3f}"


def _describe_task(task: TaskSpec) -> str:
    options = ", ".join(f"{name} = {value}" for name, value in task.options.items())
    return f"`{task.title}`" + (f" ({options})" if options else "")


def model_card(facts: RunFacts) -> str:
    """Returns the README.md of an exported version: task, curve, and how to check where it comes from."""
    spec = facts.spec
    done = [one for one in facts.history.evaluations if one.complete]
    rewards = {step.version: step.reward_mean for step in facts.history.steps}
    every = -(-len(done) // CURVE_ROWS) if done else 1
    shown = [
        one
        for place, one in enumerate(done)
        if place % every == 0 or one is done[-1] or one.version == facts.version
    ]
    base = (
        f"base_model: {facts.base_model}\n"
        if "/" in facts.base_model and not Path(facts.base_model).exists()
        else ""
    )
    lines = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base}tags:\n- reinforcement-learning\n- shoal\n---",
        "",
        f"# {spec.run}, version {facts.version}",
        "",
        f"Trained with [Shoal](https://github.com/shoal-rl/shoal) {__version__} by reinforcement learning"
        + (f", from `{facts.base_model}`." if facts.base_model else "."),
        "",
        *(f"- Task: {_describe_task(task)}" for task in spec.tasks),
        f"- Sampling: temperature {spec.sampling.temperature:g}, at most {spec.sampling.max_new_tokens} tokens, "
        f"{spec.sampling.samples_per_prompt} samples for each prompt",
        f"- Held-out reward of this version: {_held_out(facts) or 'not evaluated'}",
        "",
        "## Held-out reward",
        "",
        "| version | task | held-out reward | rollouts | answer tokens | reward of the training batch |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one.version} | {one.task or spec.task.title} | {one.reward_mean:.4f} | {one.rollouts} | {one.answer_tokens_mean:.1f} | "
            f"{'' if one.version not in rewards else f'{rewards[one.version]:.4f}'} |"
            for one in shown
        ),
        "",
        "## Where it comes from",
        "",
        "Every rollout that this model was trained on was checked by the run's validators, and every verdict is in the run's ledger.",
        "",
        f"- Ledger head: event {facts.head.seq}, `{facts.head.hash}`",
        f"- Run key: `{facts.run_key}`",
        f"- BLAKE3 of `model.safetensors`: `{facts.weights_digest}`, signed in the manifest of version {facts.version}",
        "",
        "`shoal ledger verify` of the run's coordinator or folder recomputes the ledger up to that head.",
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        "```",
    ]
    return "\n".join(lines) + "\n"


# -- chat ---------------------------------------------------------------------------------------------------


def chat(options: argparse.Namespace, stop: threading.Event) -> int:
    """Answers lines of standard input, or --prompt, with the model. Earlier turns are part of a conversation."""
    from shoal.cli.commands.sample_answers import load_engine

    with _chat_folder(options) as folder:
        engine = load_engine(folder, options)
    talk = Conversation(engine, options)
    if options.prompt is not None:
        _print_reply(talk.answer(options.prompt, stop))
        return EXIT_OK
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print("Ctrl-D ends the conversation; an empty line begins a new one.", file=sys.stderr)
    while line := ask_line("> ", stop, out=sys.stderr) if at_terminal else sys.stdin.readline():
        if line.strip():
            _print_reply(talk.answer(line.rstrip("\n"), stop))
        else:
            talk.begin()
    return EXIT_OK


def _print_reply(reply: str) -> None:
    print(printable(reply, keep="\n\t"), flush=True)
    if not reply.strip():
        print(
            "the answer is empty; ask as the run's task does: `shoal rollouts RUN` shows its prompts",
            file=sys.stderr,
        )


class Conversation:
    """The turns of a conversation with one engine. A model without a chat template gets each line alone."""

    def __init__(self, engine: "Engine", options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._source = secrets.token_hex(16) if options.seed is None else str(options.seed)
        self._drawn = 0
        self._chat = not options.plain and bool(getattr(engine.tokenizer, "has_template", False))
        self._turns: list[dict[str, str]] = []

    def begin(self) -> None:
        """Forgets the turns so far."""
        self._turns.clear()

    def answer(self, text: str, stop: threading.Event) -> str:
        """Returns the model's answer to a turn of the user."""
        tokenizer: Any = self._engine.tokenizer
        if self._chat:
            self._turns.append({"role": "user", "content": text})
            tokens = tokenizer.encode_turns(self._turns)
        else:
            tokens = tokenizer.encode_prompt(text, chat=False)
        reply = str(tokenizer.decode(self._generate(tuple(tokens), stop)))
        self._turns.append({"role": "assistant", "content": reply})
        return reply

    def _generate(self, tokens: tuple[int, ...], stop: threading.Event) -> tuple[int, ...]:
        from shoal.rollout.engine.api import GenerationRequest, generate

        source = hashlib.sha256(f"chat/{self._source}".encode()).hexdigest()
        self._drawn += 1
        request = GenerationRequest(
            prompt_index=0,
            sample_index=0,
            prompt_tokens=tokens,
            sample_seed=sample_seed(source, self._drawn, 0),
            max_new_tokens=self._options.max_new_tokens,
            temperature=self._options.temperature,
        )
        return next(row for rows in generate(self._engine, [request], stop) for row in rows).output_tokens


@contextlib.contextmanager
def _chat_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yields the model's folder; of a run, a temporary folder with the version that --version names."""
    from shoal.cli.commands.sample_answers import model_folder

    path = Path(options.model)
    if is_url(options.model):
        raise ValueError(
            f"{options.model} is a URL; fetch a version first: shoal export {options.model} --version newest --out FOLDER"
        )
    if path.is_dir() and is_run_folder(path):
        with RunFolder(path) as run, tempfile.TemporaryDirectory() as into:
            version = run.find_version(options.version)
            run.restore(version, Path(into))
            print(f"version {version} of run {printable(run.spec.run)}", file=sys.stderr)
            yield Path(into)
        return
    with model_folder(options.model) as folder:
        yield folder
