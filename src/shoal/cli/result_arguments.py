"""Arguments of the commands around a run: `shoal init` before it, `shoal eval`, `export`, `push`, `chat`, `serve` and `verify` after it, and
`shoal top`, `report`, `rollouts` and `compare`, which show it.

Like arguments.py, this is imported before every command, so it imports nothing but options and their types.
"""

import argparse
from pathlib import Path

from shoal.cli.ui.values import (
    DTYPES,
    MAX_NEW_TOKENS,
    Commands,
    Imported,
    above_zero,
    add_command,
    add_device,
    add_flag,
    add_generation_options,
    add_host,
    add_json,
    add_run_argument,
    add_sampling_options,
    add_task_options,
    add_value,
    at_least_one,
    count,
    port_number,
    url,
    url_or_folder,
)


def add_result_commands(commands: Commands) -> None:
    """Adds eval, export, push and chat."""
    _add_eval(commands)
    words = "write a version of a run as a Hugging Face folder with a model card"
    export = add_command(commands, "export", words, Imported("commands.export", "export"))
    _add_version(export)
    export.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="must not exist, or be empty"
    )
    words = "upload a version of a run, or a model folder, to the Hugging Face hub"
    push = add_command(commands, "push", words, Imported("commands.export", "push"))
    _add_version(push)
    push.add_argument("repo", metavar="ORG/NAME", help="the repository; it is created if it does not exist")
    add_flag(push, "--private", "create a private repository")
    words = "talk to a run's model or to a model folder"
    chat = add_command(commands, "chat", words, Imported("commands.export", "chat"))
    chat.add_argument("model", metavar="MODEL", help="a run's folder, a model folder, or a built-in model")
    add_value(chat, "--version", str, "newest", "of a run's folder: a number, best or newest", metavar="N")
    chat.add_argument("--prompt", metavar="TEXT", help="print the answer to this and exit")
    add_flag(chat, "--plain", "continue the text as it stands, without the chat template")
    add_value(chat, "--max-new-tokens", at_least_one, MAX_NEW_TOKENS, "longest answer")
    add_value(chat, "--temperature", above_zero, 0.7, "0.0001 is nearly greedy")
    chat.add_argument("--seed", type=int, help="the same seed gives the same answers (default: a new one)")
    add_generation_options(chat)


def add_init(commands: Commands) -> None:
    """Adds init."""
    words = "write a commented run file from your model and data, and try it"
    parser = add_command(commands, "init", words, Imported("run.new_run", "init"))
    parser.add_argument("file", type=Path, nargs="?", default=Path("run.toml"), metavar="FILE.toml")
    words = "a folder, org/name of the hub, or a built-in model (default: asked, or tiny)"
    parser.add_argument("--model", help=words)
    words = "a file with questions and answers, or the name of a task"
    parser.add_argument("--data", metavar="FILE", help=words)
    words = "the column with the question (default: guessed)"
    parser.add_argument("--question", metavar="COLUMN", help=words)
    parser.add_argument("--answer", metavar="COLUMN", help="the column with the answer (default: guessed)")
    words = "exact, number, math, choice, regex or FILE.py:FUNCTION (default: guessed from the answers)"
    parser.add_argument("--grader", help=words)
    parser.add_argument("--pattern", help="with --grader regex: the regular expression")
    add_flag(parser, "--think", "let the model think before it answers")
    parser.add_argument("--name", help="the run's name (default: that of the file)")
    add_value(parser, "--steps", at_least_one, 50, "training steps")
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, help="longest answer (default: from the answers)"
    )
    parser.add_argument(
        "--workers", type=at_least_one, help="workers on this machine (default: from its cores)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU)")
    add_flag(parser, "--yes", "ask nothing: take the guesses")
    add_flag(parser, "--force", "replace a file that exists")


