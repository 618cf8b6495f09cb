"""Counts how many proofs made without any states pass the published rule, and how many pass with control points.

    python bench/forgery.py                                   # gaussian states
    python bench/forgery.py --model smollm2-135m --task add   # also states of a real model

constant: one likely value everywhere. table: each channel's mean magnitude over other states, with its most frequent sign.
A proof passes the published rule if a segment has at most 38 mismatches, mean 10 and median 8. Our rule also counts signs and
limits the hits of control points.
"""

import argparse
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal import toploc
from shoal.cli.commands.sample_answers import model_folder
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.tasks import make_task
from shoal.toploc import SegmentCheck
from shoal.toploc.field import PRIME
from shoal.toploc.segment_rules import allowed_hits
from shoal.wire.run_spec import TaskSpec, Tolerances

SEGMENT, TOPK = 32, 128
TOLERANCES = Tolerances(exponent_mismatches=38, mantissa_mean=10, mantissa_median=8)


def constant(states_TH: Tensor) -> bytes:
    """Returns a constant polynomial: the median of a segment's top-k values that have the most frequent exponent."""
    top = states_TH[:SEGMENT].flatten().abs().topk(TOPK).values.to(torch.bfloat16)
    exponents = top.view(torch.int16) >> 7
    likely = top[exponents == exponents.mode().values].float().median().to(torch.bfloat16)
    words = (PRIME, int(likely.view(torch.int16)) & 0xFFFF, *[0] * (TOPK - 1))
    segment = b"".join(word.to_bytes(2, "big") for word in words)
    return segment * -(-len(states_TH) // SEGMENT)


def table(others_TH: Tensor, num_states: int) -> bytes:
    typical_H = others_TH.abs().mean(0) * others_TH.sign().sum(0).sign()
    # Values decrease slightly from state to state, because ties would make the choice of points random.
    fading_T1 = torch.linspace(1.1, 1.0, SEGMENT).repeat(-(-num_states // SEGMENT))[:num_states, None]
    return toploc.build_proofs([typical_H * fading_T1])[0]


def published(check: SegmentCheck) -> bool:
    return check.exponent_mismatches <= 38 and check.mantissa_mean <= 10 and check.mantissa_median <= 8


def ours(check: SegmentCheck) -> bool:
    signs_too = check.exponent_mismatches + check.sign_mismatches <= 38
    return (
        published(check)
        and signs_too
        and not check.constant
        and check.control_hits <= allowed_hits(check, TOLERANCES)
    )


def report(name: str, states: Sequence[Tensor], others_TH: Tensor) -> None:
    proofs = {
        "honest": toploc.build_proofs(states),
        "constant": [constant(rows) for rows in states],
        "table": [table(others_TH, len(rows)) for rows in states],
    }
    for kind, made in proofs.items():
        checks = [c for row in toploc.verify_proofs(made, states, control_seed=1) for c in row]
        hits = sorted(check.control_hits for check in checks)
        shares = [sum(map(rule, checks)) / len(checks) for rule in (published, ours)]
        print(
            f"{name:<16} {kind:<9} {len(checks):>9,} {shares[0]:>10.1%} {shares[1]:>8.1%} "
            f"{hits[0]:>6} to {hits[-1]:<4}",
            flush=True,
        )


def model_states(options: argparse.Namespace) -> Iterator[Tensor]:
    """Returns the states of prompts of the task, one row each."""
    with model_folder(options.model) as folder:
        decoder, tokenizer = load_decoder(folder), load_tokenizer(folder)
    task = make_task(TaskSpec(name=options.task))
    for row in range(options.rows):
        text = " ".join(task.problem("train", row * 4 + part).prompt for part in range(4))
        tokens = torch.tensor([tokenizer.encode_prompt(text, chat=task.chat)])
        with torch.inference_mode():
            yield decoder(tokens, torch.arange(tokens.shape[1])[None])[0].to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 2048, 5120])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--model")
    parser.add_argument("--task", default="add")
    options = parser.parse_args()
    print(f"{'states':<16} {'proofs':<9} {'segments':>9} {'published':>10} {'ours':>8}   control hits of 128")
    for hidden in options.hidden:
        seed = int.from_bytes(hashlib.sha256(f"forgery/{hidden}".encode()).digest()[:4], "big")
        generator = torch.Generator().manual_seed(seed)
        rows = [
            torch.randn(4 * SEGMENT, hidden, generator=generator).to(torch.bfloat16)
            for _ in range(options.rows)
        ]
        report(f"gaussian {hidden}", rows, torch.randn(4 * SEGMENT, hidden, generator=generator))
    if options.model:
        rows = list(model_states(options))
        report(options.model, rows[1:], rows[0].float())


if __name__ == "__main__":
    main()
