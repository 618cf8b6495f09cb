"""Values on the command line, as argparse's `type`: what is wrong is said with the text that was given."""

import argparse
import contextlib
import re


def url(text: str) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]{1,255}(/[A-Za-z0-9._~/-]{0,255})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://HOST:PORT")
    return text.rstrip("/")


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


def option(text: str) -> tuple[str, int | float | str]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must look like KEY=VALUE")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, value


def _whole(text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
    return int(text)


def _number(text: str) -> float:
    """What is none is below all that is asked for."""
    try:
        return float(text)
    except ValueError:
        return -1.0
