"""Each fault of the gauntlet as series, at both speeds: one alert, the right place and cause, and decoys are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rules import promtool
from tests.rules.diagnosis_cases import CASES, Case


@pytest.mark.parametrize("speed", [promtool.PRODUCTION, promtool.FAST], ids=lambda speed: speed.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_fault_is_named_with_its_place_and_cause_and_nothing_else_is(
    case: Case, speed: promtool.Speed, tmp_path: Path
) -> None:
    inputs = promtool.series(case.fault, speed, case.usual)
    assert not promtool.check(case.name, speed, inputs, case.alerts, tmp_path / "test.yml")