def _add_eval(commands: Commands) -> None:
    words = "pass@1 and pass@k of a model folder or a published version on held-out problems"
    parser = add_command(commands, "eval", words, Imported("commands.evaluate", "evaluate"))
    words = "a run's folder, a coordinator's URL, a model folder, or a built-in model"
    parser.add_argument("model", metavar="MODEL", type=url_or_folder, help=words)
    words = "of a run: a number, newest, or best by held-out reward (default: newest)"
    parser.add_argument("--version", metavar="N", help=words)
    words = "with a URL whose relays are private: a member's key, such as node.key in a worker's folder"
    parser.add_argument("--key", type=Path, help=words)
    add_task_options(parser, required=False)
    add_value(parser, "--prompts", at_least_one, 200, "number of held-out problems")
    add_value(parser, "--k", at_least_one, 1, "the k of pass@k")
    parser.add_argument("--samples", type=at_least_one, help="answers to each problem (default: k)")
    add_value(parser, "--show", count, 3, "print the answers to N problems, with the right ones", metavar="N")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="write every answer with its reward"
    )
    add_sampling_options(parser)
    add_json(parser)


def _add_version(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    add_value(parser, "--version", str, "best", "a number, newest, or best by held-out reward", metavar="N")
    parser.add_argument("--key", type=Path, help="with a URL whose relays are private: a member's key")


def add_answer_commands(commands: Commands) -> None:
    """Adds serve and verify."""
    words = "an OpenAI-compatible endpoint whose answers can be verified"
    serve = add_command(commands, "serve", words, Imported("commands.serve", "serve"))
    serve.add_argument("model", metavar="MODEL", help="a folder, or a built-in model")
    add_host(serve)
    add_value(serve, "--port", port_number, 8000)
    add_generation_options(serve, "answers that are generated at once")
    words = "check an answer of shoal serve against a model"
    verify = add_command(commands, "verify", words, Imported("commands.verify_answer", "verify"))
    verify.add_argument("response", type=Path, metavar="RESPONSE.json", help="the whole response, as JSON")
    verify.add_argument("--model", required=True, help="a folder, or a built-in model")
    words = "what to compute in (default: what the answer was made in)"
    verify.add_argument("--dtype", choices=DTYPES, help=words)
    add_device(verify)
    add_json(verify)


def add_view_commands(commands: Commands) -> None:
    """Adds top, report, rollouts and compare."""
    top = add_command(commands, "top", "watch a run in the terminal", Imported("commands.watch", "top"))
    top.add_argument("url", type=url, metavar="URL", help="the coordinator's URL")
    add_flag(top, "--json", "print one snapshot as JSON and exit")
    words = "write a run's page into one HTML file, to keep and to share"
    report = add_command(commands, "report", words, Imported("commands.watch", "report"))
    add_run_argument(report)
    words = "postgresql://..., for a folder whose run keeps its tables there"
    report.add_argument("--database", metavar="URL", default="", help=words)
    report.add_argument("--out", type=Path, required=True, metavar="FILE.html")
    _add_rollouts(commands)
    words = "compare runs: a table, and a page with their curves"
    compare = add_command(commands, "compare", words, Imported("commands.compare", "compare"))
    words = "a run's folder, or a coordinator's URL; two or more"
    compare.add_argument("runs", nargs="+", metavar="RUN", type=url_or_folder, help=words)
    compare.add_argument("--out", type=Path, metavar="FILE.html", help="write the curves into one HTML file")
    add_flag(compare, "--json", "print the table as JSON")


def _add_rollouts(commands: Commands) -> None:
    words = "print a run's answers as text, with rewards and verdicts"
    parser = add_command(commands, "rollouts", words, Imported("commands.rollouts", "rollouts"))
    add_run_argument(parser)
    parser.add_argument("--version", type=count, metavar="N", help="only answers of this policy version")
    parser.add_argument("--reward", type=float, metavar="R", help="only groups with an answer of this reward")
    for name, metavar, words in (
        ("--task", "NAME", "only this task, in a run with several"),
        ("--node", "ID", "only this worker, by its id or its first digits"),
        ("--search", "TEXT", "only groups with this text in prompt or answer"),
        ("--database", "URL", "postgresql://..., if the run keeps its tables there"),
    ):
        parser.add_argument(name, default="", metavar=metavar, help=words)
    add_flag(parser, "--held-out", "answers to held-out problems instead")
    parser.add_argument(
        "--limit", type=at_least_one, metavar="GROUPS", help="(default: 4; with --export and --json, all)"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.parquet", help="write one row for each answer")
    add_flag(parser, "--json", "print one JSON object for each group")
