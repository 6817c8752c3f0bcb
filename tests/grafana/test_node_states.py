"""The dashboard *Node* for healthy and sick GPUs, and exporters that do not answer, evaluated by promtool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from testing.promtool import INTERVAL, complaint, series

from rankscope_dashboards.node_verdict import COLORS
from rankscope_dashboards.queries import panel_queries

NODE = "node:10417"
SCRAPES = 40
NOW = INTERVAL * SCRAPES
TOO_FAST = 1.1 * INTERVAL
"""The increase of a counter of seconds that seems to run faster than the clock."""
Series = dict[str, str]
Samples = Mapping[str, float]


def always(metric: str, value: float, **labels: str) -> Series:
    return series(metric, f"{value}x{SCRAPES}", **{"instance": NODE, "job": "exporters", **labels})


def counter(metric: str, increase: float, **labels: str) -> Series:
    return series(metric, f"0+{increase}x{SCRAPES}", instance=NODE, job="exporters", **labels)


def gpu(number: int, is_up: bool = True) -> list[Series]:
    place = {"gpu": str(number), "uuid": f"GPU-{number}"}
    return [always("rankscope_gpu_up", float(is_up), **place), always("rankscope_gpu_info", 1, node="node", **place)]


def exporter(lost: int = 0, driver: float = 1, released: float = 0) -> list[Series]:
    """Return the series of an exporter with two GPUs, the last of which are lost."""
    return [
        always("up", 1),
        always("rankscope_exporter_build_info", 1),
        counter("rankscope_exporter_time_seconds", INTERVAL),
        always("rankscope_exporter_nvml_up", driver),
        always("rankscope_exporter_gpus_expected", 2),
        always("rankscope_exporter_gpus_seen", 2 - lost),
        always("rankscope_exporter_gpus_released", released),
        *(one for number in range(2) for one in gpu(number, number < 2 - lost)),
    ]


def finding(severity: str, says: str, uuid: str = "GPU-1", **labels: str) -> list[Series]:
    """Return a finding of an analyzer."""
    labels = {"instance": "analyzer", "run": "r", "kind": "straggler", "severity": severity, "uuid": uuid, **labels}
    return [
        always("rankscope_finding_ratio", 0.3, **labels),
        always("rankscope_finding_since_timestamp_seconds", NOW - 180, **labels),
        always("rankscope_finding_info", 1, **labels, summary=says, evidence="", advice=""),
    ]


def throttled(number: int, increase: float, reason: str = "hw_slowdown") -> Series:
    return counter("rankscope_gpu_throttled_seconds_total", increase, gpu=str(number), reason=reason)


def alert(name: str, **labels: str) -> list[Series]:
    labels = {"alertname": name, "severity": "warning", **labels}
    return [always("ALERTS", 1, alertstate="firing", **labels), always("ALERTS_FOR_STATE", NOW - 60, **labels)]


DOWN = [
    series("up", f"1x20 0x{SCRAPES}", instance=NODE, job="exporters"),
    series("rankscope_exporter_build_info", "1x20 stale", instance=NODE, job="exporters"),
]
RANKS = [
    always("rankscope_rank_info", 1, run="r", rank="0", node="node"),
    always("rankscope_rank_up", 1, run="r", rank="0"),
]
XID = always("rankscope_gpu_xid_last_timestamp_seconds", NOW - 120, gpu="0", xid="48")
NODES = {
    "healthy": (exporter(), "NO PROBLEM FOUND: 2 GPUs answer, 0 ranks are alive"),
    "unknown": ([], "NO DATA: no exporter of this name in this time range"),
    "down": (DOWN, "EXPORTER DOWN: Prometheus cannot scrape it, and nothing about this node is known"),
    "no driver": (exporter(driver=0), "DRIVER DOWN: the NVIDIA driver does not answer"),
    "lost": ([*exporter(lost=1), XID], "GPU LOST: GPU 1 does not answer; lost: 1 of 2"),
    "xid": ([*exporter(), XID], "XID 48 on GPU 0, 2 min ago"),
    "throttled": ([*exporter(), throttled(1, TOO_FAST)], "THROTTLED: GPU 1, 100% of the time, by hw_slowdown"),
    "by another GPU": (
        [*exporter(), throttled(1, INTERVAL, "sync_boost")],
        "NO PROBLEM FOUND: 2 GPUs answer, 0 ranks are alive",
    ),
    "finding": ([*exporter(), *finding("warning", "It is late")], "WARNING for 3 min: It is late"),
    "finding elsewhere": (
        [*exporter(), *finding("critical", "It is late", uuid="GPU-elsewhere")],
        "NO PROBLEM FOUND: 2 GPUs answer, 0 ranks are alive",
    ),
    "several ranks here": (
        [*exporter(), *finding("warning", "Set of ranks 0,4 is late", uuid="", node="node", rank="0,4"), *RANKS],
        "WARNING for 3 min: Set of ranks 0,4 is late",
    ),
    "a run here": (
        [*exporter(), *finding("warning", "Run r waits for data", uuid="", kind="data"), *RANKS],
        "WARNING for 3 min: Run r waits for data",
    ),
    "ranks elsewhere": (
        [*exporter(), *finding("warning", "Set of ranks 8,9 is late", uuid="", node="other", rank="8,9"), *RANKS],
        "NO PROBLEM FOUND: 2 GPUs answer, 1 ranks are alive",
    ),
    "hang elsewhere": (
        [
            *exporter(),
            *finding("critical", "Run r hangs: Rank 9 is stuck", uuid="GPU-9", node="other", kind="hang"),
            *RANKS,
        ],
        "HUNG for 3 min: Rank 9 is stuck",
    ),
    "alert": ([*exporter(), *alert("RankscopeGpuUnused", uuid="GPU-1")], "ALERT: RankscopeGpuUnused"),
    "released": (
        exporter(released=1),
        "RELEASED: the exporter has released the GPUs on request, and shows nothing about them",
    ),
}


def failures(panel: str, shown: list[Series], expected: Samples, tmp_path: Path, number: int = 0) -> str:
    """Return promtool's failures if the query of the panel has other results for these series, or ''."""
    queries = panel_queries(run="", owner="", instance=NODE, interval="1m", time_range="10m")
    found = [query.expr for query in queries if (query.dashboard, query.panel) == ("node", panel)][number]
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {"expr": found, "eval_time": f"{NOW}s", "exp_samples": samples}
    whole = {"interval": f"{INTERVAL}s", "input_series": shown, "promql_expr_test": [test]}
    return complaint(whole, tmp_path / "test.yml", rules=None)


