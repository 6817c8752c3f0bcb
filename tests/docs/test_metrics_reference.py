"""docs/metrics.md is what the collectors declare, and says how many series that is."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs import generate


def test_the_reference_is_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def test_a_reference_that_is_out_of_date_is_named_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "metrics.md"
    page.write_text("# Metrics\n")
    assert generate.main(["--check"], page) == 1
    assert "metrics.md is out of date: run docs/generate.py" in capsys.readouterr().err
    assert generate.main([], page) == 0
    assert page.read_text() == generate.OUTPUT.read_text()


def test_a_series_budget_counts_what_a_gpu_has_and_not_what_it_lacks() -> None:
    h100, a100, t4 = (generate.series_of(generate.MODELS[name]) for name in ("H100 with 18 NVLinks", A100, "T4"))
    assert h100["nvlink"] > 0
    assert h100["gpm"] > 0
    assert h100["mig"] == 0
    assert a100["mig"] > 0
    assert a100["load"] == a100["gpm"] == 0
    assert t4["nvlink"] == t4["gpm"] == t4["mig"] == 0
    assert t4["load"] > h100["load"], "it has a video encoder"


A100 = "A100 split into 3 by MIG"
