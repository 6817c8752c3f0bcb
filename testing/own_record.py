"""The hook's attachment to this process, and the record that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rankscope import attach
from rankscope.attach import Attachment
from rankscope.guard import Guard
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.timeline.timeline import Timeline


def attachment() -> Attachment:
    """Return the attachment. Fails if this process is not instrumented."""
    found = attach.current()
    assert found is not None
    return found


def snapshot() -> RankSnapshot:
    """Read the record as the exporter does."""
    path = attachment().writer.path
    assert path is not None
    return read_rank(path)


def value(timeline: Timeline, field: str) -> float:
    """Return the first slot of a field."""
    return float(timeline.writer.slots[INDEX[field]])


def seconds(timeline: Timeline, phase: int) -> float:
    """Return the seconds of a phase, without the time since it was last entered."""
    return float(timeline.writer.slots[INDEX["phase_seconds"] + phase])


def fail(probe: str) -> None:
    """Fail the test when a probe fails."""
    raise AssertionError(f"the probe {probe} failed")


@contextmanager
def installed(timeline: Timeline, *probes: Any) -> Iterator[None]:
    """Install only these probes until the block ends."""
    undo = [undo for probe in probes for undo in probe.install(timeline, Guard(probe.__name__, fail))]
    try:
        yield
    finally:
        for remove in undo:
            remove()
