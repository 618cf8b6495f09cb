"""`shoal arena`: which lies each verification scheme detects, in one table. docs/arena.md explains it.

The table has a line per lie and a column per scheme. The raw scores of every submission go to a JSON file.
"""

import argparse
import json
import math
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.cli.arena.contest import (
    PROMPTS,
    RATES,
    REDRAWN,
    SIZES,
    Arena,
    ArenaSettings,
    KindTables,
    limits,
    tokens_needed,
)
from shoal.cli.arena.schemes import Scheme
from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import use_device, wilson
from shoal.files import write_bytes_atomically
from shoal.rollout.engine.api import Behaviour

NAME_WIDTH, CELL_WIDTH = 24, 17


def arena(options: argparse.Namespace, stop: threading.Event) -> int:
    use_device(options)
    began_s = time.monotonic()
    settings = ArenaSettings(
        model=options.model,
        task=options.task,
        dtype=options.dtype,
        device=options.device,
        new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        honest=options.honest,
        lies=options.submissions,
        max_rows=options.max_rows,
        seed=options.seed,
    )
    with model_folder(options.model) as folder, torch.inference_mode():
        contest = Arena(settings, folder, stop)
        chosen = _chosen_lies(contest, options.lies)
        with progress("calibrating"):
            contest.calibrate()
        ways = contest.ways()
        honest, fresh = {}, {}
        with progress("ways of honest work", len(ways)) as advance:
            for way in ways:
                honest[way.name] = contest.honest(way, -(-settings.honest // len(ways)))
                fresh[way.name] = contest.honest(way, -(-settings.honest // len(ways) // 2))
                advance(1)
        leases = contest.leases(settings.lies)
        sent = contest.work(Behaviour(), contest.engine(Behaviour()), leases)
        lies: dict[str, KindTables] = {}
        with progress("lies", len(chosen)) as advance:
            for name, make in chosen.items():
                lies[name] = contest.lie(name, make, leases, sent)
                advance(1)
        with progress("detection"):
            results = find_results(contest, honest, fresh, lies)
    results["seconds"] = round(time.monotonic() - began_s, 1)
    results["settings"] = vars(settings) | {
        "machine": f"{platform.machine()} {settings.device}, torch {torch.__version__}"
    }
    print_table(results)
    if options.out:
        write_bytes_atomically(options.out, f"{json.dumps(results, indent=1)}\n".encode())
        print(f"raw scores: {options.out}")
    return 0


def _chosen_lies(contest: Arena, wanted: Sequence[str] | None) -> dict[str, Any]:
    known = contest.lies()
    if unknown := sorted(set(wanted or ()) - known.keys()):
        raise ValueError(f"unknown lie {unknown[0]!r}; known: {', '.join(known)}")
    return {name: make for name, make in known.items() if wanted is None or name in wanted}


def find_results(
    contest: Arena,
    honest: Mapping[str, KindTables],
    fresh: Mapping[str, KindTables],
    lies: Mapping[str, KindTables],
) -> dict[str, Any]:
    """Returns limits, false alarms on fresh rows, detection and costs, ready for JSON."""
    tokens = max(1, contest.timed_tokens)
    found: dict[str, Any] = {
        "us_per_token": {
            "generate": 1e6 * contest.seconds["generate"] / tokens,
            "forward": 1e6 * contest.seconds["forward"] / tokens,
        },
        "honest_submissions": sum(one.submissions for one in honest.values()),
        "fresh_submissions": sum(one.submissions for one in fresh.values()),
        "tokens_of_a_submission": sum(one.tokens for one in honest.values())
        / sum(one.submissions for one in honest.values()),
        "lies": {
            name: {
                "submissions": one.submissions,
                "untold": one.untold,
                "tokens": one.tokens,
                "refused_by_reading": dict(one.read),
            }
            for name, one in lies.items()
        },
        "schemes": {},
    }
    for scheme in contest.schemes:
        limit = limits(scheme, honest, PROMPTS, REDRAWN)
        by_size = {size: limits(scheme, honest, size, REDRAWN // 10)[RATES[0]] for size in SIZES}
        alarms = [one.scores(scheme) for one in fresh.values()]
        found["schemes"][scheme.name] = {
            "source": scheme.source,
            "own_limit": scheme.has_limit,
            "bytes_per_token": scheme.bytes_per_token,
            "prover_us_per_token": 1e6 * contest.seconds[f"{scheme.measured_as} prover"] / tokens,
            "verifier_us_per_token": 1e6 * contest.seconds[f"{scheme.measured_as} verifier"] / tokens,
            "limits": {f"{rate:g}": limit[rate] for rate in RATES},
            "false_alarms": {
                f"{rate:g}": [int((one > limit[rate]).sum()) for one in alarms] for rate in RATES
            },
            "honest_scores": {name: one.scores(scheme).tolist() for name, one in honest.items()},
            "fresh_scores": {name: one.scores(scheme).tolist() for name, one in fresh.items()},
            "lies": {
                name: detection(scheme, one, limit, by_size)
                for name, one in lies.items()
                if scheme.measured_as in one.tables or one.read
            },
        }
    return found


def detection(
    scheme: Scheme,
    lie: KindTables,
    limit: Mapping[float, float],
    by_size: Mapping[int, float],
) -> dict[str, Any]:
    """Returns how often a scheme detects a lie, with 95 % intervals, and the tokens that it needs."""
    scores, read = lie.scores(scheme), sum(lie.read.values())
    count = len(scores) + read
    shares = {rate: (int((scores > limit[rate]).sum()) + read) / count for rate in RATES}
    return {
        "scores": scores.tolist(),
        "detected": {f"{rate:g}": shares[rate] for rate in RATES},
        "interval": {f"{rate:g}": wilson(shares[rate], count) for rate in RATES},
        "tokens": None if read else tokens_needed(scheme, lie, by_size),
    }


def print_table(results: Mapping[str, Any]) -> None:
    """Prints one line per lie: detection in % at both rates of false alarms, and the tokens needed for 99.9 %."""
    settings, schemes = results["settings"], results["schemes"]
    print(
        f"{settings['model']}, {settings['dtype']}, {settings['machine']}. A submission has 16 rows, "
        f"{results['tokens_of_a_submission']:.0f} tokens. Each cell: detected % at 1 false alarm in 1,000 and in 10,000 "
        "honest submissions,\ntokens needed to detect 99.9 % (at 1 in 1,000; - if none of the tried sizes is enough). "
        "'read': reading the file shows it. * limit of the scheme itself."
    )
    titles = [f"{name}*" if one["own_limit"] else name for name, one in schemes.items()]
    _print_line("", "told", titles)
    for name, lie in results["lies"].items():
        _print_line(name, lie["submissions"], [_cell(lie, one["lies"].get(name)) for one in schemes.values()])
    rows: dict[str, Callable[[Any], str]] = {
        "false alarms, fresh": lambda one: " ".join(str(sum(v)) for v in one["false_alarms"].values()),
        "bytes per token": lambda one: f"{one['bytes_per_token']:.1f}",
        "prover, µs per token": lambda one: f"{one['prover_us_per_token']:.1f}",
        "verifier, µs per token": lambda one: f"{one['verifier_us_per_token']:.1f}",
    }
    for title, value in rows.items():
        _print_line(title, "", [value(one) for one in schemes.values()])
    cost = results["us_per_token"]
    print(
        f"limits from {results['honest_submissions']:,} honest submissions (resampled by prompt), false alarms of "
        f"{results['fresh_submissions']:,} fresh ones. Every verifier also needs one forward pass, {cost['forward']:.0f} µs per token; "
        f"generating takes {cost['generate']:.0f}. {results['seconds']:.0f} s in all."
    )


def _print_line(title: str, told: object, cells: Sequence[str]) -> None:
    print(f"{title:<{NAME_WIDTH}}{told:>6}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells))


def _cell(lie: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    if not lie["submissions"]:
        return "not told"
    if lie["refused_by_reading"] and sum(lie["refused_by_reading"].values()) == lie["submissions"]:
        return "read"
    if found is None:
        return "n/a"
    # Rounded down, so that only 100 % reads 100.
    shares = " ".join(f"{math.floor(100 * share):>3}" for share in found["detected"].values())
    return f"{shares} {found['tokens'] or '-':>5}"
