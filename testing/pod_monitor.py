"""The scrape configuration that the Prometheus operator generates from a PodMonitor, for the fields of the chart.

Tests and `make kubernetes` use it with a Prometheus without the operator.
"""

from __future__ import annotations

import re
from typing import Any

CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
META = "__meta_kubernetes_pod"


def scrape_config(monitor: dict[str, Any], discovery: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration. `discovery` finds the targets, e.g. `kubernetes_sd_configs`."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    name = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    selected = [_keep(f"{META}_label_{_label(key)}", value) for key, value in _selector(monitor).items()]
    selected += _namespaces(monitor)
    limits = {_snake(key): value for key, value in monitor["spec"].items() if key.endswith("Limit")}
    return {
        "job_name": f"podMonitor/{name}/0",
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["scrapeTimeout"],
        "relabel_configs": [
            *selected,
            {"action": "drop", "source_labels": [f"{META}_phase"], "regex": "(Failed|Succeeded)"},
            _keep(f"{META}_container_port_name", endpoint["port"]),
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{META}_container_name"], "target_label": "container"},
            {"source_labels": [f"{META}_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": name},
            {"target_label": "endpoint", "replacement": endpoint["port"]},
            *_relabelings(endpoint["relabelings"]),
        ],
        "metric_relabel_configs": _relabelings(endpoint.get("metricRelabelings", [])),
        "honor_labels": endpoint["honorLabels"],
        **limits,
        **discovery,
    }


def _selector(monitor: dict[str, Any]) -> dict[str, str]:
    return dict(monitor["spec"]["selector"]["matchLabels"])


def _namespaces(monitor: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rule for the monitor's namespaces; by default its own."""
    selector = monitor["spec"].get("namespaceSelector", {})
    names = selector.get("matchNames", [monitor["metadata"]["namespace"]])
    if selector.get("any"):
        return []
    return [{"action": "keep", "source_labels": ["__meta_kubernetes_namespace"], "regex": "|".join(names)}]


def _relabelings(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{_snake(key): value for key, value in rule.items()} for rule in rules]


def _keep(label: str, value: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [label], "regex": re.escape(value)}


def _label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _snake(name: str) -> str:
    return CAMEL.sub("_", name).lower()
