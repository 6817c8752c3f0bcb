"""The shipped configurations of Prometheus and Alertmanager with other addresses.

For tests at production speed. fast.py shortens their intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
RULES = HERE / "rules/rankscope.yml"
CAUSES = HERE.parents[1] / "exporter/rankscope_exporter/diagnosis/causes.yml"


def prometheus_document(exporters: Sequence[str], alertmanager: str | None = None) -> dict[str, Any]:
    """Return a prometheus.yml that scrapes `exporters` (`host:port`) and sends alerts to `alertmanager`, if given.

    It does not scrape itself, because Rankscope does not use those series.
    """
    config: dict[str, Any] = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["rule_files"] = [str(HERE / path) for path in config["rule_files"]]
    config["alerting"] = {"alertmanagers": _static([alertmanager] if alertmanager else [])}
    config["scrape_configs"] = [{"job_name": "rankscope", "static_configs": [{"targets": list(exporters)}]}]
    return config


def alertmanager_document(webhook_url: str) -> dict[str, Any]:
    """Return an alertmanager.yml whose receivers post to `webhook_url`."""
    path = HERE.parent / "alertmanager/alertmanager.yml"
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config["templates"] = [str(path.with_name("rankscope.tmpl"))]
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": webhook_url, "send_resolved": True}]
    return config


def prometheus_config(exporters: Sequence[str], alertmanager: str | None = None) -> str:
    """Return prometheus_document() as text."""
    return yaml.safe_dump(prometheus_document(exporters, alertmanager), sort_keys=False)


def alertmanager_config(webhook_url: str) -> str:
    """Return alertmanager_document() as text."""
    return yaml.safe_dump(alertmanager_document(webhook_url), sort_keys=False)


def _static(targets: list[str]) -> list[dict[str, Any]]:
    return [{"static_configs": [{"targets": targets}]}]
