"""The allocator's counters are copied to the record, and CUDA is never initialized for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testing.own_record import installed

from rankscope.probes import cuda_memory
from rankscope.probes.cuda_memory import AllocatorReader
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline


def stats(allocated: int, peak: int, reserved: int, retries: int = 0, failures: int = 0) -> dict[str, Any]:
    """Return the used part of `torch.cuda.memory_stats_as_nested_dict`."""
    return {
        "allocated_bytes": {"all": {"current": allocated, "peak": peak, "allocated": 10 * peak, "freed": 0}},
        "reserved_bytes": {"all": {"current": reserved, "peak": reserved, "allocated": reserved, "freed": 0}},
        "num_alloc_retries": retries,
        "num_ooms": failures,
    }


def slots(timeline: Timeline) -> dict[str, float]:
    return {name: timeline.writer.slots[index] for name, index in INDEX.items() if name.startswith("cuda_")}


def test_the_allocators_counters_are_copied() -> None:
    timeline = Timeline(RankWriter())
    AllocatorReader(timeline, lambda: stats(100, 300, 512, retries=2, failures=1)).poll()
    assert slots(timeline) == {
        "cuda_allocated_bytes": 100,
        "cuda_reserved_bytes": 512,
        "cuda_peak_allocated_bytes": 300,
        "cuda_allocation_retries": 2,
        "cuda_out_of_memory": 1,
    }


def test_the_peak_survives_a_reset_of_torchs_peak() -> None:
    timeline = Timeline(RankWriter())
    answers = iter([stats(100, 300, 512), stats(100, 100, 512)])
    reader = AllocatorReader(timeline, lambda: next(answers))
    reader.poll()
    reader.poll()
    assert slots(timeline)["cuda_peak_allocated_bytes"] == 300


def test_the_capacity_is_read_once_and_only_while_cuda_is_in_use() -> None:
    timeline, reads = Timeline(RankWriter()), []
    answers = iter([{}, stats(1, 1, 1), stats(1, 1, 1)])

    def read_capacity() -> float:
        reads.append(1)
        return 80e9

    reader = AllocatorReader(timeline, lambda: next(answers), read_capacity)
    capacities = []
    for _ in range(3):
        reader.poll()
        capacities.append(timeline.writer.slots[INDEX["device_capacity_bytes"]])
    assert capacities == [0.0, 80e9, 80e9]
    assert len(reads) == 1


@pytest.mark.parametrize(("fraction", "capacity"), [(None, 80e9), (0.25, 20e9)], ids=["before torch 2.7", "a limit"])
def test_the_capacity_is_the_devices_memory_or_what_the_script_allows(
    monkeypatch: pytest.MonkeyPatch, fraction: float | None, capacity: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80e9))
    if fraction is None:
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)
    else:
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction, raising=False)
    assert cuda_memory.read_capacity(3) == capacity


def test_without_cuda_nothing_is_known_and_nothing_is_initialized() -> None:
    timeline = Timeline(RankWriter())
    with installed(timeline, cuda_memory):
        timeline.step()
        assert set(slots(timeline).values()) == {0.0}
        assert not torch.cuda.is_initialized()
    assert timeline.steps.polls == []


def test_after_the_first_steps_it_is_read_once_a_second() -> None:
    now, read_at = [100.0], []
    timeline = Timeline(RankWriter(), lambda: now[0])

    def read() -> dict[str, Any]:
        read_at.append(now[0])
        return {}

    timeline.steps.polls.append(AllocatorReader(timeline, read).poll)
    for _ in range(SETTLED_STEPS):
        timeline.step()
    read_at.clear()
    for _ in range(40):
        now[0] += 0.125
        timeline.step()
    assert read_at == [101.0, 102.0, 103.0, 104.0, 105.0]
