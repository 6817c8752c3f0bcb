"""A GPU's runs are counted by its exporter, or by the analyzer if they span nodes: the alert adds both."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.promtool import complaint, series

GPU = {"gpu": "3", "uuid": "GPU-3", "node": "node-a", "cluster": "c"}
ALERT = 'count(ALERTS{alertname="RankscopeGpuFaultRecurring",alertstate="firing",instance="a",gpu="3"}) or vector(0)'
ALL = 'count(ALERTS{alertname="RankscopeGpuFaultRecurring"}) or vector(0)'


@pytest.mark.parametrize(
    ("own", "analyzed", "other_cluster", "alerts"), [(2, 1, 0, 1), (0, 3, 0, 1), (1, 1, 0, 0), (2, 0, 1, 0)]
)
def test_the_runs_of_an_exporter_and_of_an_analyzer_add_up(
    tmp_path: Path, own: int, analyzed: int, other_cluster: int, alerts: int
) -> None:
    elsewhere = {**GPU, "cluster": "d"}
    test = {
        "interval": "15s",
        "input_series": [
            series("rankscope_gpu_info", "1x20", job="exporters", instance="a", **GPU),
            series("rankscope_gpu_culprit_runs", f"{own}x20", job="exporters", instance="a", **GPU),
            series("rankscope_gpu_culprit_runs", f"{analyzed}x20", job="analyzer", instance="z", **GPU),
            series("rankscope_gpu_culprit_runs", f"{other_cluster}x20", job="analyzer", instance="y", **elsewhere),
        ],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "4m", "exp_samples": [{"labels": "{}", "value": alerts}]}
            for expr in (ALERT, ALL)
        ],
    }
    assert complaint(test, tmp_path / "test.json") == ""
