"""Each reason for a skipped file alerts, or the runbook says why it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deploy.prometheus.shipped import RULES

from rankscope_exporter.ranks.collectors.ranks import SKIP_REASONS

ROOT = Path(__file__).parents[2]
RULE = RULES.read_text().partition("alert: RankscopeRanksHidden")[2]
ALERTING = set(re.findall(r'reason=~"([a-z_|]+)"', RULE)[0].split("|"))
RUNBOOK = (ROOT / "docs/runbooks/RankscopeRanksHidden.md").read_text()
HIDES_A_RANK, _, HIDES_NONE = RUNBOOK.partition("do not alert")


def test_the_alert_names_only_reasons_that_exist() -> None:
    assert set(SKIP_REASONS) >= ALERTING


@pytest.mark.parametrize("reason", SKIP_REASONS)
def test_the_runbook_has_each_reason_with_a_fix_or_why_it_does_not_alert(reason: str) -> None:
    page = HIDES_A_RANK if reason in ALERTING else HIDES_NONE
    assert f"\n- `{reason}`: " in page