@pytest.mark.parametrize("name", NODES)
def test_the_verdict_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    shown, said = NODES[name]
    assert failures("Verdict", shown, {f'{{said="{said}"}}': 1.0}, tmp_path) == ""
    assert any(said.startswith(begin) for begin in COLORS)


def test_a_hang_that_was_found_on_another_node_has_a_line_on_each_of_its_nodes(tmp_path: Path) -> None:
    hang = finding("critical", "It hangs", uuid="GPU-elsewhere", node="other", kind="hang", rank="9", gpu="1")
    late = finding("warning", "It is late", uuid="GPU-elsewhere", node="other")
    labels = {"run": "r", "kind": "hang", "severity": "critical", "rank": "9", "gpu": "1", "uuid": "GPU-elsewhere"}
    labels |= {"summary": "It hangs", "at": "hang/9", "runbook": "hang", "panels": "9"}
    line = "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
    assert failures("Findings and alerts", [*exporter(), *hang, *late, *RANKS], {line: 180.0}, tmp_path) == ""
    assert failures("Findings and alerts", [*exporter(), *hang, *late], {}, tmp_path) == ""


def test_gpus_are_sorted_by_number_also_if_one_is_lost(tmp_path: Path) -> None:
    states = [always("rankscope_gpu_state_info", 1, gpu=gpu, state="working") for gpu in ("2", "10")]
    working = {f'{{gpu="{gpu}",state="working",at="{gpu:0>2}"}}': 1.0 for gpu in ("2", "10")}
    lost = {'{gpu="3",state="does not answer",at="03"}': 0.0}
    assert failures("GPUs", [*states, *gpu(3, is_up=False)], working | lost, tmp_path) == ""


