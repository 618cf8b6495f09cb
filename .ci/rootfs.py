"""Builds the file system of an image of deploy/Dockerfile without a container engine, and runs a command in it.

    python .ci/rootfs.py BASE FOLDER TARGET [COMMAND...]

BASE is a Debian with Python 3.11, as `debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm BASE` makes
it; it takes the place of python:3.11-slim-bookworm. The Dockerfile's ENV, ARG, COPY, RUN, WORKDIR and USER are carried out in copies
of it by chroot, so it must run as root. COMMAND goes to the entry point; the network is the machine's own.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SHARED = [*map(Path, filter(None, os.environ.get("ROOTFS_SHARED", "").split(":")))]
"""Files and folders of this machine that pip needs in the chroot, such as its configuration."""


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Returns the base and the instructions of every stage, by name."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    text = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = (base, [])
            steps = found[name][1]
        else:
            steps.append((word, rest.strip()))
    return found


class Image:
    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder

    def build(self, name: str) -> tuple[Path, dict[str, str], str]:
        """Carries out a stage and those it builds on; returns its root, environment and user."""
        parent, steps = stages()[name]
        root = self.folder / name
        if parent in stages():
            source, environment, user = self.build(parent)
        else:
            source, environment, user = (
                self.base,
                {"PATH": "/opt/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"},
                "0",
            )
        shutil.rmtree(root, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(source), str(root)], check=True)
        if parent not in stages():
            self.prepare(root)
        where = environment.get("WHERE", "/")
        for word, rest in steps:
            sys.stdout.write(f"[{name}] {word} {rest[:100]}\n")
            sys.stdout.flush()
            if word == "ENV":
                environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            elif word == "ARG":
                key, _, value = rest.partition("=")
                environment[key] = os.environ.get(key, value)
            elif word == "WORKDIR":
                where = rest
                (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "USER":
                user = rest
            elif word == "COPY":
                self.copy(rest.split(), root, where)
            elif word == "RUN":
                run(root, ["sh", "-c", f"cd {where} && {rest}"], environment, user)
        return root, environment | {"WHERE": where}, user

    def prepare(self, root: Path) -> None:
        """Gives Debian's Python a `pip` that installs as that of the official image does."""
        for path in SHARED:
            target = root / str(path).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-aL", str(path), str(target.parent)], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        run(root, ["python3", "-m", "venv", "/opt/venv"], {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, "0")

    def copy(self, words: list[str], root: Path, where: str) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self.folder / words.pop(0).removeprefix("--from=")
            if not source.exists():
                self.build(source.name)
        *names, target = words
        place = root / os.path.join(where, target).lstrip("/")
        for name in names:
            path = source / name.lstrip("/")
            final = place / path.name if target.endswith("./") or target == "./" else place
            final.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, final, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, final)


def run(root: Path, command: list[str], environment: dict[str, str], user: str) -> None:
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith("_proxy") or name.startswith(("PIP_", "SSL_"))
    }
    mounts = f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && exec chroot --userspec={user}:{user} {root} "
    # A mount namespace of its own, so that nothing stays mounted.
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounts + shlex.join(command)], env=passed | environment, check=True
    )


def main(base: str, folder: str, target: str, *command: str) -> None:
    root, environment, user = Image(Path(base), Path(folder)).build(target)
    entry = next(rest for word, rest in stages()[target][1] if word == "ENTRYPOINT")
    words = [*re.findall(r'"([^"]+)"', entry), *(command or ["--help"])]
    home = environment | {"HOME": "/var/lib/shoal"}
    run(root, ["sh", "-c", f"cd {environment['WHERE']} && exec {shlex.join(words)}"], home, user)


if __name__ == "__main__":
    main(*sys.argv[1:])
