"""A process that a rank has started is a rank of its own only once it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.leaving import leave
from torch import distributed as dist

from rankscope import publication
from rankscope.publication import Publication
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline


@pytest.mark.parametrize("event", [layout.COLLECTIVE_WAIT, layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER])
@pytest.mark.parametrize("parent", [{}, {"pid": "1", "run": "r", "backend": "gloo"}])
def test_a_process_with_its_own_group_that_a_rank_started_is_a_rank_once_it_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, event: int, parent: dict[str, str]
) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(publication, "parent_rank", lambda *_: parent)
    writer = RankWriter()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        is_training = Publication(writer, dict).is_training(Timeline(writer), event)
    finally:
        leave()
    assert is_training == (not parent or event in (layout.BACKWARD, layout.OPTIMIZER))
