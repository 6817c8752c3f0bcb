"""Alertmanager does not repeat its notifications after a crash."""

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
NOTIFIED_WITHIN = 5.0  # seconds; at fast speed it takes one


def test_an_alert_notified_before_a_crash_is_not_notified_again(tmp_path):
    assert servers.SNAPSHOTS in COMPOSE.read_text()
    with (
        WebhookReceiver() as receiver,
        servers.alertmanager(tmp_path, fast.alertmanager_config(receiver.url)) as server,
    ):
        Alertmanager(server.url).fire(LAGGING)
        assert wait_for(lambda: len(receiver.notifications) == 1, NOTIFIED_WITHIN)
        time.sleep(ON_DISK_AFTER)
        server.kill()
        server.start()
        Alertmanager(server.url).fire(LAGGING)  # as Prometheus does each minute
        assert not wait_for(lambda: len(receiver.notifications) > 1, NOTIFIED_WITHIN)
