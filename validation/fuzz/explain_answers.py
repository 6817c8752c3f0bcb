"""The answers of a Prometheus with our rules to `rankscope explain`, by query: four ranks, one of which lags."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOW = 1_795_283_699.0
Series = tuple[dict[str, str], float]

RANKS: list[Series] = [
    (
        {
            "__name__": "rankscope_rank_info",
            "run": "train",
            "rank": str(rank),
            "group": "0-3",
            "node": "vm",
            "uuid": f"GPU-{rank}",
            "instance": "vm:10417",
        },
        1.0,
    )
    for rank in range(4)
]
LAGGING = {"alertname": "RankscopeRankZeroLagging", "severity": "warning", "run": "train", "rank": "0"}
LAGGING |= {"group": "0-3", "cause": "other", "node": "vm", "uuid": "GPU-0"}
XID = {"alertname": "RankscopeGpuXid", "severity": "critical", "gpu": "2", "uuid": "GPU-2", "xid": "79"}
PAGE = "https://github.com/rankscope/rankscope/blob/main/docs/runbooks/RankscopeRankZeroLagging.md"
WORDS = {
    "summary": "Rank 0 slows down train by 26%",
    "description": "Rank 0 waits 6% of its time.",
    "runbook_url": PAGE,
}


@dataclass(frozen=True)
class Scene:
    """The state of the cluster that the answers describe."""

    runs: tuple[str, ...] = ("train",)
    has_alerts: bool = True
    stands_still: bool = False
    has_rules: bool = True


def answer(url: str, scene: Scene) -> dict[str, Any]:
    """Return the whole answer to a request of the API."""
    parts = urllib.parse.urlsplit(url)
    if parts.path.endswith("/rules"):
        return {"status": "success", "data": {"groups": _groups(scene)}}
    query = urllib.parse.parse_qs(parts.query).get("query", [""])[0]
    vector = [{"metric": labels, "value": [NOW, f"{value:.17g}"]} for labels, value in _found(query, scene)]
    return {"status": "success", "data": {"resultType": "vector", "result": vector}}


def _found(query: str, scene: Scene) -> list[Series]:
    if query.startswith("group by (run, cluster, owner)"):
        return _runs(scene, 1.0)
    if query.startswith("ALERTS"):
        return _alerts(scene)
    if query.startswith("count(") and not scene.has_rules:
        return []
    return next((series for pattern, series in _table(scene).items() if re.match(pattern, query)), [])


def _runs(scene: Scene, value: float) -> list[Series]:
    return [({"run": run, "cluster": "a"} if run == "two" else {"run": run}, value) for run in scene.runs]


def _alerts(scene: Scene) -> list[Series]:
    firing = [LAGGING, XID, {**LAGGING, "rank": "1"}] if scene.has_alerts else []
    pending = [{**LAGGING, "alertname": "RankscopeCpuFallback"}] if scene.has_alerts else []
    states = [({**alert, "alertstate": "firing"}, 1.0) for alert in firing]
    return [*states, *(({**alert, "alertstate": "pending"}, 1.0) for alert in pending)]


def _table(scene: Scene) -> Mapping[str, list[Series]]:
    """Return the series by a pattern of the query's start; the first match counts."""
    lost = {"none": 0.6, "straggler": 0.25, "other": 0.1, "data": 0.04, "copies": 0.01, "idle": 0.0001}
    by_cause = [({"__name__": "run:rankscope_lost:ratio", "run": "train", "cause": c}, v) for c, v in lost.items()]
    return {
        r"run:rankscope_lost:|run:rankscope_lost_gpu": by_cause if scene.has_rules else [],
        r"last_over_time\(rankscope_rank_info": RANKS,
        r"last_over_time\(rankscope_gpu_info": [({"gpu": "0", "uuid": "GPU-0"}, 1.0)],
        r"count by \(node\)": [({"node": "vm"}, 4.0)] if scene.runs != ("ended",) else [],
        r"count by \(run, cluster, owner\)": _runs(scene, 4.0),
        r"max by \(run, cluster, owner\) \(last_over_time\(rankscope_rank_start": _runs(scene, NOW - 3600),
        r"max by \(run, cluster, owner\)": _runs(scene, 1234.0),
        r"group by \(clock\)": [({"clock": "device"}, 1.0)],
        r"group by \(instance": [({"instance": "vm:10417"}, 1.0)],
        r"max\(last_over_time": [({}, NOW - 30)],
        r"run:rankscope_stall": [({}, 70.0)] if scene.stands_still else [],
        r"run:rankscope_(planned_)?patience": [({}, 150.0)],
        r"run:rankscope_steps:rate": [({"run": "train"}, 9.0)],
        r"topk\(1, rank:rankscope_lag": [({"__name__": "rank:rankscope_lag:ratio", "rank": "0"}, 0.26)],
        r"topk\(1, run:rankscope_loss": [({"__name__": "run:rankscope_loss:ratio", "cause": "straggler"}, 0.25)],
        r"topk\(1, rank:rankscope_blame": [
            ({"__name__": "rank:rankscope_blame:ratio", "rank": "0", "phase": "other"}, 0.26)
        ],
        r"time\(\)": [({}, 30.0)],
        r"count\(": [({}, 40.0)],
        r"group:rankscope_wait": [({"__name__": "group:rankscope_wait:reference"}, 0.32)],
        r"rank:rankscope_culprit": [({"run": "train", "rank": "0", "cause": "other"}, 0.26)],
        r"\{__name__=~\"rank": [
            ({"__name__": f"rank:rankscope_{name}:ratio", "rank": "0"}, 0.07) for name in ("wait", "lag")
        ],
        r"\{__name__=~\"run": [({"__name__": f"run:rankscope_{name}:ratio"}, 0.3) for name in ("busy", "skew")],
    }


def _groups(scene: Scene) -> list[dict[str, Any]]:
    active = {"state": "firing", "activeAt": "2026-11-21T17:55:52.250024025Z", "value": "2.6e-01"}
    alerts = [{"labels": labels, "annotations": WORDS, **active} for labels in (LAGGING, XID)]
    rules = [
        {
            "name": name,
            "query": f'rank:rankscope_culprit:ratio{{rank="0"}} > {number}',
            "type": "alerting",
            "annotations": {"runbook_url": PAGE},
            "alerts": alerts if scene.has_alerts else [],
        }
        for number, name in enumerate(("RankscopeRankZeroLagging", "RankscopeGpuXid", "OtherAlert"))
    ]
    return [{"name": "rankscope", "interval": 15, "rules": rules}, {"name": "other", "interval": 60, "rules": []}]
