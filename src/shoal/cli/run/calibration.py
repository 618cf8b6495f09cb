"""A bfloat16 run measures the noise of honest proofs on this machine before its first lease.

Without the measurement validators must tolerate so much that int8 weights and steered draws pass. `shoal toploc calibrate-run`
does the work in a process of its own, so that `shoal run` itself needs no torch.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shoal.cli.run.runfile import RunFile
from shoal.cli.run.supervise import RunFailed, Supervisor, last_line
from shoal.cli.ui.view import print_plainly
from shoal.net.waiting import Stopped
from shoal.wire.proof_noise import Noise

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
    print_plainly(console, "calibrating: measuring the noise of honest proofs on this machine in bfloat16")
    began_s = time.monotonic()
    # Where the trainer looks for it: a GGUF file of 0.5B parameters takes as long to convert as to calibrate.
    model = supervisor.folder / "trainer" / "model"
    command = ["toploc", "calibrate-run", str(source), "--out", str(noise), "--device", device]
    command += ["--write-model", str(model)]
    command += [word for override in overrides for word in ("--set", override)]
    supervisor.start(_CHILD, command)
    child = supervisor.children[_CHILD]
    while child.ended is None:
        supervisor.check()
        if time.monotonic() - began_s > file.local.deadline_s:
            raise RunFailed(
                f"the calibration took longer than local.deadline_s = {file.local.deadline_s:g} s; the last line of its log, "
                f"{child.log_path}: {last_line(child.log_path)}"
            )
        if stop.wait(0.2):
            raise Stopped("stopped during the calibration")
    print_plainly(console, f"calibrated in {time.monotonic() - began_s:.0f} s: {last_line(child.log_path)}")
    return noise


def calibrate_version(
    source: Path,
    folder: Path,
    *,
    device: str,
    overrides: Sequence[str] = (),
    deadline_s: float,
    stop: threading.Event,
) -> Noise:
    """Returns the noise of the model in `folder` under the terms of a run file, measured in a process of its own.

    Raises ValueError if the measurement failed, Stopped if `stop` is set.
    """
    out, log_path = folder / NOISE_FILE, folder / "calibration.log"
    command = [sys.executable, "-m", "shoal", "toploc", "calibrate-run", str(source), "--model", str(folder)]
    command += ["--out", str(out), "--device", device, "--stop-with-stdin"]
    command += [word for override in overrides for word in ("--set", override)]
    deadline = time.monotonic() + deadline_s
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as child,
    ):
        try:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise ValueError(f"it took longer than {deadline_s:.0f} s: {last_line(log_path)}")
                if stop.wait(0.2):
                    raise Stopped("stopped during the calibration")
        finally:
            child.kill()
    if child.returncode:
        raise ValueError(last_line(log_path))
    return Noise.parse(out.read_bytes())
