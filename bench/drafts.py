"""Measures what drafts are worth: how many are right, and tokens per second with and without, on the same rows in one run.

    python bench/drafts.py smollm2-135m --draft lookup --rows 1 4 8 --cap 64
    python bench/drafts.py smollm2-135m --draft first-layers --rows 1 4 8 --cap 64
    python bench/drafts.py qwen-1.5b --draft qwen-0.5b --rows 8 --dtype bfloat16

Two kinds of prompts: `copy` asks to repeat a paragraph, `math` has word problems. `first-layers` is the model's own first half,
which was not trained to be a model: its drafts are a lower bound. One engine does both, in turns; on a CPU, seconds are those of
the processor, so that other programs do not count. Raises an error if a row differs in any bit.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from shoal.model.builtin import create_model
from shoal.model.weights import WEIGHTS_FILE
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.wire.run_spec import ProofSpec

PARAGRAPH = (
    "The ferry leaves the north pier at half past six. It carries forty cars, two lorries and the post. On the way it stops at the "
    "lighthouse, where the keeper hands over a bag of letters, and it reaches the island before eight."
)
PROMPTS = {
    "copy": [
        f"Repeat this text {times} times, word for word: {PARAGRAPH}"
        for times in ("two", "three", "four", "five")
    ],
    "math": [
        f"{problem} Explain each step."
        for problem in (
            "A baker fills 6 trays with 12 rolls each and sells all but 5. How many rolls were sold?",
            "Lena reads 18 pages a day for a week and twice as many on Sunday. How many pages does she read in all?",
            "A bus leaves with 34 people. At the first stop 9 get off and 14 get on. How many people are on the bus now?",
            "Three friends share 87 marbles equally, and one of them then loses 11. How many marbles does he have left?",
            "A farmer sells 25 eggs for 0.40 each and buys feed for 3.50. How much money does he keep?",
            "A tank holds 240 litres and loses 15 litres an hour. After how many hours is it half empty?",
            "Tom is 4 years older than Ann, and together they are 30. How old is Ann?",
            "A train travels 90 km in the first hour and two thirds of that in the second. How far has it travelled?",
        )
    ],
}


def write_first_layers(source: Path, target: Path) -> None:
    """Writes a model of the first half of the layers."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] //= 2
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / WEIGHTS_FILE)
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < config["num_hidden_layers"]
    }
    save_file(kept, target / WEIGHTS_FILE, metadata={"format": "pt"})


def make_requests(
    engine: TorchEngine, kind: str, num: int, options: argparse.Namespace
) -> list[GenerationRequest]:
    prompts = [tuple(engine.tokenizer.encode_prompt(prompt, chat=True)) for prompt in PROMPTS[kind]]
    return [
        GenerationRequest(
            prompt_index=at % len(prompts),
            sample_index=at // len(prompts),
            prompt_tokens=prompts[at % len(prompts)],
            sample_seed=at,
            max_new_tokens=options.cap,
            temperature=options.temperature,
        )
        for at in range(num)
    ]


class Measured(NamedTuple):
    rows: dict[GenerationRequest, FinishedRow]
    tokens_per_s: float
    proposed: int
    accepted: int
    verifications: int


def measure(engine: TorchEngine, rows: list[GenerationRequest], max_rows: int) -> Measured:
    """Generates rows with drafts while at most `max_rows` run; 0: without drafts."""
    drafting = engine._drafting
    assert drafting is not None
    drafting.max_rows, before = max_rows, replace(drafting.counts)
    clock = time.process_time if engine._device.type == "cpu" else time.perf_counter
    engine.submit(rows)
    found: dict[GenerationRequest, FinishedRow] = {}
    begin = clock()
    while engine.has_work:
        found |= {row.request: row for row in engine.step()}
    speed = sum(len(row.output_tokens) for row in found.values()) / (clock() - begin)
    counts = drafting.counts
    return Measured(
        found,
        speed,
        counts.proposed - before.proposed,
        counts.accepted - before.accepted,
        counts.steps - before.steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a built-in model or a folder")
    parser.add_argument("--draft", default="lookup", help="lookup, first-layers or a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", choices=tuple(PROMPTS), nargs="+", default=tuple(PROMPTS))
    parser.add_argument("--cap", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model)
        if not folder.is_dir():
            folder = Path(scratch) / "model"
            create_model(options.model, folder, 0)
        source = options.draft
        if source == "first-layers":
            source = str(Path(scratch) / "half")
            write_first_layers(folder, Path(source))
        common: dict[str, Any] = {
            "compute_dtype": options.dtype,
            "proof": ProofSpec(),
            "max_rows": 64,
            "device": options.device,
        }
        engine = TorchEngine(**common, draft=DraftSettings(source=source, rows=max(options.rows)))
        engine.load(folder, 0)
        for rows in (0, max(options.rows)):  # compiles, and captures the graphs of the most rows
            measure(engine, make_requests(engine, "math", max(options.rows), options), rows)
        print(
            "| prompts | rows | tokens | drafts right | tokens per verification | tok/s without | tok/s with | ratio |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for kind in options.prompts:
            for num in options.rows:
                requests = make_requests(engine, kind, num, options)
                plain, drafted = measure(engine, requests, 0), measure(engine, requests, num)
                if drafted.rows != plain.rows:
                    raise SystemExit(f"{kind}, {num} rows: drafts changed a row")
                tokens = sum(len(row.output_tokens) for row in plain.rows.values())
                right = drafted.accepted / max(1, drafted.proposed)
                each = 1 + drafted.accepted / max(1, drafted.verifications)
                print(
                    f"| {kind} | {num} | {tokens} | {right:.0%} | {each:.2f} | {plain.tokens_per_s:.1f} "
                    f"| {drafted.tokens_per_s:.1f} | {drafted.tokens_per_s / plain.tokens_per_s:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
