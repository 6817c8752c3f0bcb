"""The answers of a Prometheus to `rankscope explain`, by query: four ranks, one of which lags."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOW = 1_795_283_699.0
Series = tuple[dict[str, str], float]

RANKS: list[Series] = [
    ({"run": "train", "rank": str(rank), "node": "vm", "uuid": f"GPU-{rank}", "instance": "vm:10417"}, 1.0)
    for rank in range(4)
]
LAGGING = {"run": "train", "kind": "straggler", "cause": "other", "severity": "warning", "rank": "0", "node": "vm"}
DATA = {"run": "train", "kind": "data", "cause": "io", "severity": "critical"}
TEXTS = {
    "summary": "Rank 0 (vm, GPU 0) slows down run train by 26%: extra work outside the model",
    "evidence": "It waits 6% of the time in collectives.",
    "advice": "First run `rankscope stacks --rank 0` on vm to see where it is.",
}
XID = {"alertname": "RankscopeGpuXid", "severity": "critical", "gpu": "2", "uuid": "GPU-2", "xid": "79"}
DOWN = {"alertname": "RankscopeExporterDown", "severity": "warning", "instance": "vm:10417"}


@dataclass(frozen=True)
class Scene:
    """The state of the cluster that the answers describe."""

    runs: tuple[str, ...] = ("train",)
    has_findings: bool = True
    is_judged: bool = True


def answer(url: str, scene: Scene) -> dict[str, Any]:
    """Return the whole answer to a query."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query).get("query", [""])[0]
    found = next((series for pattern, series in _table(scene).items() if re.match(pattern, query)), [])
    vector = [{"metric": labels, "value": [NOW, f"{value:.17g}"]} for labels, value in found]
    return {"status": "success", "data": {"resultType": "vector", "result": vector}}


def _table(scene: Scene) -> Mapping[str, list[Series]]:
    """Return the series by a pattern of the query's start; the first match counts."""
    runs = [{"run": run, "cluster": "a"} if run == "two" else {"run": run} for run in scene.runs]
    lost = {"none": 0.6, "straggler": 0.25, "other": 0.1, "data": 0.04, "copies": 0.01, "idle": 0.0001}
    by_run = r"(group|count|max) by \(run, cluster, owner\) \("
    return {
        by_run + r"last_over_time\(rankscope_rank_start": [(run, NOW - 3600) for run in runs],
        by_run: [(run, 4.0) for run in runs],
        r"count by \(node\)": [({"node": "vm"}, 4.0)] if scene.runs != ("ended",) else [],
        r"group\(last_over_time\(rankscope_run_judged": [({}, 1.0)] if scene.is_judged else [],
        r"group by \(reason": [({"reason": "node_missing", "node": "b"}, 1.0)] if len(scene.runs) > 1 else [],
        r"group by \(instance": [({"instance": "vm:10417"}, 1.0)],
        r'last_over_time\({__name__=~"rankscope_finding': _findings() if scene.has_findings else [],
        r"last_over_time\(rankscope_rank_info": RANKS,
        r"ALERTS": [(labels, 1.0) for labels in (XID, DOWN)] if scene.has_findings else [],
        r"max by \(cause\)": [({"cause": cause}, value) for cause, value in lost.items()] if scene.is_judged else [],
        r"max by \(rank\)": [({"rank": rank}, lag) for rank, lag in (("0", 0.01), ("1", -0.01))],
        r"max\(last_over_time": [({}, NOW - 30)],
    }


def _findings() -> list[Series]:
    values = {"ratio": 0.26, "since_timestamp_seconds": NOW - 100, "end_timestamp_seconds": NOW - 200}
    return [
        *(({"__name__": f"rankscope_finding_{name}", **LAGGING}, value) for name, value in values.items()),
        *(({"__name__": f"rankscope_finding_{name}", **DATA}, values[name]) for name in [*values][:2]),
        ({"__name__": "rankscope_finding_info", **LAGGING, **TEXTS}, 1.0),
    ]
