"""Configurations of Prometheus and Alertmanager at fast speed, for the demo and the tests.

Both are the production files with shorter intervals and other addresses, so the demo and the tests use what is shipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from deploy.prometheus.shipped import HERE, alertmanager_document, prometheus_document
from deploy.prometheus.thresholds import seconds

INTERVAL = "1s"
TIMES_AS_FAST = 30
"""Factor by which Alertmanager's INTERVALS are shorter than the shipped ones."""
INTERVALS = ("group_wait", "group_interval", "repeat_interval")


def prometheus_config(exporters: Sequence[str], alertmanager: str | None = None) -> str:
    """Return a prometheus.yml with the fast rules that scrapes each of `exporters` (`host:port`) every second.

    It sends alerts to `alertmanager` (`host:port`), if given.
    """
    config = prometheus_document(exporters, alertmanager)
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(HERE / "rules/fast.yml")]
    return yaml.safe_dump(config, sort_keys=False)


def alertmanager_config(webhook_url: str) -> str:
    """Return an alertmanager.yml that posts to `webhook_url` within about a second."""
    config = alertmanager_document(webhook_url)
    routes = {id(route): route for route in _routes(config["route"])}  # an alias in the file is the same object
    for route in routes.values():
        route.update({name: _shortened(route[name]) for name in INTERVALS if name in route})
    return yaml.safe_dump(config, sort_keys=False)


def _shortened(duration: str) -> str:
    return f"{1000 * float(seconds(duration)) / TIMES_AS_FAST:.0f}ms"


def _routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield route
    for child in route.get("routes", ()):
        yield from _routes(child)
