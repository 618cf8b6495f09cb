"""A run whose model folder contains code and whose task is programs, and a stranger who sends programs that sleep.

No code of the folder runs anywhere. The sleeping programs are refused by their proofs, before anything is graded, and honest
submissions behind them get their verdicts.
"""

import dataclasses
import json
import time
from pathlib import Path
from random import Random

import pytest
import torch
from liar_client import Liar, Made
from model_folders import write_model
from swarm_processes import Swarm

from planted_code import plant_code
from shoal.toploc.field import PRIME
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease
from shoal.wire.rollouts import Finish, Rollout, encode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SLEEPS = "```python\nimport time\ntime.sleep(99)\n```"


def write_problems(path: Path) -> None:
    cases = [{"type": "stdin_stdout", "input": "2\n", "output": "4\n"}]
    info = json.dumps({"language": "python", "test_cases": cases})
    rows = [
        {
            "problem_id": f"p{n}",
            "task_type": "verifiable_code",
            "prompt": f"Double it, {n}.",
            "verification_info": info,
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sleeping_file(node: Liar, lease: Lease) -> Made:
    """Returns a file of the right form, made without the model, whose every answer is a program that sleeps."""
    honest, rng = node.work(lease), Random(0)
    output = (*node.tokenizer(lease).encode_prompt(SLEEPS, chat=False), min(node.tokenizer(lease).end_tokens))
    segments = -(-(len(output) - 1) // lease.proof.segment_tokens)
    words = [
        word
        for _ in range(segments)
        for word in (PRIME, *(rng.randrange(PRIME) for _ in range(lease.proof.topk)))
    ]

    def asleep(row: Rollout) -> Rollout:
        return dataclasses.replace(
            row,
            output_tokens=output,
            logprobs=(-0.5,) * len(output),
            finish=Finish.EOS,
            proof=b"".join(word.to_bytes(2, "big") for word in words),
        )

    table = dataclasses.replace(honest, rows=tuple(asleep(row) for row in honest.rows))
    return Made(encode(table), table.policy_version)


def test_neither_code_in_the_folder_nor_sleeping_programs(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    mark = tmp_path / "ran"
    swarm = Swarm(
        tmp_path,
        last_version=2,
        relays=1,
        workers=1,
        deadline_s=300.0,
        settings={
            "model": str(tmp_path / "model"),
            "max_new_tokens": 64,
            "supervised_steps": 0,
            "row_tokens": 192,
        },
    )
    write_model(tmp_path / "model")
    plant_code(tmp_path / "model", mark)
    write_problems(tmp_path / "problems.jsonl")
    text = swarm.file.read_text().replace('name = "sort"', 'name = "genesys"')
    swarm.file.write_text(text.replace("{ length = 4, partial = 0.5 }", '{ path = "problems.jsonl" }'))
    with swarm:
        swarm.wait_for_version(0, deadline_s=120.0)
        liar, honest = Liar(swarm.url, tmp_path / "liar"), Liar(swarm.url, tmp_path / "honest")
        began_s = time.monotonic()
        assert liar.deliver(lambda lease: sleeping_file(liar, lease)).code == "reject.wrong_computation"
        assert time.monotonic() - began_s < 60, "one program alone sleeps for 99 s"
        table = honest.deliver(honest.made)
        assert table.code == ACCEPTED
        liar.close()
        honest.close()
    assert not mark.exists(), "code of the model's folder ran"
