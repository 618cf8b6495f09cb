"""Types of command-line values, options that several commands share, and figures that several commands compute."""

import argparse
import contextlib
import importlib
import math
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from shoal.wire.messages import Evaluation

MAX_NEW_TOKENS = 256
"""Longest answer of `shoal eval` and `shoal data filter`, unless a run or an option says otherwise."""
DTYPES = ("float32", "bfloat16")
Z_95 = 1.959964
"""Standard deviations on each side of a 95 % interval."""

ADMIN_ACTIONS = {
    "quarantine": "node: check every submission of it",
    "ban": "node: eject it",
    "restore": "node: forget its rejections, back to probation",
    "pause": "issue no leases",
    "resume": "issue leases again",
    "void": "lease: end it without counting it against the node",
    "uphold": "lease: the appeal against its rejection is right",
    "dismiss": "lease: the appeal against its rejection is wrong",
    "invite": "make an invitation; --amount says for how many nodes",
    "allow": "key: let this node, or all nodes of this owner, enrol",
    "disallow": "key: take that permission back",
    "stake": "key: add --amount to its balance",
}
"""The actions of `shoal admin`: what each needs, if anything, and what it does."""

# argparse has no public names for these two.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Options: TypeAlias = "argparse._ActionsContainer"
"""A parser, or a group of its options."""
Action: TypeAlias = Callable[[argparse.Namespace, threading.Event], int]
"""The function of a command: takes its options, stops early if the event is set, and returns the exit code."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The function of a command whose module, below shoal.cli, is imported when the command runs."""

    module: str
    function: str

    def load(self) -> Action:
        action: Action = getattr(importlib.import_module(f"shoal.cli.{self.module}"), self.function)
        return action

    def __call__(self, options: argparse.Namespace, stop: threading.Event) -> int:
        return self.load()(options, stop)


# -- types of values: each raises ArgumentTypeError with the text that was given ------------------------------


def url(text: str) -> str:
    pattern = r"https?://[A-Za-z0-9.\-\[\]:]{1,255}(/[A-Za-z0-9._~/-]{0,255})?"
    try:
        valid = re.fullmatch(pattern, text) is not None and urllib.parse.urlsplit(text).port != 0
    except ValueError:  # the port is no number, or the brackets hold no IPv6 address
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://HOST:PORT")
    return text.rstrip("/")


def url_or_folder(text: str) -> str:
    """Returns a coordinator's URL, or the path of a run's folder, which is looked at when it is read."""
    if is_url(text):
        return url(text)
    if not os.path.exists(text) and re.fullmatch(r"(\w*:/*)?[\w.-]+:\d{1,5}(/.*)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder here; if it is a URL, write it as http://{text.rpartition('/')[2]}"
        )
    return text


def is_url(run: str) -> bool:
    """Returns whether an argument RUN or MODEL is a coordinator's URL; otherwise it is a folder."""
    return run.startswith(("http://", "https://"))


def port_number(text: str) -> int:
    return _whole(text, 0, 65535)


def count(text: str) -> int:
    return _whole(text, 0, 1 << 20)


def at_least_one(text: str) -> int:
    return _whole(text, 1, 1 << 20)


def seconds(text: str) -> float:
    return above_zero(text, "a number of seconds")


def above_zero(text: str, what: str = "a number") -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be {what} above 0")
    return number


