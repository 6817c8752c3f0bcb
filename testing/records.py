"""Records of ranks, written by this process or by another live process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import RankWriter
from rankscope_exporter.ranks.checks import LABELS
from testing.programs import Program, python, running

READ_AT = 10_000.0
NO_SLOTS: Mapping[str, float] = MappingProxyType({})
IMPORTS = """
import ctypes, json, os, platform, signal, sys, time
from pathlib import Path
from testing.records import publish
from testing.users import become
directory, name, info, slots = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
"""
LIVE = """
writer, _ = publish(directory, name, slots, **info)
print("ready", flush=True)
for line in sys.stdin:
    writer.write_info(json.loads(line))
    print("written", flush=True)
"""


def record_in(run_dir: Path) -> RankSnapshot:
    """Read the only record of a run directory."""
    (path,) = run_dir.glob("*.rank")
    return read_rank(path)


def rank_info(**labels: Any) -> dict[str, Any]:
    """Return the info of rank 0 of run `r`, with these labels changed."""
    return {**dict.fromkeys(LABELS, ""), "run": "r", "rank": "0", "pid": "1", **labels}


def publish(
    directory: Path, name: str = "r.0", slots: Mapping[str, float] = NO_SLOTS, **labels: Any
) -> tuple[RankWriter, Path]:
    """Write a record with these slots and labels. Readers in this process see a dead rank."""
    writer = RankWriter()
    for field, value in slots.items():
        writer.slots[INDEX[field]] = value
    writer.publish(directory, name, rank_info(**labels))
    assert writer.path is not None
    return writer, writer.path


@contextmanager
def living_rank(
    directory: Path, name: str = "r.0", slots: Mapping[str, float] = NO_SLOTS, before: str = "", **labels: Any
) -> Iterator[Program]:
    """Start a rank that lives until the block ends. It publishes each line of its input as its info.

    It runs the code `before` first.
    """
    arguments = (directory, name, json.dumps(labels), json.dumps(dict(slots)))
    with running(*python(IMPORTS + before + LIVE, *arguments)) as rank:
        yield rank


def rank_snapshot(slots: Mapping[str, float] = NO_SLOTS, alive: bool = True, **labels: Any) -> RankSnapshot:
    """Return a reader's view of such a record, at the monotonic time `READ_AT`."""
    values = [0.0] * layout.SLOTS
    for field, value in slots.items():
        values[INDEX[field]] = value
    return RankSnapshot(Path("x"), alive, tuple(values), rank_info(**labels), None, READ_AT)
