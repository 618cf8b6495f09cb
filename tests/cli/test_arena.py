"""`shoal arena`: the schemes on known states, Shoal's decision against the validator's own code, and the command."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.cli.arena.contest import SAMPLES, Arena, ArenaSettings, KindTables, sent_states, told
from shoal.cli.arena.own_decision import BROKEN, ShoalVerdict, row_facts
from shoal.cli.arena.schemes import (
    MARGIN_CAP,
    ActivationDifr,
    CheckedRow,
    GrailSketch,
    Logic,
    LogprobGap,
    PublishedToploc,
    Scheme,
    TokenDifr,
    margins,
    verify,
)
from shoal.cli.main import main
from shoal.model.builtin import create_model
from shoal.rollout.adversary.adaptive import Adapted, PlainEngine
from shoal.rollout.engine.api import Behaviour
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.recompute import RowsToCheck
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Finish, Rollout

TOKENS, WIDTH = 40, 256


def a_row(states: torch.Tensor, logprobs: tuple[float, ...] | None = None) -> CheckedRow:
    """Returns a row whose every token has the interval from 0.25 to 0.75, with the uniform in its middle."""
    columns = np.tile(np.array([[np.log(0.5)], [0.25], [0.75], [0.7], [0.1], [0.5]]), (1, TOKENS))
    rollout = Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_tokens=(1, 2, 3),
        output_tokens=tuple(range(TOKENS)),
        logprobs=logprobs or tuple(columns[0]),
        finish=Finish.LENGTH,
        proof=b"",
    )
    return CheckedRow(rollout, states, columns)


def score(scheme: Scheme, row: CheckedRow, sent: torch.Tensor) -> float:
    table = scheme.measure([row], scheme.commit([sent]), [0])
    return float(scheme.score(table.sums_PA, table.largest_PB)[0])


@pytest.mark.parametrize("scheme", [PublishedToploc(), GrailSketch(), ActivationDifr()])
def test_a_scheme_of_states_scores_the_same_states_0_and_others_higher(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(3)
    states = (4 * torch.randn(TOKENS, WIDTH, generator=generator)).to(torch.bfloat16)
    other = (4 * torch.randn(TOKENS, WIDTH, generator=generator)).to(torch.bfloat16)
    row = a_row(states)
    assert score(scheme, row, states[1:]) == pytest.approx(0.0, abs=0.02)
    assert score(scheme, row, other[1:]) > 0.1
    assert score(PublishedToploc(), row, other[1:]) > 1


def test_a_scheme_of_tokens_scores_what_differs() -> None:
    row = a_row(torch.zeros(TOKENS, WIDTH))
    empty = torch.zeros(TOKENS - 1, WIDTH)
    assert (
        score(TokenDifr(), row, empty) == score(LogprobGap(), row, empty) == score(Logic(), row, empty) == 0
    )
    lower = a_row(torch.zeros(TOKENS, WIDTH), (-2.0,) * TOKENS)
    assert score(LogprobGap(), lower, empty) == pytest.approx(2.0 + np.log(0.5))
    assert score(Logic(), lower, empty) == pytest.approx(np.sqrt(TOKENS)), "the two samples do not overlap"
    outside = row.columns_6T.copy()
    outside[5, 0], outside[5, 1] = 0.76, 0.9999
    found = margins(outside)
    assert found[0] == pytest.approx(np.log(0.76 / 0.24) - np.log(3)) and found[1] == MARGIN_CAP
    assert not found[2:].any()


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    folder = tmp_path_factory.mktemp("arena") / "tiny"
    create_model("tiny", folder, 0)
    settings = ArenaSettings(model="tiny", new_tokens=12, calibrate_rows=208, lies=3)
    with torch.inference_mode():
        arena = Arena(settings, folder, threading.Event())
        arena.calibrate()
        yield arena


@pytest.mark.parametrize(
    "lie", [None, "int4-weights", "typical-proof", "other-seeds", "truncated", "wrong-logprobs", "edge-0.08"]
)
def test_the_score_of_the_own_decision_is_above_1_where_a_validator_refuses(
    arena: Arena, lie: str | None
) -> None:
    behaviour = Behaviour() if lie is None else arena.lies()[lie]()
    verdict = next(one for one in arena.schemes if isinstance(one, ShoalVerdict))
    leases = arena.leases(2)
    tables = arena.work(behaviour, arena.engine(behaviour), leases)
    for table, lease in zip(tables, leases, strict=True):
        measured = KindTables()
        rows = arena.check([RowsToCheck(table.rows, lease)])
        arena.add(measured, rows, forged=False, timed=False)
        assert measured.submissions == 1 and len(measured.tables["shoal"][0].sums_PA) == len(rows) // SAMPLES
        width = rows[0].states_TH.shape[1]
        proofs = verdict.commit([sent_states(row, width) for row in rows])
        checks = verify(rows, proofs, PublishedToploc.proof)
        facts = [row_facts(row, segments) for row, segments in zip(rows, checks, strict=True)]
        code = "accepted"
        try:
            fact_checks.check_facts(table.rows, facts, arena.tolerances, verdict.noise)
        except Rejected as rejected:
            code = rejected.code
        (found,) = measured.scores(verdict)
        assert (found > 1) == code.startswith("reject."), f"{lie}: score {found}, verdict {code}"
        assert (lie is None) == (found <= 1)
        z = fact_checks.score_facts(table.rows, facts, verdict.noise)
        surprise = abs(fact_checks.surprise_z(facts)) / fact_checks.MAX_SURPRISE
        largest = max(0.0, surprise, *(one.z / one.certain for one in z))
        assert found >= BROKEN or found == pytest.approx(largest)


def test_the_plain_engine_is_honest_and_a_lie_that_changes_nothing_is_not_told(arena: Arena) -> None:
    leases = arena.leases(2)
    honest = arena.work(Behaviour(), arena.engine(Behaviour()), leases)
    plain = Adapted(PlainEngine)
    tables = arena.work(plain, arena.engine(plain), leases)
    measured = KindTables()
    checked = [RowsToCheck(table.rows, lease) for table, lease in zip(tables, leases, strict=True)]
    arena.add(measured, arena.check(checked), forged=False, timed=False)
    verdict = next(one for one in arena.schemes if isinstance(one, ShoalVerdict))
    assert len(measured.scores(verdict)) == 2 and measured.scores(verdict).max() <= 1
    assert not told(honest[0], honest[0])
    untold = arena.lie("truncated", Behaviour, leases, honest)
    assert untold.untold == 2 and untold.submissions == 0
    truncated = arena.lie("truncated", arena.lies()["truncated"], leases, honest)
    assert truncated.submissions == 2 and truncated.untold == 0


@pytest.mark.integration
def test_the_command_prints_one_table_and_writes_every_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    few = ["--honest", "9", "--submissions", "2", "--max-new-tokens", "8", "--max-rows", "256"]
    lies = ["--lies", "int4-weights", "edited-prompt", "int8-cache"]
    assert main(["arena", *few, *lies, "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[3:6]] == ["int4-weights", "edited-prompt", "int8-cache"]
    assert printed[4].count("read") == 9
    results = json.loads(out.read_text())
    assert set(results["lies"]) == {"int4-weights", "edited-prompt", "int8-cache"}
    shoal = results["schemes"]["Shoal"]
    assert shoal["own_limit"] and shoal["lies"]["int4-weights"]["detected"]["0.001"] == 1.0
    assert shoal["lies"]["int4-weights"]["interval"]["0.001"][0] < 1.0
    assert len(shoal["lies"]["int4-weights"]["scores"]) == 2
    assert main(["arena", "--lies", "white-lie"]) == 2
