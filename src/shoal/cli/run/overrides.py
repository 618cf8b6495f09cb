"""`--set KEY=VALUE`: changes keys of a run file from the command line, and lists the runs of a sweep.

--set trainer.learning_rate=1e-5       one value, written as in TOML; a word without quotes is a text
--set trainer.learning_rate=1e-5,3e-5  a sweep: one run for each value
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)+")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_OUTSIDE_COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)(?![^\[{]*[\]}])""")
"""A comma outside of quotes and brackets."""

Table = dict[str, Any]


def parse_override(word: str) -> tuple[str, list[Any]]:
    """Returns the key and the values of one `--set`. Raises ValueError with the word that was given."""
    key, sign, text = word.partition("=")
    if not sign or not _KEY.fullmatch(key.strip()):
        raise ValueError(
            f"--set {word}: write SECTION.KEY=VALUE, such as trainer.learning_rate=1e-5; `shoal docs run-file` lists the keys"
        )
    return key.strip(), [_value(part.strip()) for part in _OUTSIDE_COMMA.split(text)]


def combinations(words: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns the overrides of each run: one run, or with several values of a key all combinations."""
    choices = []
    for word in words:
        key, values = parse_override(word)
        choices.append([f"{key}={to_toml(value)}" for value in values])
    return list(itertools.product(*choices))


def apply_overrides(table: Table, words: Sequence[str]) -> None:
    """Sets the keys in a run file's table. Raises ValueError for several values: they are a sweep."""
    for word in words:
        key, values = parse_override(word)
        if len(values) > 1:
            raise ValueError(f"--set {word} has {len(values)} values; only `shoal run` makes a sweep of them")
        *sections, name = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ValueError(f"--set {word}: {section} is a value in the run file, not a section")
        inner[name] = values[0]


def overridden_text(path: Path, words: Sequence[str]) -> str:
    """Returns the run file with the overrides in it; without any, the file as it is."""
    text = path.read_text(encoding="utf-8")
    if not words:
        return text
    table = tomllib.loads(text)
    apply_overrides(table, words)
    changed = " ".join(f"--set {word}" for word in words)
    return f"# {path.name} with {changed}\n\n{dump_tables(table)}"


def dump_tables(table: Table, prefix: str = "") -> str:
    """Returns a run file's table as TOML: its own keys first, then each section."""
    own = [
        f"{_quoted(key)} = {to_toml(value)}"
        for key, value in table.items()
        if not _is_section(prefix, key, value)
    ]
    parts = [f"[{prefix}]\n" + "\n".join(own)] if own and prefix else own
    for key, value in table.items():
        if _is_section(prefix, key, value):
            parts.append(dump_tables(value, f"{prefix}.{_quoted(key)}" if prefix else _quoted(key)))
    return "\n\n".join(part for part in parts if part).rstrip("\n") + ("" if prefix else "\n")


def to_toml(value: Any) -> str:
    """Returns a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(one) for one in value)}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_quoted(key)} = {to_toml(one)}" for key, one in value.items()) + " }"
    return _text(str(value))


def _is_section(prefix: str, key: str, value: Any) -> bool:
    return isinstance(value, dict) and f"{prefix}.{key}" != "task.options"


def _quoted(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(value: str) -> str:
    # JSON's escapes are TOML's too, but JSON leaves DEL as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(text: str) -> Any:
    """Returns the value of a TOML literal; text that is not valid TOML is returned as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
