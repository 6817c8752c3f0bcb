"""The number of series per GPU in docs/metrics.md."""

from __future__ import annotations

from docs import generate


def test_only_the_metrics_that_a_gpu_has_are_counted() -> None:
    h100, a100, t4 = (generate.series_of(generate.MODELS[name]) for name in ("H100 with 18 NVLinks", A100, "T4"))
    assert h100["nvlink"] > 0
    assert h100["gpm"] > 0
    assert h100["mig"] == 0
    assert a100["mig"] > 0
    assert a100["load"] == a100["gpm"] == 0
    assert t4["nvlink"] == t4["gpm"] == t4["mig"] == 0
    assert t4["load"] > h100["load"], "it has a video encoder"


A100 = "A100 split into 3 by MIG"