def share(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to 1")
    return number


def option(text: str) -> tuple[str, bool | int | float | str]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must look like KEY=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, value


def _whole(text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
    return int(text)


def _number(text: str) -> float:
    """Returns -1 for text that is not a number, which fails every range check."""
    try:
        return float(text)
    except ValueError:
        return -1.0


# -- commands and options: how they are declared ------------------------------------------------------------


def add_command(
    commands: Commands, name: str, words: str, action: Action | None = None
) -> argparse.ArgumentParser:
    """Adds a command and the function that it calls; one with subcommands of its own calls none."""
    parser = commands.add_parser(name, help=words)
    if action is not None:
        parser.set_defaults(action=action)
    return parser


def add_subcommands(commands: Commands, name: str, words: str) -> Commands:
    """Adds a command that needs a subcommand, and returns what the subcommands are added to."""
    return commands.add_parser(name, help=words).add_subparsers(metavar="ACTION", required=True)


def add_flag(parser: Options, name: str, words: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(name, action="store_true", help=words)


def add_value(
    parser: Options, name: str, kind: Callable[[str], object], default: object, words: str = "", **more: Any
) -> None:
    """Adds an option with a default, which its help names at the end."""
    shown = f"{default:g}" if isinstance(default, float) else default
    parser.add_argument(name, type=kind, default=default, help=f"{words} (default: {shown})".lstrip(), **more)


def add_list(
    parser: Options, name: str, metavar: str, words: str, kind: Callable[[str], object] = str
) -> None:
    """Adds an option that may be given several times."""
    parser.add_argument(name, type=kind, action="append", default=[], metavar=metavar, help=words)


# -- options that several commands share --------------------------------------------------------------------


def add_run_argument(parser: Options) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=url_or_folder, help="a run's folder, or a coordinator's URL"
    )


def add_json(parser: Options) -> None:
    add_flag(parser, "--json", "print the result as JSON")


def add_stop_with_stdin(parser: Options) -> None:
    add_flag(parser, "--stop-with-stdin", "stop when standard input ends")


def add_device(parser: Options, what: str = "where the model runs") -> None:
    add_value(parser, "--device", str, "cpu", f"{what}: cpu, cuda (also AMD's ROCm) or mps")


def add_threads(parser: Options) -> None:
    parser.add_argument("--threads", type=count, default=0, help="torch threads (default: 0, torch chooses)")


def add_max_rows(parser: Options, words: str = "rows decoded at once") -> None:
    add_value(parser, "--max-rows", at_least_one, 64, words)


def add_host(parser: Options, words: str = "address to listen on", name: str = "--host") -> None:
    add_value(parser, name, str, "127.0.0.1", words)


def add_port(parser: Options, port: int, name: str = "--port", words: str = "") -> None:
    add_value(parser, name, port_number, port, f"{words}0 takes any free port")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what a worker may use of its machine."""
    group = parser.add_argument_group("limits", "what the worker may use of this machine (default: no limit)")
    group.add_argument(
        "--cores", type=at_least_one, metavar="N", help="CPU cores; torch gets as many threads"
    )
    for name, unit, words in (
        ("--memory-gb", "GB", "memory: of the machine, or of the GPU with --device cuda"),
        ("--disk-gb", "GB", "disk space for versions of the weights"),
        ("--download-mbit", "MBIT", "megabits per second for weights"),
        ("--upload-mbit", "MBIT", "megabits per second for results"),
    ):
        group.add_argument(name, type=above_zero, metavar=unit, help=words)


def add_set(parser: Options, words: str = "") -> None:
    words = "replace a key of the run file, such as trainer.learning_rate=1e-5; may be repeated" + words
    add_list(parser, "--set", "KEY=VALUE", words)


def add_engine_choice(parser: Options) -> None:
    parser.add_argument(
        "--engine",
        choices=("torch", "vllm"),
        default="torch",
        help="what generates (default: torch); vllm is an extra package",
    )
    words = "GPUs that share one model; with vllm only"
    add_value(parser, "--tensor-parallel", at_least_one, 1, words, metavar="GPUS")
    parser.add_argument(
        "--draft",
        metavar="lookup|FOLDER",
        help="guess tokens when few rows run, from the row itself or with a small model; changes no result (default: off)",
    )
    parser.add_argument(
        "--draft-rows",
        type=at_least_one,
        metavar="ROWS",
        help="use drafts while at most this many rows run (default: 1 on a CPU, 8 on a GPU)",
    )


def add_weights(parser: Options) -> None:
    parser.add_argument(
        "--weights",
        choices=("int8", "fp8"),
        help="round the layers' weights to this format and declare it; only for runs that admit it (default: as published)",
    )


def add_compute_options(parser: Options) -> None:
    add_value(parser, "--dtype", str, "float32", choices=DTYPES)
    add_device(parser)
    add_threads(parser)


def add_task_options(parser: Options, *, required: bool) -> None:
    parser.add_argument(
        "--task", metavar="NAME", required=required, help="the task; `shoal tasks` lists them"
    )
    add_task_settings(parser)


def add_task_settings(parser: Options) -> None:
    """Adds the options and length budgets of a task that is named elsewhere."""
    words = "an option of the task; may be repeated: digits=2, path=gsm8k_train.jsonl"
    add_list(parser, "--option", "KEY=VALUE", words, option)
    parser.add_argument(
        "--budgets",
        type=at_least_one,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="answer lengths; each prompt asks for one of them",
    )
    words = "reward lost for each token above or below the budget"
    add_value(parser, "--budget-alpha", above_zero, 0.0003, words)


def add_sampling_options(parser: Options) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        help=f"(default: {MAX_NEW_TOKENS}; for a run's version, as the run file says)",
    )
    parser.add_argument(
        "--temperature",
        type=above_zero,
        help="0.0001 is nearly greedy (default: 1; for a run's version, as the run file says)",
    )
    add_value(parser, "--seed", int, 0, "chooses the problems and the samples")
    add_generation_options(parser)


def add_generation_options(parser: Options, max_rows: str = "rows decoded at once") -> None:
    """Adds the options of an engine. `max_rows` is the help of --max-rows."""
    add_max_rows(parser, max_rows)
    add_engine_choice(parser)
    add_compute_options(parser)


# -- figures and devices ------------------------------------------------------------------------------------


def byte_size(num_bytes: float) -> str:
    """Returns a number of bytes in words: `2.5 MB`, `1.30 GB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.{0 if num_bytes >= 1e8 else 1}f} MB"


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share that was seen in `count` independent trials."""
    if count < 1:
        raise ValueError("an interval needs at least one trial")
    z2 = Z_95 * Z_95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, middle - spread), min(1.0, middle + spread)


def held_out_means(evaluations: Iterable["Evaluation"]) -> dict[int, float]:
    """Returns the held-out reward of each version that every evaluation of the run has completed; the mean if there are several."""
    found: dict[int, dict[str, float]] = {}
    for one in evaluations:
        if one.complete:
            found.setdefault(one.version, {})[one.task] = one.reward_mean
    most = max((len(results) for results in found.values()), default=0)
    return {
        version: sum(results.values()) / most
        for version, results in sorted(found.items())
        if len(results) == most
    }


def completed_by_task(evaluations: Iterable["Evaluation"]) -> dict[str, list["Evaluation"]]:
    """Returns the complete held-out evaluations of each label, in order."""
    found: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        if one.complete:
            found.setdefault(one.task, []).append(one)
    return found


def best_version(means: Mapping[int, float]) -> int:
    """Returns the version with the highest reward, the newest of several equal ones."""
    return max(means, key=lambda version: (means[version], version))


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Returns the probability that k of the `samples` answers, drawn without replacement, include a right one.

    This estimate of pass@k has no bias, unlike 1 - (1 - p)^k.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def check_device(name: str) -> None:
    """Raises ValueError if torch cannot use the device, before the role waits minutes for others."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda", "mps") or (
        device.type == "mps" and not torch.backends.mps.is_available()
    ):
        raise ValueError(
            f"--device {name}: torch {torch.__version__} has no such device here; use cpu or cuda"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )


def device_of_rank(name: str) -> str:
    """Returns the GPU of this process's local rank where torchrun started several processes on a host."""
    if name != "cuda" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return name
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def use_device(options: argparse.Namespace) -> None:
    """Checks --device, and sets the number of torch's threads if --threads gives one."""
    import torch

    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
