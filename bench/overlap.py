"""Measures the gain of generating while training: the same swarm at several lags, in real processes.

    python bench/overlap.py --lags 0 1 2 --steps 20 --groups 32 64

Each run is `shoal run` of `tiny` on sorting with one worker, one relay, one validator, at one `max_lag`: 0 is synchronous
training, in which steps and rollouts alternate. Trainer and worker have one core each; other roles use the remaining cores, if
the machine has more than two. Prints the seconds per step (median of all but the first five), the trainer's wait and train
times, and the speed relative to lag 0. Overlap can gain at most (wait + train) / max(wait, train) of the run at lag 0; a larger
gain means that the round trip of a lease (ask, send, check) is hidden too. `--groups` and `--prompts` set the balance.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FIRST = 5
"""First steps that are not counted: processes start, caches fill, and the queue of a run with lag fills."""

RUN_FILE = """
[run]
name = "overlap"
model = "tiny"
last_version = {last}
max_lag = {lag}
keep_versions = {keep}

[task]
name = "sort"
options = {{ length = 4, partial = 0.5 }}

[sampling]
max_new_tokens = 8
samples_per_prompt = 16

[trainer]
learning_rate = 1e-4
supervised_steps = 20
row_tokens = 64
rows_per_micro_batch = 64

[coordinator]
groups_per_step = {groups}
prompts_per_lease = {prompts}
eval_every = 1000
eval_prompts = 8
eval_samples = 1
retry_s = 0.05
stale = "wait"
max_open_leases = 4

[local]
relays = 1
workers = 1
validators = 1
max_rows = 256
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Median times of a step, in seconds."""

    step_s: float
    wait_s: float
    train_s: float

    @property
    def bound(self) -> float:
        return (self.wait_s + self.train_s) / max(self.wait_s, self.train_s)


def pin(folder: Path) -> None:
    """Pins the trainer and the worker to one core each, and the other roles to the remaining cores."""
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[2:]) or set(cores)
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # the process has ended
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
            if not any(str(folder).encode() in word for word in words):
                continue
            place = (
                {cores[0]}
                if b"trainer" in words
                else {cores[min(1, len(cores) - 1)]}
                if b"worker" in words
                else others
            )
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), place)


def steps_of(metrics: Path) -> list[dict[str, float]]:
    if not metrics.exists():
        return []
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["event"] == "step"]


def run(options: argparse.Namespace, lag: int, groups: int, folder: Path) -> Pace:
    last = options.steps + FIRST
    file = folder / f"lag-{lag}.toml"
    file.write_text(
        RUN_FILE.format(last=last, lag=lag, keep=max(5, lag + 2), groups=groups, prompts=options.prompts)
    )
    out = folder / f"lag-{lag}"
    command = [sys.executable, "-m", "shoal", "run", str(file), "--dir", str(out)]
    with (folder / f"lag-{lag}.log").open("w") as log:
        swarm = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + options.minutes * 60
        while swarm.poll() is None:
            if time.monotonic() > deadline_s:
                swarm.send_signal(signal.SIGINT)
                swarm.wait(60)
                sys.exit(f"lag {lag} did not finish within {options.minutes} minutes; raise --minutes")
            pin(out)
            time.sleep(1.0)
    steps = steps_of(out / "trainer" / "metrics.jsonl")
    if len(steps) < last:
        sys.exit(
            f"lag {lag} ended after {len(steps)} of {last} steps:\n"
            + (folder / f"lag-{lag}.log").read_text()[-2000:]
        )
    between = [b["time_s"] - a["time_s"] for a, b in zip(steps[FIRST - 1 :], steps[FIRST:], strict=False)]
    return Pace(
        step_s=median(between),
        wait_s=median(step["wait_s"] for step in steps[FIRST:]),
        train_s=median(step["train_s"] for step in steps[FIRST:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[32], help="groups per step; one table for each"
    )
    parser.add_argument("--prompts", type=int, default=8, help="to a lease")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0, help="of a run at most")
    options = parser.parse_args()
    if options.lags[0] != 0:
        parser.error(
            f"--lags begins with {options.lags[0]}; it must begin with 0, because the others are compared with it"
        )
    for groups in options.groups:
        print(
            f"{groups} groups x 16 samples per step\nlag   step s   wait s   train s   pace   (w + t) / max"
        )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            paces: list[Pace] = []
            for lag in options.lags:
                paces.append(run(options, lag, groups, Path(folder)))
                pace, first = paces[-1], paces[0]
                print(
                    f"{lag:>3}   {pace.step_s:6.2f}   {pace.wait_s:6.2f}   {pace.train_s:7.2f}"
                    f"   {first.step_s / pace.step_s:4.2f}   {first.bound:4.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
