"""Records of many runs and owners in one process, as root of a node can write them by pods with any uid.

    python -m testing.crowd DIRECTORY UID OWNERS RUNS RANKS KIND [SECONDS]

Each owner has so many runs with so many ranks each. With SECONDS, all of them change their owner and run that often.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from testing.records import publish, rank_info

STEP = 0.25  # seconds
HONEST: Mapping[str, float] = {"data_wait": 0.05, "forward": 0.3, "backward": 0.4, "collective_wait": 0.2}
LATE: Mapping[str, float] = {"data_wait": 0.05, "forward": 0.3, "backward": 0.58, "collective_wait": 0.02}
"""Seconds per second by phase: the others wait for the backward pass of a late rank."""
GROUPS = [f"0-{63 - number}" + ":2" * (number % 2) for number in range(layout.MAX_GROUPS)]


def info(kind: str, name: str, rank: int, ranks: int) -> dict[str, Any]:
    """Return the info of a rank: of a `hostile` one, with as many groups as a record has."""
    group = f"0-{ranks - 1}" if ranks > 1 else "0"
    more = {"groups": GROUPS, "group_descriptions": ["mesh_pp"] * len(GROUPS)} if kind == "hostile" else {}
    common = {"world_size": str(ranks), "node": "n", "pid": str(os.getpid()), "backend": "gloo", "phases": []}
    return rank_info(run=name, rank=str(rank), group=group, **common, **more)


def advance(writer: RankWriter, kind: str, rank: int, steps: int, now: float) -> None:
    """Write the counters of a rank that has made so many steps; in a run of a `victim`, rank 1 is late."""
    slots = writer.slots
    age = now - slots[INDEX["started_monotonic"]]
    parts = LATE if kind == "victim" and rank == 1 else HONEST
    for phase, share in parts.items():
        slots[INDEX["phase_seconds"] + layout.PHASES.index(phase)] = share * age
    if kind == "hostile":
        for position in range(len(layout.PHASES)):
            share = (1 + (steps + rank + position) % 3) / 40
            slots[INDEX["phase_seconds"] + position] = slots[INDEX["device_seconds"] + position] = share * age
            slots[INDEX["device_dry_seconds"] + position] = share * age / 2
        for group in range(layout.MAX_GROUPS):
            slots[INDEX["group_collectives"] + group] = max(steps - (rank + group) % 2, 0)
            slots[INDEX["group_wait_seconds"] + group] = slots[INDEX["device_group_wait_seconds"] + group] = age / 40
        slots[INDEX["device_steps"]] = slots[INDEX["device_waits"]] = steps
    for field in ("collectives", "group_collectives", "steps"):
        slots[INDEX[field]] = steps
    slots[INDEX["step_buckets"] + 5], slots[INDEX["step_seconds"]] = steps, age


def act(
    directory: Path, uid: int, owners: int, runs: int, ranks: int, kind: str, interval: float = 0.0
) -> Generator[None]:
    """Publish the records, and advance them each time that the generator is resumed; remove them at the end."""
    places = [(owner, run, rank) for owner in range(owners) for run in range(runs) for rank in range(ranks)]
    writers = []
    for owner, run, rank in places:
        slots = {"started_monotonic": time.monotonic(), "started_unix": time.time()}
        writer, path = publish(directory, f"{uid + owner}-{run}-{rank}", slots, **info(kind, f"r{run}", rank, ranks))
        os.chown(path, uid + owner, -1)
        writers.append((writer, path))
    began, steps, turn = time.monotonic(), 0, 0
    try:
        while True:
            yield
            now, steps = time.monotonic(), steps + 1
            is_turn = interval and now - began > interval * (turn + 1)
            turn += bool(is_turn)
            for (writer, path), (owner, run, rank) in zip(writers, places, strict=True):
                if is_turn:
                    os.chown(path, uid + turn * owners + owner, -1)
                    writer.write_info(info(kind, f"r{run}-{turn}", rank, ranks))
                    writer.slots[INDEX["started_monotonic"]] = now - 1.0
                advance(writer, kind, rank, steps, now)
    finally:
        for _, path in writers:
            path.unlink(missing_ok=True)


def main() -> None:
    directory, (uid, owners, runs, ranks), kind = Path(sys.argv[1]), map(int, sys.argv[2:6]), sys.argv[6]
    acts = act(directory, uid, owners, runs, ranks, kind, *map(float, sys.argv[7:]))
    next(acts)
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(STEP)
        next(acts)


if __name__ == "__main__":
    main()
