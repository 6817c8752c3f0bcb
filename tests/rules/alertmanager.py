"""A real Alertmanager with the shipped configuration, and its alerts and notifications."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from deploy.prometheus import fast
from testing import servers
from testing.waiting import eventually

SHIPPED = Path(__file__).resolve().parents[2] / "deploy/alertmanager/alertmanager.yml"
TEMPLATE = SHIPPED.with_name("rankscope.tmpl")
NOWHERE = "http://127.0.0.1:9/"  # the discard port: the tests read routing and inhibition, not deliveries

Alert = dict[str, str]

LAST = [{"cluster": "last", "uuid": "GPU-0", "alertname": f"RankscopeGpu{name}"} for name in ("Lost", "AllocatedIdle")]
"""An alert and one that it inhibits. Inhibition reads alerts in their order, after Alertmanager shows them."""


class Alertmanager:
    """The part of Alertmanager's API v2 that the tests need."""

    def __init__(self, url: str) -> None:
        self._url = url

    def fire(self, *alerts: Alert) -> None:
        """Post firing alerts, and wait until Alertmanager shows as many."""
        self.begin(*alerts)
        eventually(lambda: len(self._get("/api/v2/alerts")) == len(alerts), pause=0.05)

    def begin(self, *alerts: Alert) -> None:
        """Post that the alerts fire."""
        self.post([{"labels": alert} for alert in alerts])

    def end(self, *alerts: Alert) -> None:
        """Post that the alerts have ended."""
        self.post([{"labels": alert, "endsAt": datetime.now(UTC).isoformat()} for alert in alerts])

    def names(self) -> set[str]:
        """Return the names of the alerts that no alert inhibits."""
        return {alert["alertname"] for alert in self.uninhibited()}

    def uninhibited(self) -> list[Alert]:
        """Return the labels of the alerts that no alert inhibits."""
        self.begin(*LAST)
        eventually(lambda: LAST[1] in self._labels(inhibited=True), pause=0.05)
        return [alert for alert in self._labels(inhibited=False) if alert not in LAST]

    def _labels(self, *, inhibited: bool) -> list[Alert]:
        alerts = self._get("/api/v2/alerts")
        return [alert["labels"] for alert in alerts if bool(alert["status"]["inhibitedBy"]) == inhibited]

    def notifications(self) -> list[tuple[str, int]]:
        """Return name and number of the alerts in each notification, once each alert is in one."""
        eventually(lambda: sum(number for _, number in self._notifications()) == len(self._get("/api/v2/alerts")))
        return self._notifications()

    def _notifications(self) -> list[tuple[str, int]]:
        groups = self._get("/api/v2/alerts/groups")
        return sorted((group["labels"]["alertname"], len(group["alerts"])) for group in groups)

    def silenced(self) -> list[Alert]:
        """Return the labels of the alerts that a silence mutes."""
        return [alert["labels"] for alert in self._get("/api/v2/alerts") if alert["status"]["silencedBy"]]

    def post(self, content: Any, to: str = "alerts") -> None:
        """Post alerts with annotations and times of their own, or a silence."""
        body, headers = json.dumps(content).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self._url}/api/v2/{to}", body, headers), timeout=5).close()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=5) as answer:
            return json.load(answer)


def commented_receiver(kind: str) -> dict[str, Any]:
    """Return a receiver of the shipped file, where it is a comment."""
    found = re.search(rf"^    # {kind}:\n(?:    #   .*\n)+", SHIPPED.read_text(), re.M)
    assert found
    (receiver,) = yaml.safe_load(re.sub(r"^    # ", "", found[0], flags=re.M))[kind]
    assert isinstance(receiver, dict)
    return receiver


@contextmanager
def running(directory: Path, webhook: str = NOWHERE) -> Iterator[Alertmanager]:
    """Run an Alertmanager at fast speed that posts its notifications to `webhook`."""
    with _running(directory, fast.alertmanager_config(webhook)) as alertmanager:
        yield alertmanager


@contextmanager
def running_with_template(directory: Path, **receiver: Any) -> Iterator[Alertmanager]:
    """Run a user's Alertmanager that has nothing of ours but a receiver and a copy of the template."""
    shutil.copy(TEMPLATE, directory)
    route = {"receiver": "own", "group_by": ["alertname", "owner", "run"], "group_wait": "1s", "group_interval": "1s"}
    config = {"route": route, "receivers": [{"name": "own", **receiver}], "templates": [TEMPLATE.name]}
    with _running(directory, yaml.safe_dump(config)) as alertmanager:
        yield alertmanager


@contextmanager
def _running(directory: Path, configuration: str) -> Iterator[Alertmanager]:
    with servers.alertmanager(directory, configuration) as server:
        yield Alertmanager(server.url)
