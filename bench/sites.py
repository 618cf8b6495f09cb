"""Compares two whole swarms whose trainers merge every H updates with one swarm that has as many rollouts.

    python bench/sites.py --versions 60 --inner-steps 5 --dir /tmp/sites

Needs the extra `hivemind`. Each site is one `shoal run` (coordinator, trainer, relay, validator, worker) with half the groups
a step; the trainers find each other through `shoal diloco swarm`. The single site has all the groups. Prints held-out
rewards, the cost of the merges, and whether both sites had the same state after each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHOAL = [sys.executable, "-m", "shoal"]

RUN_FILE = """
[run]
name = "sites"
model = "tiny"
last_version = {versions}
[task]
name = "sort"
options = {{ length = 4, partial = 0.5 }}
[sampling]
max_new_tokens = 8
samples_per_prompt = 16
[trainer]
learning_rate = 5e-4
supervised_steps = 25
row_tokens = 64
rows_per_micro_batch = 64
{diloco}
[coordinator]
groups_per_step = {groups}
prompts_per_lease = 8
lease_s = 240.0
eval_every = {eval_every}
eval_prompts = 128
eval_samples = 4
[local]
relays = 1
workers = 1
"""

DILOCO = """
[trainer.diloco]
inner_steps = {inner_steps}
codec = "{codec}"
outer_lr = {outer_lr}
outer_momentum = {outer_momentum}
deadline_s = 300.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--inner-steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16, help="groups a step, over all sites")
    parser.add_argument("--codec", default="fp16-scaled")
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.3)
    parser.add_argument("--sites", type=int, choices=[1, 2], help="run only this half of the comparison")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.sites != 1:
        two_sites(options)
    if options.sites != 2:
        one_site(options)


def write_file(options: argparse.Namespace, name: str, groups: int, diloco: str) -> Path:
    path: Path = options.dir / f"{name}.toml"
    text = RUN_FILE.format(
        versions=options.versions, groups=groups, diloco=diloco, eval_every=max(1, options.versions // 4)
    )
    path.write_text(text)
    return path


def start(name: str, arguments: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.txt").open("w") as output:
        return subprocess.Popen(
            [*SHOAL, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def two_sites(options: argparse.Namespace) -> None:
    diloco = DILOCO.format(
        inner_steps=options.inner_steps,
        codec=options.codec,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
    )
    path = write_file(options, "two", options.groups // 2, diloco)
    swarm = start(
        "rendezvous", ["diloco", "swarm", "--dir", str(options.dir / "swarm"), "--port", "0"], options.dir
    )
    try:
        address = wait_for_address(options.dir / "rendezvous.txt")
        started_s = time.monotonic()
        sites = [
            start(
                f"site-{at}",
                ["run", str(path), "--dir", str(options.dir / f"site-{at}"), "--peer-join", address],
                options.dir,
            )
            for at in range(2)
        ]
        codes = [site.wait(options.timeout_s) for site in sites]
    finally:
        swarm.terminate()
        swarm.wait(30)
    print(f"two sites, {options.groups // 2} groups a step each, merged every {options.inner_steps} updates:")
    print(f"  exit codes {codes}, {time.monotonic() - started_s:.0f} s")
    merges = [lines_of(options.dir / f"site-{at}", "merge") for at in range(2)]
    for at in range(2):
        show_rewards(options.dir / f"site-{at}", f"site {at}")
    states = [{line["round"]: line["state"] for line in each} for each in merges]
    shared = states[0].keys() & states[1].keys()
    equal = sum(states[0][round] == states[1][round] for round in shared)
    outcomes = [line["outcome"] for each in merges for line in each]
    sent = sum(line["sent_bytes"] for line in merges[0])
    print(
        f"  {len(merges[0])} and {len(merges[1])} merges, {outcomes.count('committed')} committed, "
        f"{outcomes.count('local')} alone, {outcomes.count('adopted')} adopted; "
        f"{equal} of {len(shared)} equal on both; {sent / 1e6:.1f} MB sent by a site",
        flush=True,
    )


def one_site(options: argparse.Namespace) -> None:
    path = write_file(options, "one", options.groups, "")
    started_s = time.monotonic()
    site = start("one", ["run", str(path), "--dir", str(options.dir / "one")], options.dir)
    code = site.wait(options.timeout_s)
    print(f"one site, {options.groups} groups a step: exit code {code}, {time.monotonic() - started_s:.0f} s")
    show_rewards(options.dir / "one", "one site")


def wait_for_address(path: Path) -> str:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.startswith("join: "):
                return line.split()[1]
        time.sleep(0.2)
    raise TimeoutError(f"no rendezvous address after 120 s; see {path}")


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "trainer" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if kind in (line.get("event"), line.get("kind"))]


def show_rewards(folder: Path, name: str) -> None:
    output = (folder.parent / f"{folder.name}.txt").read_text().splitlines()
    held_out = [line.strip() for line in output if "held-out reward" in line]
    print(f"  {name}: " + "\n    ".join(held_out))


if __name__ == "__main__":
    main()
