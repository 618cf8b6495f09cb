"""`shoal rollouts`: prints or exports a run's answers, with rewards, log-probs and verdicts."""

import argparse
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_reader import open_reader
from shoal.files import write_atomically
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.leases.transcripts import RolloutQuery
from shoal.telemetry import printable
from shoal.wire.page_data import RolloutGroup, RolloutPage
from shoal.wire.transcript import SampleText

PAGE_GROUPS = 32
GROUPS_AT_ONCE = 256
"""Groups of an export that are in memory at the same time."""
Read = Callable[[RolloutQuery], RolloutPage]
TOKEN_STYLES = (
    (0.9, ""),
    (0.5, "on grey19"),
    (0.2, "on dark_goldenrod"),
    (0.05, "on dark_orange3"),
    (0.0, "on red3"),
)
"""Background colours of tokens, each with the lowest probability that it is used for."""


def rollouts(options: argparse.Namespace, stop: threading.Event) -> int:
    query = RolloutQuery(
        held_out=options.held_out,
        task=options.task,
        version=options.version,
        node=options.node,
        reward=options.reward,
        search=options.search,
    )
    limit = options.limit or (None if options.export or options.json else 4)
    with open_reader(options.run, options.database) as reader:
        found = find_groups(reader.rollouts, query, limit, stop)
        if options.export:
            if options.export.suffix in (".csv", ".tsv", ".json", ".jsonl"):
                raise ValueError(
                    f"--export {options.export}: it writes Parquet; name it *.parquet, or use --json"
                )
            return export(found, options.export)
        shown = 0
        for group in found:
            shown += 1
            if options.json:
                print(group.model_dump_json())
            else:
                print_group(group)
        if not shown:
            print(explain_no_match(reader.rollouts, query), file=sys.stderr)
    return EXIT_OK


def explain_no_match(read: Read, query: RolloutQuery) -> str:
    """Returns why nothing was printed, with the newest rollout that the run has."""
    newest = read(RolloutQuery(held_out=query.held_out, limit=1)).groups
    if not newest:
        kind = "to held-out problems " if query.held_out else ""
        return f"the run has no checked answers {kind}yet, or does not keep them (coordinator.rollouts_mb)"
    found = newest[0]
    return (
        f"no rollouts match. The newest one has version {found.policy_version}, task {printable(found.task)}, worker "
        f"{printable(found.node[:8])}; loosen the filters. Older versions may have been deleted (coordinator.rollouts_mb)"
    )


def find_groups(
    read: Read, query: RolloutQuery, limit: int | None, stop: threading.Event
) -> Iterator[RolloutGroup]:
    """Yields the groups that match, newest first. Raises ValueError if they are not public yet, Stopped if `stop` is set."""
    left = limit
    while left is None or left > 0:
        if stop.is_set():
            raise Stopped("stopped while rollouts were read")
        page = read(replace(query, limit=min(PAGE_GROUPS, left or PAGE_GROUPS)))
        if page.withheld:
            raise ValueError(page.withheld)
        groups = page.groups if left is None else page.groups[:left]
        yield from groups
        left = None if left is None else left - len(groups)
        if page.next is None:
            return
        query = replace(query, before=page.next)


# -- the terminal -------------------------------------------------------------------------------------------


def print_group(group: RolloutGroup) -> None:
    console = Console(highlight=False)
    mean = sum(sample.reward for sample in group.samples) / max(1, len(group.samples))
    kind = "held-out" if group.held_out else escape(printable(group.state))
    worker = escape(printable(group.node[:8]))
    console.print(
        f"[bold]version {group.policy_version}[/bold]  {escape(printable(group.task))}  worker {worker}  {kind}  "
        f"mean reward {mean:.3f}"
    )
    console.print(Text(printable(group.prompt, keep="\n\t"), style="cyan"))
    if group.expected:
        expected = printable(group.expected, keep="\n\t")
        console.print(Text(f"expected: {expected}", style="dim"))
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("reward", "tokens", "answer"):
        table.add_column(name, justify="left" if name == "answer" else "right", overflow="fold")
    for sample in group.samples:
        length = f"{sample.num_tokens}{'' if sample.ended else ' cut'}"
        table.add_row(f"{sample.reward:.3g}", length, colour_tokens(sample))
        if sample.judgement:
            table.add_row("", "", Text(printable(f"judge: {sample.judgement}", keep="\n\t"), style="dim"))
    console.print(table)
    console.print(Text(printable(f"{group.code}: {why_believed(group)}"), style="dim"), "")


def colour_tokens(sample: SampleText) -> Text:
    """Returns the answer with the background of each token by its probability."""
    text = Text()
    for place, (piece, logprob) in enumerate(zip(sample.pieces, sample.logprobs, strict=True)):
        if sample.cut_at and place == sample.cut_at:
            text.append(f" ... {sample.num_tokens - len(sample.pieces)} tokens not shown ... ", "dim")
        chance = math.exp(min(0.0, logprob))
        text.append(
            printable(piece, keep="\n\t"), next(style for least, style in TOKEN_STYLES if chance >= least)
        )
    return text


def why_believed(group: RolloutGroup) -> str:
    """Returns the numbers behind the verdict in a few words."""
    scores = {
        name: value
        for name, value in group.evidence.items()
        if name.startswith("z_") and not isinstance(value, str)
    }
    words = ["every check" if group.checks == "full" else "graded, proofs not drawn for a check"]
    if "exponent_mismatches_max" in group.evidence:
        most = group.evidence["exponent_mismatches_max"]
        words.append(f"at most {most} proof mismatches in a segment" if most else "no proof mismatch")
    words += [f"{name} {value:.2f}" for name, value in scores.items()]
    return ", ".join(words)


# -- a file -------------------------------------------------------------------------------------------------


def export(groups: Iterable[RolloutGroup], path: Path) -> int:
    """Writes one row for each answer, some groups at a time."""
    schema = pa.schema(
        [
            ("group_id", pa.string()),
            ("sample", pa.int32()),
            ("task", pa.string()),
            ("held_out", pa.bool_()),
            ("policy_version", pa.int64()),
            ("node", pa.string()),
            ("state", pa.string()),
            ("trained_version", pa.int64()),
            ("prompt", pa.string()),
            ("expected", pa.string()),
            ("answer", pa.string()),
            ("reward", pa.float64()),
            ("outcome", pa.string()),
            ("judgement", pa.string()),
            ("num_tokens", pa.int64()),
            ("ended", pa.bool_()),
            ("pieces", pa.list_(pa.string())),
            ("logprobs", pa.list_(pa.float32())),
            ("code", pa.string()),
            ("checks", pa.string()),
            ("given_at_s", pa.float64()),
        ]
    )
    num_groups = num_rows = 0
    with write_atomically(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        left = iter(groups)
        while some := list(islice(left, GROUPS_AT_ONCE)):
            rows = [_to_row(one, place, sample) for one in some for place, sample in enumerate(one.samples)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            num_groups, num_rows = num_groups + len(some), num_rows + len(rows)
    print(f"{path}: {num_rows} answers in {num_groups} groups")
    return EXIT_OK


def _to_row(group: RolloutGroup, place: int, sample: SampleText) -> dict[str, Any]:
    own = group.model_dump(exclude={"samples", "evidence", "detail"})
    values = sample.model_dump(exclude={"cut_at"})
    return own | values | {"sample": place, "answer": "".join(sample.pieces)}
