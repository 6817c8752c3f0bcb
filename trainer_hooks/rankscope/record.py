"""The rank record: which fields it has and where they lie. The contract between the hook and the exporter.

A record is one file of `SIZE` bytes a rank:

    0      header        magic, version, size, layout digest: written once, before the file has its name
    64     slots         float64 each, 8-byte aligned: a store is one machine word, so no reader sees half of it
    4096   info          JSON (identity, names of phases), guarded by the slot `info_sequence`
    12288  last words    empty, or what faulthandler wrote when SIGTERM came

Counters are float64 too: exact for whole numbers up to 2**53. Times are seconds of CLOCK_MONOTONIC, which all
processes of a machine share; `started_unix` ties them to the calendar. Fields are only ever changed together
with the layout digest, so a reader of another version says so instead of misreading.

Each slot makes sense alone, so nothing has to be read together and no sequence word is on the hot path. At every event
the time since the last one is charged to the phase that was open; so the sum of all phases, counted from the start,
*is* the time of the last event, and what is missing to now belongs to the phase that is open.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import accumulate

MAGIC = b"RANKSCOP"
VERSION = 1
SIZE = 16384
HEADER = struct.Struct("<8sII8s")
SLOTS_OFFSET = 64
INFO_OFFSET = 4096
LAST_WORDS_OFFSET = 12288

# The first phases of every record; the user's own follow, up to MAX_PHASES, named in the info.
PHASES = (
    "other",
    "startup",
    "data_wait",
    "forward",
    "backward",
    "collective_wait",
    "optimizer",
    "checkpoint",
    "evaluation",
)
OTHER, STARTUP, DATA_WAIT, FORWARD, BACKWARD, COLLECTIVE_WAIT, OPTIMIZER, CHECKPOINT, EVALUATION = range(9)
MAX_PHASES = 32

# These absorb what they contain: a data wait within an evaluation is evaluation.
ABSORBING = frozenset({STARTUP, CHECKPOINT, EVALUATION})

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "ddp_all_reduce",
    "ddp_broadcast",
)

# Upper bounds of the step-time histogram, in seconds: a factor of about two apart, because what a chart needs
# is the shape over five decades (a toy step takes a millisecond, an accumulated one minutes).
STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# How a rank ended; 0 while it runs. A free lock with 0 here and no last words means: killed.
RUNNING, FINISHED, EXCEPTION, INTERRUPTED = 0.0, 1.0, 2.0, 3.0
ENDINGS = {FINISHED: "finished", EXCEPTION: "exception", INTERRUPTED: "interrupted"}

FIELDS = {
    "info_sequence": 1,  # odd while the info is being changed
    "info_length": 1,  # bytes
    "started_monotonic": 1,
    "started_unix": 1,
    "phase": 1,  # the phase that is open, as an index
    "phase_since": 1,  # monotonic
    "steps": 1,
    "step_seconds": 1,  # the histogram's sum
    "step_buckets": len(STEP_BOUNDS) + 1,  # counts, not cumulated; the last is +Inf
    "phase_seconds": MAX_PHASES,  # up to the last event: the reader adds the open phase
    "collectives": len(OPS),
    "collective_seconds": len(OPS),
    "collective_bytes": len(OPS),
    "ended": 1,
    "ended_unix": 1,
}
PLACES = dict(zip(FIELDS, accumulate([0, *FIELDS.values()]), strict=False))
SLOTS = sum(FIELDS.values())
INFO_CAPACITY = LAST_WORDS_OFFSET - INFO_OFFSET
LAYOUT = hashlib.sha256(repr((FIELDS, PHASES, OPS, STEP_BOUNDS)).encode()).digest()[:8]

assert SLOTS_OFFSET + 8 * SLOTS <= INFO_OFFSET


def header() -> bytes:
    """The bytes that every record of this version begins with."""
    return HEADER.pack(MAGIC, VERSION, SIZE, LAYOUT)
