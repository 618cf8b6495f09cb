"""The container in which gVisor (`runsc`) runs the fork server of sandbox_child.py.

gVisor answers the system calls of its processes with a kernel of its own, so they cannot use a bug of the machine's kernel. The
container sees what the level bubblewrap sees: Python's library and the sandbox's code, read-only, and no network.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.tasks.grading import sandbox_child

CODE_FOLDER = "/shoal"
TMP_BYTES = 64 << 20
"""Size of /tmp, which all programs of a container share. Each has a folder there that no other user may enter."""
_CAPABILITIES = (
    *("CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"),
    *("CAP_KILL", "CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE"),
)
"""What the fork server needs to give programs users and processes of their own; programs have none of them."""


def find_runsc() -> str | None:
    """Returns the path of runsc; None if it is not installed or this user is not root, which it needs for other users' programs."""
    return shutil.which("runsc") if os.getuid() == 0 else None


def container_command(folder: str, python: str, code: Sequence[Path], arguments: Sequence[str]) -> list[str]:
    """Writes the container's description to `folder`; returns the command that runs Python with these arguments in it."""
    bundle = Path(folder)
    root = bundle / "rootfs"
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        tmpfs | {"destination": "/tmp", "options": [f"size={TMP_BYTES}", "mode=711"]},
    ]
    shown = {path: path for path in (*sandbox_child.needed_folders(), python)}
    shown |= {str(path): f"{CODE_FOLDER}/{path.name}" for path in code}
    for source, target in shown.items():
        inside = root / target.lstrip("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(source):
            inside.symlink_to(os.readlink(source))
        else:
            mounts.append(
                {"destination": target, "type": "bind", "source": source, "options": ["ro", "rbind"]}
            )
    mounts += [
        tmpfs | {"destination": path, "options": ["ro", "size=4k"]}
        for path in sandbox_child.package_folders()
    ]
    kinds = ("bounding", "effective", "permitted", "inheritable")
    description = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [python, *arguments],
            "env": [],
            "cwd": "/",
            "capabilities": {kind: list(_CAPABILITIES) for kind in kinds},
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
    (bundle / "config.json").write_text(json.dumps(description))
    runsc = find_runsc() or "runsc"
    # ptrace works on every machine; gVisor's other platforms need hardware or newer releases.
    options = ("--root", f"{folder}/state", "--platform=ptrace", "--network=none", "--ignore-cgroups")
    return [runsc, *options, "run", "--bundle", folder, bundle.name]
