"""All other places that must name each phase of the table. For a new phase, the failing tests name the files."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankscope.record import layout
from rankscope.record.phases import COMPUTING, NAMES, PHASES
from rankscope_exporter.report.colors import PHASE_COLORS

ROOT = Path(__file__).resolve().parents[3]
# A rank's lag may be caused by any phase but planned ones, which have their own alert, and waiting for other ranks.
BLAMED = [phase.name for phase in PHASES if not phase.planned and phase.name != "collective_wait"]
# The phases that are a cause in rankscope_run_lost_ratio. It splits the others.
LOST_TO = [name for name in NAMES if name not in (*COMPUTING, "collective_wait", "data_wait", "h2d_copy")]


@pytest.mark.parametrize("phase", NAMES)
def test_the_layout_has_a_constant_for_each_phase(phase: str) -> None:
    assert getattr(layout, phase.upper()) == NAMES.index(phase)


def causes() -> Any:
    return yaml.safe_load((ROOT / "exporter/rankscope_exporter/diagnosis/causes.yml").read_text(encoding="utf-8"))


def test_each_phase_has_a_color() -> None:
    assert tuple(PHASE_COLORS) == NAMES


@pytest.mark.parametrize("phase", BLAMED)
def test_causes_yml_has_a_text_for_a_rank_that_lags_in_it(phase: str) -> None:
    assert phase in chain.from_iterable(
        cause.split("|") for cause in causes()["alerts"]["RankscopeRankLagging"]["causes"]
    )


@pytest.mark.parametrize("phase", BLAMED)
def test_the_runbook_has_advice_for_a_rank_that_lags_in_it(phase: str) -> None:
    runbook = (ROOT / "docs/runbooks/RankscopeRankLagging.md").read_text(encoding="utf-8")
    assert f"`{phase}`" in "".join(re.findall(r"^\*\*(.+?)\*\*", runbook, re.MULTILINE))


@pytest.mark.parametrize("phase", LOST_TO)
def test_the_page_on_lost_time_has_it_as_a_cause(phase: str) -> None:
    assert f"`{phase}`" in (ROOT / "docs/lost-time.md").read_text(encoding="utf-8")
