"""Arguments of the commands around a run: `shoal init` before it, `shoal eval`, `export`, `push`, `chat`, `serve` and `verify` after it, and
`shoal top`, `report`, `rollouts` and `compare`, which show it.

Like arguments.py, this is imported before every command, so it imports nothing but options and their types.
"""

import argparse
from pathlib import Path

from shoal.cli.ui.values import (
    MAX_NEW_TOKENS,
    Commands,
    Imported,
    above_zero,
    add_compute_options,
    add_device,
    add_engine_choice,
    add_generation_options,
    add_json,
    add_run_argument,
    add_sampling_options,
    add_task_options,
    at_least_one,
    count,
    port_number,
    url,
    url_or_folder,
)


def add_result_commands(commands: Commands) -> None:
    """Adds eval, export, push and chat."""
    _add_eval(commands)
    export = commands.add_parser(
        "export", help="write a version of a run as a Hugging Face folder with a model card"
    )
    _add_version(export)
    export.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="must not exist, or be empty"
    )
    export.set_defaults(action=Imported("commands.export", "export"))
    push = commands.add_parser(
        "push", help="upload a version of a run, or a model folder, to the Hugging Face hub"
    )
    _add_version(push)
    push.add_argument("repo", metavar="ORG/NAME", help="the repository; it is created if it does not exist")
    push.add_argument("--private", action="store_true", help="create a private repository")
    push.set_defaults(action=Imported("commands.export", "push"))
    chat = commands.add_parser("chat", help="talk to a run's model or to a model folder")
    chat.add_argument("model", metavar="MODEL", help="a run's folder, a model folder, or a built-in model")
    chat.add_argument(
        "--version",
        default="newest",
        metavar="N",
        help="of a run's folder: a number, best or newest (default: newest)",
    )
    chat.add_argument("--prompt", metavar="TEXT", help="print the answer to this and exit")
    chat.add_argument(
        "--plain", action="store_true", help="continue the text as it stands, without the chat template"
    )
    chat.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        default=MAX_NEW_TOKENS,
        help=f"longest answer (default: {MAX_NEW_TOKENS})",
    )
    chat.add_argument(
        "--temperature", type=above_zero, default=0.7, help="0.0001 is nearly greedy (default: 0.7)"
    )
    chat.add_argument("--seed", type=int, help="the same seed gives the same answers (default: a new one)")
    add_generation_options(chat)
    chat.set_defaults(action=Imported("commands.export", "chat"))


def add_init(commands: Commands) -> None:
    """Adds init."""
    parser = commands.add_parser(
        "init", help="write a commented run file from your model and data, and try it"
    )
    parser.add_argument("file", type=Path, nargs="?", default=Path("run.toml"), metavar="FILE.toml")
    parser.add_argument(
        "--model", help="a folder, org/name of the hub, or a built-in model (default: asked, or tiny)"
    )
    parser.add_argument(
        "--data", metavar="FILE", help="a file with questions and answers, or the name of a task"
    )
    parser.add_argument(
        "--question", metavar="COLUMN", help="the column with the question (default: guessed)"
    )
    parser.add_argument("--answer", metavar="COLUMN", help="the column with the answer (default: guessed)")
    parser.add_argument(
        "--grader",
        help="exact, number, math, choice, regex or FILE.py:FUNCTION (default: guessed from the answers)",
    )
    parser.add_argument("--pattern", help="with --grader regex: the regular expression")
    parser.add_argument("--think", action="store_true", help="let the model think before it answers")
    parser.add_argument("--name", help="the run's name (default: that of the file)")
    parser.add_argument("--steps", type=at_least_one, default=50, help="training steps (default: 50)")
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, help="longest answer (default: from the answers)"
    )
    parser.add_argument(
        "--workers", type=at_least_one, help="workers on this machine (default: from its cores)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU)")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the guesses")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.set_defaults(action=Imported("run.new_run", "init"))


