"""Configurations of Prometheus and Alertmanager at fast speed, for the demo and the tests.

Both are the production files with the intervals shortened and the addresses replaced, so that what is shown and
tested is what is shipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from deploy.prometheus.shipped import HERE, alertmanager_document, prometheus_document

INTERVAL = "1s"


def prometheus_config(exporters: Sequence[str], alertmanager: str | None = None) -> str:
    """The text of a prometheus.yml with the fast rules that scrapes each of `exporters` (`host:port`) every second.

    Alerts go to `alertmanager` (`host:port`), or nowhere.
    """
    config = prometheus_document(exporters, alertmanager)
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(HERE / "rules/fast.yml")]
    return yaml.safe_dump(config, sort_keys=False)


def alertmanager_config(webhook_url: str) -> str:
    """The text of an alertmanager.yml that posts to `webhook_url` within about a second."""
    config = alertmanager_document(webhook_url)
    for route in _routes(config["route"]):
        route.update(group_wait="1s", group_interval="2s")
    return yaml.safe_dump(config, sort_keys=False)


def _routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield route
    for child in route.get("routes", ()):
        yield from _routes(child)
