"""Arguments of `shoal serve` and `shoal verify`. Imports nothing but options, like arguments.py."""

import argparse
import threading
from pathlib import Path

from shoal.cli.ui.values import (
    Commands,
    add_compute_options,
    add_device,
    add_engine_choice,
    add_json,
    at_least_one,
    port_number,
)


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
    parser.set_defaults(action=_serve)


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
    parser.set_defaults(action=_verify_answer)


def _serve(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.serve import serve

    return serve(options, stop)


def _verify_answer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.verify_answer import verify

    return verify(options, stop)
