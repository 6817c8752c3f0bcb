"""Attack: more than a hundred runs that crash, to hide another user's crash among their notifications."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import yaml
from deploy.prometheus import fast, shipped
from testing import servers
from testing.stack import Stack, wait_for
from testing.webhook import Notification
from tests.attacks.ranks.ranks_support import ended
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.diagnosis.judged import RUNS_LIMIT

pytestmark = needs_root
AT_ONCE, BATCHES = RUNS_LIMIT, 4
AT_MOST = 20
"""Notifications of one owner in an hour."""
WITHIN = 120.0  # seconds
NOTIFIED_AFTER = 10.0  # seconds: twice the shipped group_wait of a critical alert
ALONE = {"world_size": "1", "group": "0"}


def configurations(*, inhibits: bool) -> ModuleType:
    """Return fast rules and the shipped routes, with or without the inhibition by RankscopeManyAlerts."""

    def alertmanager_config(webhook_url: str) -> str:
        document = shipped.alertmanager_document(webhook_url)
        shipped_rules = document["inhibit_rules"]
        if not inhibits:
            rules = [rule for rule in shipped_rules if 'alertname="RankscopeManyAlerts"' not in rule["source_matchers"]]
            assert len(rules) == len(shipped_rules) - 1
            document["inhibit_rules"] = rules
        return yaml.safe_dump(document)

    found = SimpleNamespace(prometheus_config=fast.prometheus_config, alertmanager_config=alertmanager_config)
    return cast(ModuleType, found)


def crash(stack: Stack, run_dir: Path, batch: int, runs: int = AT_ONCE) -> None:
    """Replace the attacker's records by those of other runs that have crashed, and wait for their alerts."""
    for path in run_dir.glob("hostile-*"):
        path.unlink()
    for number in range(runs):
        name = f"hostile-{batch}-{number}"
        ended(run_dir, MALLORY, name, at=time.time(), run=name, **ALONE)
    alerts = f'ALERTS{{alertname="RankscopeRankCrashed",alertstate="firing",run=~"hostile-{batch}-.*"}}'
    assert wait_for(lambda: len(stack.prometheus.query(alerts)) == runs, WITHIN)


def firing(stack: Stack, owner: int) -> list[Notification]:
    """Return the owner's notifications."""
    return [one for one in stack.webhook.firing() if one.labels.get("owner") == str(owner)]


def test_a_hundred_crashed_runs_are_one_notification_and_another_users_crash_is_notified(
    tmp_path: Path, shared: Path
) -> None:
    exporter = servers.exporter(tmp_path, "1", shared)
    with Stack(tmp_path, [exporter], speed=configurations(inhibits=True)) as stack:
        for batch in range(BATCHES):
            crash(stack, shared, batch)
        ended(shared, VICTIM, "victim", at=time.time(), run="llm", **ALONE)
        assert wait_for(lambda: firing(stack, VICTIM), WITHIN)
        time.sleep(NOTIFIED_AFTER)
        many = [one for one in firing(stack, MALLORY) if one.name == "RankscopeManyAlerts"]
        assert [one.name for one in firing(stack, VICTIM)] == ["RankscopeRankCrashed"]
        assert 1 <= len(many) <= len(firing(stack, MALLORY)) <= AT_MOST
        assert f"critical alerts of owner {MALLORY}" in many[0].annotations["summary"]


def test_without_the_inhibition_each_of_the_runs_would_be_notified(tmp_path: Path, shared: Path) -> None:
    exporter = servers.exporter(tmp_path, "1", shared)
    with Stack(tmp_path, [exporter], speed=configurations(inhibits=False)) as stack:
        crash(stack, shared, 0)
        assert wait_for(lambda: len(firing(stack, MALLORY)) > AT_ONCE, WITHIN)
