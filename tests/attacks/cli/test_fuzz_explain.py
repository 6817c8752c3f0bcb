"""The attack: some thousands of answers to `rankscope explain` that are damaged in different ways."""

from __future__ import annotations

import math

import pytest
from validation.fuzz.explain import run
from validation.fuzz.fuzzing import FuzzError

from rankscope.cli.explaining import answers, command


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_no_damaged_answer_breaks_explain() -> None:
    outcome = run(seed=2, first=0, inputs=3000)
    assert outcome.total() == 3000
    # Some damage passes the checks. An input without damage does not count: 240 of 319 explained inputs once had none.
    assert outcome["explained"] + outcome["explained in JSON"] > 150
    assert outcome["not a Prometheus"] > 500


MISSING = {
    "nested brackets": (answers, "RecursionError", ZeroDivisionError),
    "labels that are needed": (answers, "_malformed_unless_all", lambda *_: None),
    "numbers": (answers, "LARGEST", math.inf),
    "printable text": (command, "printable", lambda text, _: text),
}


@pytest.mark.parametrize("check", MISSING)
def test_the_fuzzer_detects_a_missing_check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISSING[check], raising=False)
    with pytest.raises(FuzzError, match=r"seed 2, input \d+"):
        run(seed=2, first=0, inputs=20_000)