def temperature(number: int, value: float) -> Series:
    return always("rankscope_gpu_temperature_celsius", value, gpu=str(number))


def margin(number: int, value: float) -> list[Series]:
    limit = "rankscope_gpu_temperature_margin_threshold_celsius"
    place = {"gpu": str(number)}
    return [
        always("rankscope_gpu_temperature_margin_celsius", value, **place),
        always(limit, -2, threshold="slowdown", **place),
        always(limit, -8, threshold="shutdown", **place),
    ]


def threshold(number: int, value: float) -> Series:
    return always("rankscope_gpu_temperature_threshold_celsius", value, gpu=str(number), threshold="slowdown")


WARM = [temperature(0, 80), temperature(1, 85)]


@pytest.mark.parametrize(
    ("limits", "shown", "celsius"),
    [
        ([*margin(0, 5), *margin(1, 20)], '{gpu="0",limit="87",text=", slows down at 87 °C"}', 80),
        ([threshold(0, 95), threshold(1, 90)], '{gpu="1",limit="90",text=", slows down at 90 °C"}', 85),
        ([*margin(0, -3), *margin(1, 20)], '{gpu="0",limit="79",text=", is slowed down: limit 79 °C"}', 80),
        ([], '{gpu="1"}', 85),
    ],
    ids=["margin", "threshold", "slowed down", "no limit"],
)
def test_the_hottest_gpu_is_the_closest_to_its_own_limit(
    limits: list[Series], shown: str, celsius: float, tmp_path: Path
) -> None:
    assert failures("Hottest GPU", [*WARM, *limits], {shown: celsius}, tmp_path) == ""


def test_a_gpu_is_throttled_for_at_most_all_of_the_time(tmp_path: Path) -> None:
    most = {'{gpu="1",reason="hw_slowdown",of="GPU",by="by",who="GPU 1 by hw_slowdown"}': 1.0}
    assert failures("Throttled, and why", [throttled(0, 0), throttled(1, TOO_FAST)], most, tmp_path) == ""
    assert failures("Throttled, and why", [throttled(0, 0)], {'{who="no GPU"}': 0.0}, tmp_path) == ""
    assert failures("Throttled, and why", [], {}, tmp_path) == ""


def test_errors_name_the_last_xid_and_the_gpu(tmp_path: Path) -> None:
    xids = [
        always("rankscope_gpu_xid_errors_total", count, gpu=place, xid="48") for place, count in (("0", 2), ("1", 1))
    ]
    ecc = [
        always("rankscope_gpu_ecc_errors_total", count, gpu=place, kind="uncorrected", location="dram")
        for place, count in (("0", 0), ("1", 3))
    ]
    panel = "XID and ECC errors"
    last = {'{gpu="0",xid="48",last=", last: 48, GPU 0"}': 3.0}
    assert failures(panel, [*xids, XID], last, tmp_path) == ""
    assert failures(panel, [*xids[:1], *ecc], {'{gpu="1",place=", GPU 1"}': 3.0}, tmp_path, 1) == ""
    assert failures(panel, ecc[:1], {"{}": 0.0}, tmp_path, 1) == ""


def test_the_timeline_shows_a_lost_and_a_throttled_gpu_instead_of_their_use(tmp_path: Path) -> None:
    states = [always("rankscope_gpu_state_info", 1, gpu=str(number), state="working") for number in range(3)]
    found = [*gpu(0, is_up=False), *gpu(1), *gpu(2), *states, throttled(0, 0), throttled(1, INTERVAL)]
    rows = {f'{{gpu="{number}",at="0{number}"}}': float(code) for number, code in enumerate((0, 1, 2))}
    assert failures("State of each GPU over time", found, rows, tmp_path) == ""
