"""Alertmanager crashes, and does not tell again what it has told."""

from __future__ import annotations

import time
from pathlib import Path

from deploy.prometheus import fast
from testing import servers
from testing.stack import wait_for
from testing.webhook import WebhookReceiver
from tests.rules.alertmanager import Alertmanager

LAGGING = {"alertname": "RankscopeRankLagging", "run": "train", "rank": "2", "severity": "warning"}
COMPOSE = Path(__file__).parents[2] / "deploy/docker-compose.yml"
ON_DISK_AFTER = 16.0  # seconds
WOULD_BE_TOLD_WITHIN = 5.0  # at fast speed it takes one


def test_what_was_told_before_a_crash_is_not_told_again_after_it(tmp_path):
    assert servers.SNAPSHOTS in COMPOSE.read_text()
    receiver = WebhookReceiver()
    receiver.start()
    server = servers.alertmanager(tmp_path, fast.alertmanager_config(receiver.url))
    try:
        server.start()
        Alertmanager(server.url).fire(LAGGING)
        assert wait_for(lambda: len(receiver.notifications) == 1, WOULD_BE_TOLD_WITHIN)
        time.sleep(ON_DISK_AFTER)
        server.kill()
        server.start()
        Alertmanager(server.url).fire(LAGGING)  # as Prometheus does each minute
        assert not wait_for(lambda: len(receiver.notifications) > 1, WOULD_BE_TOLD_WITHIN)
    finally:
        server.stop()
        receiver.stop()
