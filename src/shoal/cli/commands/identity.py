"""`shoal identity`: backs up, restores and delegates keys."""

import argparse
import json
import os
import threading
import time
from pathlib import Path

from shoal.cli.commands.join import JOINED, load_key
from shoal.cli.run.supervise import EXIT_OK
from shoal.files import write_bytes_atomically
from shoal.wire.delegation import delegate as sign_delegation
from shoal.wire.delegation import write_relay_key
from shoal.wire.keys import PUBLIC_KEY, Key

KEPT = ("node.key", JOINED, "run.json", "delegation.json")
"""Files of a node's folder that a backup holds."""


def backup(options: argparse.Namespace, stop: threading.Event) -> int:
    key = load_key(options.dir)
    kept = {name: (options.dir / name).read_text() for name in KEPT if (options.dir / name).exists()}
    try:
        # Not `write_atomically`, which would replace an existing file: it may be another node's only backup.
        descriptor = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{options.file} exists and is not overwritten; choose another name") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(file.fileno())
    print(f"node {key.public[:16]} is backed up in {options.file}; keep it where nobody else can read it")
    return EXIT_OK


def restore(options: argparse.Namespace, stop: threading.Event) -> int:
    if (options.dir / "node.key").exists():
        raise ValueError(f"{options.dir} already holds a node; choose another --dir")
    try:
        kept = json.loads(options.file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or not set(kept) <= set(KEPT):
            raise ValueError
        texts = {name: text.encode() for name, text in kept.items()}
        key = _restore_key(options.dir / "node.key", texts["node.key"])
    except (ValueError, KeyError, AttributeError):
        raise ValueError(
            f"{options.file} is not a backup of a node; `shoal identity backup` makes one"
        ) from None
    for name, text in texts.items():
        write_bytes_atomically(options.dir / name, text, mode=0o600)
    print(f"node {key.public[:16]} is restored in {options.dir}")
    return EXIT_OK


def _restore_key(path: Path, text: bytes) -> Key:
    write_bytes_atomically(path, text, mode=0o600)
    try:
        return Key.load(path)
    except ValueError:
        path.unlink()
        raise


def delegate(options: argparse.Namespace, stop: threading.Event) -> int:
    if not PUBLIC_KEY.fullmatch(options.node):
        raise ValueError(
            f"{options.node!r} is not a node's id; give the 64 hex digits that `shoal whoami` prints"
        )
    new = not options.owner.exists()
    owner = Key.load_or_create(options.owner)
    if new:
        print(f"Made an owner's key: {options.owner}. Keep it offline and backed up; nodes never need it.")
    delegation = sign_delegation(owner, options.node, now_s=time.time(), days=options.days)
    write_bytes_atomically(options.out, f"{delegation.model_dump_json()}\n".encode())
    print(f"owner {owner.public}\nwrote {options.out}; copy it into the node's folder as delegation.json")
    return EXIT_OK


def delegate_relay(options: argparse.Namespace, stop: threading.Event) -> int:
    """Writes the key of one relay and its delegation. A key that is in the folder already gets a newer delegation."""
    key = write_relay_key(Key.load(options.owner), options.url, options.out, days=options.days)
    print(
        f"relay {Key.load(key).public[:16]} at {options.url}: copy {options.out} to its host and start it there with\n"
        f"  shoal relay --key {key} --coordinator URL --dir DIR"
    )
    return EXIT_OK
