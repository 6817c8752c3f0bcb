"""Configurations of Prometheus and Alertmanager at fast speed, for the demo and the tests.

All are the production files with shorter times and other addresses, so the demo and the tests use what is shipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from deploy.prometheus import shipped
from deploy.prometheus.shipped import HERE, alertmanager_document, prometheus_document

INTERVAL = "1s"
TIMES_AS_FAST = 30
"""Factor by which the times of the rules and Alertmanager's INTERVALS are shorter than the shipped ones."""
INTERVALS = ("group_wait", "group_interval", "repeat_interval")
RULES = HERE.parents[1] / "build/fast_rules.yml"
SECONDS = {"s": 1, "m": 60, "h": 3600}
DURATION = re.compile(r"(for: |\[|(?<=[smh]):)(\d+[smh])\b")
"""A duration of a rule, a range, or the resolution of a range."""
LIMITS = re.compile(r"(?<![\d.\"|])(75|90|480|600|900|1800|3600|43200)(?![\d.\"|%])")
"""The numbers of seconds in the rules' expressions."""


def prometheus_config(exporters: Sequence[str], alertmanager: str | None = None) -> str:
    """Return a prometheus.yml with the fast rules that scrapes each of `exporters` (`host:port`) every second.

    It sends alerts to `alertmanager` (`host:port`), if given.
    """
    config = prometheus_document(exporters, alertmanager)
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(write_rules())]
    return yaml.safe_dump(config, sort_keys=False)


def write_rules() -> Path:
    """Write the fast rules, for any number of processes at once, and return their path."""
    RULES.parent.mkdir(exist_ok=True)
    written = RULES.with_suffix(f".{os.getpid()}")
    written.write_text(rules())
    return written.replace(RULES)


def rules() -> str:
    """Return the rules with shorter times. Four ranks that share two CPUs are late in turn: more warnings are many."""
    groups = yaml.safe_load(shipped.RULES.read_text())
    for group in groups["groups"]:
        group["interval"] = INTERVAL
    for rule in (rule for group in groups["groups"] for rule in group["rules"]):
        rule["expr"] = LIMITS.sub(_fast_limit, rule["expr"]).replace("> 7", "> 11")
    return DURATION.sub(_fast_duration, yaml.safe_dump(groups, sort_keys=False, width=100_000))


def _fast_limit(match: re.Match[str]) -> str:
    return f"{int(match[0]) / TIMES_AS_FAST:g}"


def _fast_duration(match: re.Match[str]) -> str:
    return match[1] + _shortened(match[2])


def alertmanager_config(webhook_url: str) -> str:
    """Return an alertmanager.yml that posts to `webhook_url` within about a second."""
    config = alertmanager_document(webhook_url)
    routes = {id(route): route for route in _routes(config["route"])}  # an alias in the file is the same object
    for route in routes.values():
        route.update({name: _shortened(route[name]) for name in INTERVALS if name in route})
    return yaml.safe_dump(config, sort_keys=False)


def _shortened(duration: str) -> str:
    return f"{1000 * int(duration[:-1]) * SECONDS[duration[-1]] / TIMES_AS_FAST:.0f}ms"


def _routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield route
    for child in route.get("routes", ()):
        yield from _routes(child)
