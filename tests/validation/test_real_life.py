"""The cases of real life name existing tests, and one holds only if its tests ran and none failed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from validation.real_life import CASES, ROOT, Case, Outcomes, rows

CASE = next(iter(CASES.values()))[0]


def ended(*outcomes: str, when: str = "call") -> Outcomes:
    found = Outcomes()
    for number, outcome in enumerate(outcomes):
        test: Any = SimpleNamespace(when=when, outcome=outcome, nodeid=f"{CASE.node}[{number}]")
        found.pytest_runtest_logreport(test)
    return found


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=lambda case: case.seen)
def test_a_case_names_an_existing_test(case: Case) -> None:
    text = (ROOT / "tests" / f"{case.file}.py").read_text()
    assert re.search(rf"^ *def {case.function or 'test_'}", text, re.M)


@pytest.mark.parametrize(
    ("outcomes", "held"),
    [
        (ended("passed", "passed"), "yes"),
        (ended("passed", "failed"), "**NO**"),
        (ended("failed", when="setup"), "**NO**"),
        (ended("skipped"), "**NO**"),
        (ended(), "**NO**"),
    ],
)
def test_a_case_holds_if_tests_passed_and_none_failed(outcomes: Outcomes, held: str) -> None:
    assert rows(outcomes)[0][2] == held
