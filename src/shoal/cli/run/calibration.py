"""A bfloat16 run measures the noise of honest proofs on this machine before its first lease.

Without the measurement validators must tolerate so much that int8 weights and steered draws pass. `shoal toploc calibrate-run`
does the work in a process of its own, so that `shoal run` itself needs no torch.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shoal.cli.run.runfile import RunFile
from shoal.cli.run.supervise import RunFailed, Supervisor, last_line
from shoal.net.waiting import Stopped

NOISE_FILE = "calibration.json"
_CHILD = "calibration"


def calibrate_here(
    file: RunFile,
    source: Path,
    supervisor: Supervisor,
    *,
    device: str,
    overrides: Sequence[str] = (),
    stop: threading.Event,
    console: Console,
) -> Path | None:
    """Returns the run's calibration, measured now or when the run began; None if the run needs none or names its own."""
    if not file.lacks_calibration:
        return None
    noise = supervisor.folder / NOISE_FILE
    if noise.exists():
        return noise
    console.print(
        "calibrating: measuring the noise of honest proofs on this machine in bfloat16",
        markup=False,
        soft_wrap=True,
    )
    began_s = time.monotonic()
    command = ["toploc", "calibrate-run", str(source), "--out", str(noise), "--device", device]
    command += [word for override in overrides for word in ("--set", override)]
    supervisor.start(_CHILD, command)
    child = supervisor.children[_CHILD]
    while child.ended is None:
        supervisor.check()
        if (waited_s := time.monotonic() - began_s) > file.local.deadline_s:
            raise RunFailed(
                f"the calibration took longer than local.deadline_s = {waited_s:.0f} s; the last line of its log, "
                f"{child.log_path}: {last_line(child.log_path)}"
            )
        if stop.wait(0.2):
            raise Stopped("stopped during the calibration")
    console.print(
        f"calibrated in {time.monotonic() - began_s:.0f} s: {last_line(child.log_path)}",
        markup=False,
        soft_wrap=True,
    )
    return noise
