"""The metrics of a rank that are shown or absent, depending on its record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from testing.records import rank_snapshot

from rankscope_exporter.ranks.metrics import life, process


def shown(name: str, **fields: float) -> Any:
    """Return the metric's value for a rank whose record has these fields."""
    (metric,) = (one for one in process.METRICS if one.name == name)
    rank: Any = SimpleNamespace(snapshot=rank_snapshot(fields))
    return metric.values(rank)


def test_the_runs_of_trackers_are_shown_with_their_urls() -> None:
    (metric,) = (one for one in life.METRICS if one.name == "rankscope_rank_tracker_info")
    info = {"tracker_ids": {"wandb": "x1", "tensorboard": "runs/a"}, "tracker_urls": {"wandb": "https://w/x1"}}
    ranks: Any = [SimpleNamespace(snapshot=SimpleNamespace(info=info)) for info in (info, {}, {"tracker_ids": {}})]
    expected = {("wandb", "x1", "https://w/x1"): 1, ("tensorboard", "runs/a", ""): 1}
    assert [metric.values(rank) for rank in ranks] == [expected, None, None]


@pytest.mark.parametrize(
    ("scale", "skipped", "expected"),
    [(0.0, 0.0, (None, None)), (65536.0, 0.0, (65536.0, 0.0)), (0.0, 200.0, (0.0, 200.0))],
)
def test_a_loss_scale_of_zero_is_shown_only_with_a_scaler(
    scale: float, skipped: float, expected: tuple[float | None, float | None]
) -> None:
    names = ("rankscope_rank_amp_scale", "rankscope_rank_amp_skipped_steps_total")
    found = tuple(shown(name, amp_scale=scale, amp_skipped_steps=skipped) for name in names)
    assert found == expected
