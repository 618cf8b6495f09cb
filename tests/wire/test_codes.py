"""Refusal codes: each is explained and has an HTTP status of the right kind."""

import re

import pytest

from shoal.wire.codes import ACCEPTED, CODES, CorruptData, Rejected, explain_code


def test_every_code_is_well_formed_and_explained() -> None:
    for code, entry in CODES.items():
        assert re.fullmatch(r"(request|reject|void)\.[a-z_]+", code), code
        assert entry.meaning and entry.remedy, code
        # Only a refused request is an HTTP error: verdicts are data.
        assert (400 <= entry.status <= 503) == code.startswith("request."), code
        assert (entry.status == 0) == (not code.startswith("request.")), code


def test_accepted_is_not_a_refusal() -> None:
    assert ACCEPTED not in CODES


def test_rejected_carries_code_detail_and_retry() -> None:
    rejected = Rejected("request.too_early", "version 3 is not announced", retry_after_s=1.5)
    assert (rejected.code, rejected.detail, rejected.retry_after_s) == (
        "request.too_early",
        "version 3 is not announced",
        1.5,
    )
    assert str(rejected) == "request.too_early: version 3 is not announced"


def test_corrupt_data_is_not_a_refused_request() -> None:
    error = CorruptData("ledger event 3 was changed")
    assert (str(error), error.detail) == ("ledger event 3 was changed", "ledger event 3 was changed")
    assert not isinstance(error, Rejected)


def test_an_undefined_code_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="unknown refusal code"):
        Rejected("reject.looks_funny", "no")


def test_explain_code() -> None:
    assert explain_code("reject.early_stop") == "an answer ends where the model would not have ended it"
    assert explain_code("accepted") == "accepted"
