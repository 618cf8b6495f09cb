"""What several commands are typed with, and all of `shoal eval`, `data filter` and `toploc`. Light: every command of `shoal` imports this before it starts."""

import argparse
import threading
from pathlib import Path
from typing import TypeAlias

from shoal.cli.ui.values import above_zero, at_least_one, count, option, share

MAX_NEW_TOKENS = 256

Commands: TypeAlias = (
    "argparse._SubParsersAction[argparse.ArgumentParser]"  # argparse has no public name for it
)


def add_eval(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval", help="pass@1 and pass@k of a model folder or a published version on held-out problems"
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a built-in model, or a coordinator's URL")
    parser.add_argument("--version", type=count, help="with a URL: which version (default: the newest)")
    parser.add_argument(
        "--key",
        type=Path,
        help="with a URL: a member's key (node.key of a worker's folder), where relays are private",
    )
    add_task_options(parser, required=False)
    parser.add_argument("--prompts", type=at_least_one, default=200, help="held-out problems (default: 200)")
    parser.add_argument("--k", type=at_least_one, default=1, help="of pass@k")
    parser.add_argument("--samples", type=at_least_one, help="answers to each problem (default: k)")
    add_draw_options(parser)
    parser.add_argument("--json", action="store_true", help="print figures and settings as JSON")
    parser.set_defaults(action=_evaluate)


def add_data(commands: Commands) -> None:
    parser = commands.add_parser("data", help="prepare problems for a run")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    filter_ = actions.add_parser("filter", help="keep the problems that a model solves sometimes")
    add_task_options(filter_, required=True)
    filter_.add_argument("--model", required=True, help="a folder, or a built-in model")
    filter_.add_argument("--k", type=at_least_one, default=8, help="answers to each problem (default: 8)")
    filter_.add_argument(
        "--band",
        type=share,
        nargs=2,
        default=(0.125, 0.5),
        metavar=("LOW", "HIGH"),
        help="share of right answers of the problems that are kept, both ends included (default: 0.125 0.5)",
    )
    filter_.add_argument(
        "--problems", type=at_least_one, help="how many to look at (default: all, if the task reads a file)"
    )
    filter_.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    add_draw_options(filter_)
    filter_.set_defaults(action=_filter)


def add_toploc(commands: Commands) -> None:
    parser = commands.add_parser("toploc", help="measure what honest proofs look like")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    prove = actions.add_parser("prove", help="generate honest rows on this machine")
    prove.add_argument("--rows", type=at_least_one, default=512)
    prove.add_argument("--max-new-tokens", type=at_least_one, default=96)
    prove.add_argument("--task", default="add", help="whose prompts to answer")
    prove.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once")
    add_engine_choice(prove)
    prove.set_defaults(action=_prove)
    calibrate = actions.add_parser("calibrate", help="check honest rows on this machine; write the noise")
    calibrate.add_argument(
        "files", type=Path, nargs="+", metavar="ROWS", help="files of `prove`; a name says whose"
    )
    calibrate.set_defaults(action=_calibrate)
    for action in (prove, calibrate):
        action.add_argument("--model", required=True, help="a folder, or a built-in model")
        action.add_argument(
            "--temperature", type=above_zero, default=1.0, help="at which the run samples (default: 1)"
        )
        add_engine_options(action)
        action.add_argument("--out", type=Path, required=True, metavar="FILE")


def _evaluate(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.evaluate import evaluate

    return evaluate(options, stop)


def _filter(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.data import filter_problems

    return filter_problems(options, stop)


def add_task_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--task", metavar="NAME", required=required, help="docs/tasks.md lists them")
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the task, as often as needed: digits=2, path=gsm8k_train.jsonl",
    )
    parser.add_argument(
        "--budgets",
        type=at_least_one,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="lengths, one of which each prompt asks for",
    )
    parser.add_argument("--budget-alpha", type=above_zero, default=0.0003, help="cost of a token off")


def add_draw_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        help=f"(default: {MAX_NEW_TOKENS}; of a run's version, the run's)",
    )
    parser.add_argument(
        "--temperature",
        type=above_zero,
        help="0.0001 is as good as greedy (default: 1; of a run's version, the run's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of problems and draws")
    parser.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once")
    add_engine_choice(parser)
    add_engine_options(parser)


def add_engine_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default="torch", help="what generates; vllm is an extra"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=at_least_one,
        default=1,
        metavar="GPUS",
        help="that share the model; vllm only",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument(
        "--threads", type=count, default=0, help="torch threads (default: torch's own choice)"
    )


def _prove(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.toploc import prove

    return prove(options, stop)


def _calibrate(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.toploc import calibrate

    return calibrate(options, stop)
