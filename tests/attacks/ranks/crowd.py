"""Records of many runs and owners in one process, as root of a node can write them by pods with any uid.

    python -m tests.attacks.ranks.crowd DIRECTORY UID OWNERS RUNS RANKS KIND [SECONDS]

Each owner has so many runs with so many ranks each. With SECONDS, all of them change their owner and run that often.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testing.records import publish, rank_info

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter

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
        for phase in range(len(layout.PHASES)):
            share = (1 + (steps + rank + phase) % 3) / 40
            slots[INDEX["phase_seconds"] + phase] = slots[INDEX["device_seconds"] + phase] = share * age
            slots[INDEX["device_dry_seconds"] + phase] = share * age / 2
        for group in range(layout.MAX_GROUPS):
            slots[INDEX["group_collectives"] + group] = max(steps - (rank + group) % 2, 0)
            slots[INDEX["group_wait_seconds"] + group] = slots[INDEX["device_group_wait_seconds"] + group] = age / 40
        slots[INDEX["device_steps"]] = slots[INDEX["device_waits"]] = steps
    for field in ("collectives", "group_collectives", "steps"):
        slots[INDEX[field]] = steps
    slots[INDEX["step_buckets"] + 5], slots[INDEX["step_seconds"]] = steps, age


def main() -> None:
    directory, uid, owners, runs, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    kind, interval = sys.argv[6], float(sys.argv[7]) if len(sys.argv) > 7 else 0.0
    places = [(owner, run, rank) for owner in range(owners) for run in range(runs) for rank in range(ranks)]
    writers = []
    for owner, run, rank in places:
        slots = {"started_monotonic": time.monotonic(), "started_unix": time.time()}
        writer, path = publish(directory, f"{uid + owner}-{run}-{rank}", slots, **info(kind, f"r{run}", rank, ranks))
        os.chown(path, uid + owner, uid + owner)
        writers.append((writer, path))
    print("ready", flush=True)
    began, steps, turn, parent = time.monotonic(), 0, 0, os.getppid()
    while os.getppid() == parent:
        time.sleep(STEP)
        now, steps = time.monotonic(), steps + 1
        is_turn = interval and now - began > interval * (turn + 1)
        turn += bool(is_turn)
        for (writer, path), (owner, run, rank) in zip(writers, places, strict=True):
            if is_turn:
                os.chown(path, uid + turn * owners + owner, -1)
                writer.write_info(info(kind, f"r{run}-{turn}", rank, ranks))
                writer.slots[INDEX["started_monotonic"]] = now - 1.0
            advance(writer, kind, rank, steps, now)


if __name__ == "__main__":
    main()