def _add_eval(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval", help="pass@1 and pass@k of a model folder or a published version on held-out problems"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=url_or_folder,
        help="a run's folder, a coordinator's URL, a model folder, or a built-in model",
    )
    parser.add_argument(
        "--version",
        metavar="N",
        help="of a run: a number, newest, or best by held-out reward (default: newest)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        help="with a URL whose relays are private: a member's key, such as node.key in a worker's folder",
    )
    add_task_options(parser, required=False)
    parser.add_argument(
        "--prompts", type=at_least_one, default=200, help="number of held-out problems (default: 200)"
    )
    parser.add_argument("--k", type=at_least_one, default=1, help="the k of pass@k (default: 1)")
    parser.add_argument("--samples", type=at_least_one, help="answers to each problem (default: k)")
    parser.add_argument(
        "--show",
        type=count,
        default=3,
        metavar="N",
        help="print the answers to N problems, with the right ones (default: 3)",
    )
    parser.add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="write every answer with its reward"
    )
    add_sampling_options(parser)
    add_json(parser)
    parser.set_defaults(action=Imported("commands.evaluate", "evaluate"))


def _add_version(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "--version",
        default="best",
        metavar="N",
        help="a number, newest, or best by held-out reward (default: best)",
    )
    parser.add_argument("--key", type=Path, help="with a URL whose relays are private: a member's key")


def add_answer_commands(commands: Commands) -> None:
    """Adds serve and verify."""
    _add_serve(commands)
    _add_verify(commands)


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="an OpenAI-compatible endpoint whose answers can be verified")
    parser.add_argument("model", metavar="MODEL", help="a folder, or a built-in model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port_number, default=8000, help="(default: 8000)")
    parser.add_argument(
        "--max-rows", type=at_least_one, default=64, help="answers that are generated at once (default: 64)"
    )
    add_engine_choice(parser)
    add_compute_options(parser)
    parser.set_defaults(action=Imported("commands.serve", "serve"))


def _add_verify(commands: Commands) -> None:
    parser = commands.add_parser("verify", help="check an answer of shoal serve against a model")
    parser.add_argument("response", type=Path, metavar="RESPONSE.json", help="the whole response, as JSON")
    parser.add_argument("--model", required=True, help="a folder, or a built-in model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="what to compute in (default: what the answer was made in)",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(action=Imported("commands.verify_answer", "verify"))


def add_view_commands(commands: Commands) -> None:
    """Adds top, report, rollouts and compare."""
    _add_top(commands)
    _add_report(commands)
    _add_rollouts(commands)
    _add_compare(commands)


def _add_top(commands: Commands) -> None:
    parser = commands.add_parser("top", help="watch a run in the terminal")
    parser.add_argument("url", type=url, metavar="URL", help="the coordinator's URL")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON and exit")
    parser.set_defaults(action=Imported("commands.watch", "top"))


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser("report", help="write a run's page into one HTML file, to keep and to share")
    add_run_argument(parser)
    parser.add_argument(
        "--database",
        metavar="URL",
        default="",
        help="postgresql://..., for a folder whose run keeps its tables there",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html")
    parser.set_defaults(action=Imported("commands.watch", "report"))


def _add_rollouts(commands: Commands) -> None:
    parser = commands.add_parser(
        "rollouts",
        help="print a run's answers as text, with rewards and verdicts",
    )
    add_run_argument(parser)
    parser.add_argument("--version", type=count, metavar="N", help="only answers of this policy version")
    parser.add_argument("--reward", type=float, metavar="R", help="only groups with an answer of this reward")
    parser.add_argument("--task", default="", metavar="NAME", help="only this task, in a run with several")
    parser.add_argument(
        "--node", default="", metavar="ID", help="only this worker, by its id or its first digits"
    )
    parser.add_argument(
        "--search", default="", metavar="TEXT", help="only groups with this text in prompt or answer"
    )
    parser.add_argument("--held-out", action="store_true", help="answers to held-out problems instead")
    parser.add_argument(
        "--limit", type=at_least_one, metavar="GROUPS", help="(default: 4; with --export and --json, all)"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.parquet", help="write one row for each answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each group")
    parser.add_argument(
        "--database", metavar="URL", default="", help="postgresql://..., if the run keeps its tables there"
    )
    parser.set_defaults(action=Imported("commands.rollouts", "rollouts"))


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare runs: a table, and a page with their curves",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=url_or_folder,
        help="a run's folder, or a coordinator's URL; two or more",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the curves into one HTML file")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(action=Imported("commands.compare", "compare"))
