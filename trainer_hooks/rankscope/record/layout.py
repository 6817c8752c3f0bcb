"""The rank record: its fields and their offsets. The contract between the hook and the exporter.

A record is one file of `SIZE` bytes per rank. Each part begins on a page:

    0      header        magic, version, size, layout digest: written once, before the file gets its name
    64     slots         float64, 8-byte aligned: a store is one machine word, so no reader sees half of it
    4096   info          JSON (identity, names of phases and groups), guarded by the slot `info_sequence`
    12288  ring          the last steps: float64 copies of the slots at the end of each
    28672  device ring   the last steps that were measured by the device's clock
    32768  last words    empty, or what faulthandler wrote on SIGTERM: at the end, because it may be long

Counters are float64: exact for whole numbers up to 2**53. Times are seconds of CLOCK_MONOTONIC, which all processes of
a machine share until the next boot; the info's `boot_id` identifies the boot. A process in a time namespace has a clock
of its own: the info's `clocks` has its offset, and readers convert its times to their own clock. All unix times belong
to one setting of the clock: if it was set, all change when one is written. Every change of the fields changes the
layout digest, so that a reader of another version reports that instead of misreading.

Each slot is valid by itself, so the fast path needs no sequence word. At each event, the time since the last event is
charged to the open phase. So the start plus the sum of all phases is the time of the last event, and the time from
there to now belongs to the open phase.

A new info is written next to the old one if both fit, then published by one store. So even if the process is killed,
the slot `info_place` points to a complete text.

Step n is entry n % RING_STEPS of the ring, and is written before `steps` becomes n. A reader that reads `steps` before
and after the ring knows which entries did not change in between. The device ring works the same, with the counter
`device_steps`.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import accumulate

from rankscope.record import phases

MAGIC = b"RANKSCOP"
VERSION = 4
HEADER = struct.Struct("<8sII8s")
SLOTS_OFFSET = 64
PAGE = 4096  # bytes: each part begins on one
INFO_CAPACITY = 2 * PAGE
LAST_WORDS_CAPACITY = PAGE  # longer ones extend the file

PHASE_NAMES_CAPACITY = 3 * 1024  # bytes in the info for the names of the script's phases

# The first phases of every record. The script's own follow, up to MAX_PHASES, named in the info.
PHASES = phases.NAMES
MAX_PHASES = 32
OTHER = PHASES.index("other")
STARTUP = PHASES.index("startup")
DATA_WAIT = PHASES.index("data_wait")
H2D_COPY = PHASES.index("h2d_copy")
FORWARD = PHASES.index("forward")
BACKWARD = PHASES.index("backward")
COLLECTIVE_WAIT = PHASES.index("collective_wait")
DEVICE_WAIT = PHASES.index("device_wait")
OPTIMIZER = PHASES.index("optimizer")
CHECKPOINT = PHASES.index("checkpoint")
EVALUATION = PHASES.index("evaluation")

# These absorb what they contain: a data wait in an evaluation is evaluation.
ABSORBS = tuple(phase < len(PHASES) and phases.PHASES[phase].planned for phase in range(MAX_PHASES))

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

# Upper bounds of the step-time histogram in seconds, about a factor of two apart: a chart needs the shape over five
# decades (a toy step takes a millisecond, an accumulated one minutes).
STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# How a rank ended; 0 while it runs. A released lock with 0 here and no last words means that it was killed. A rank that
# has left its process group has finished its work but may still run; its actual end may replace this value.
RUNNING, FINISHED, EXCEPTION, INTERRUPTED, LEFT_GROUP = 0.0, 1.0, 2.0, 3.0, 4.0
NOT_ENDED = (RUNNING, LEFT_GROUP)
# The memory that was exhausted, if the exception that ended a rank says so: the GPU's, the host's, /dev/shm. `worker`:
# a loader worker was killed, which the kernel does if the host's memory is exhausted. The field has its index + 1.
EXHAUSTED = ("device", "host", "shared", "worker")
ENDINGS = {FINISHED: "finished", EXCEPTION: "exception", INTERRUPTED: "interrupted", LEFT_GROUP: "finished"}

LOGGED = ("loss", "gradient_norm")  # values that loggers get, as numbers

MAX_GROUPS = 16  # groups of ranks that this rank synchronizes with, named in the info
GC_GENERATIONS = 3

LOADER_WORKER_STATES = ("working", "idle")  # making a batch (including waits for storage); waiting for work

# Settings that may explain a run's speed: the labels of rankscope_rank_settings_info, in the info.
SETTINGS = (
    "step_marker",
    "parallelism",
    "precision",
    "loader_workers",
    "pin_memory",
    "batch_size",
    "accumulation_steps",
    "comm_hook",
    "bucket_bytes",
    "compiled",
)

# Values of the rank's Slurm job in the info.
SLURM = ("job_id", "sluid", "job_name", "account", "partition")
TRACKERS = ("wandb", "mlflow", "tensorboard")  # the info may have the ID and URL of their runs

# What marks the steps. Each permanently replaces those before it, and no step counts twice.
STEP_MARKERS = ("", "backward_pass", "optimizer", "script")
# After this many backward passes without a step, each counts as a step: in loops that update parameters without an
# optimizer, or with a compiled step. A loop that accumulates over more is corrected by its first step. It is a number,
# not a time, so that all ranks reach it in the same pass and number their steps alike.
PASSES_WITHOUT_STEP = 100

FIELDS = {
    "info_sequence": 1,  # grows by 2 with each change; odd while a new info overwrites the old one
    "info_place": 1,  # of the text in the info: its offset * 2**16 + its bytes, so that one store publishes a new text
    "started_monotonic": 1,
    "started_unix": 1,
    "ended": 1,
    "ended_unix": 1,
    "step_buckets": len(STEP_BOUNDS) + 1,  # the histogram's counts, not cumulated; the last is +Inf
    # Slots that change at every event are adjacent, because they are written with cold caches.
    "step_seconds": 1,  # the histogram's sum
    "steps": 1,  # marked by one of STEP_MARKERS
    "micro_steps": 1,  # backward passes
    # An entry of the ring copies the slots from here to the last of PHASES.
    "samples": 1,
    "tokens": 1,
    "phase_seconds": MAX_PHASES,  # up to the last event: the reader adds the open phase
    "phase": 1,  # index of the open phase
    "phase_since": 1,  # monotonic, of a phase that absorbs what it contains; 0: open since the last event
    "device_steps": 1,  # fully measured by the device's clock
    "device_seconds": MAX_PHASES,  # device time of these steps by phase
    "device_dry_seconds": MAX_PHASES,  # of that, while the device was idle: it had done all issued work
    "device_waits": 1,  # waits of the host for the device
    "collectives": len(OPS),
    "collective_seconds": len(OPS),  # exposed: the training thread's waits
    "collective_duration_seconds": len(OPS),  # from issue to completion, overlapped or not; 0 if not known
    "collective_bytes": len(OPS),  # payload
    "collective_bus_bytes": len(OPS),  # load of each rank's link, as in NCCL-tests' bus bandwidth
    "collective_op": 1,  # the training thread's current one: its index + 1; 0 in none
    "collective_group": 1,  # and its group's index
    "group_collectives": MAX_GROUPS,  # sequence number of the last issued collective
    "group_wait_seconds": MAX_GROUPS,  # exposed
    "device_group_wait_seconds": MAX_GROUPS,  # the same in the device's time, of the steps measured on it
    "checkpoints": 1,
    "checkpoint_bytes": 1,
    "checkpoint_last_seconds": 1,
    "checkpoint_last_bytes": 1,
    "checkpoint_last_unix": 1,
    "gc_collections": GC_GENERATIONS,
    "gc_seconds": GC_GENERATIONS,
    "copies": 1,  # from the host to a device, waited for by the training thread
    "copy_bytes": 1,
    "loader_worker_seconds": len(LOADER_WORKER_STATES),
    "amp_scale": 1,  # 0 without a gradient scaler
    "amp_skipped_steps": 1,
    "cuda_allocated_bytes": 1,
    "cuda_reserved_bytes": 1,
    "cuda_peak_allocated_bytes": 1,
    "cuda_allocation_retries": 1,
    "cuda_out_of_memory": 1,
    "device_capacity_bytes": 1,  # of the device, or of the part that this process may use; 0 if not known
    "exhausted_memory": 1,  # one of EXHAUSTED: its index + 1; 0 for none
    "exhausted_in_phase": 1,  # the index of the phase + 1; 0 if not known
    "exhausted_request_bytes": 1,  # of the allocation that failed; 0 if not known
    "lost_peer": 1,  # 1 if the exception that ended the rank says that its connection to another rank broke
    "logged_values": len(LOGGED),  # steps of which one was logged
    "not_finite_values": len(LOGGED),  # the last ones of these: NaN or infinite
    "not_finite_since_step": len(LOGGED),  # the step of the first of them
}
MONOTONIC = ("started_monotonic", "phase_since")  # the fields with a time by the rank's clock; 0 is none
# The index of each field's first slot.
INDEX = dict(zip(FIELDS, accumulate([0, *FIELDS.values()]), strict=False))
SLOTS = sum(FIELDS.values())
INFO_OFFSET_UNIT = 2**16  # longer than any text

# An entry of the ring: the step's number, its end (monotonic), a copy of the slots from `samples` on.
RING_STEPS = 128
RING_COPIES = INDEX["phase_seconds"] + len(PHASES) - INDEX["samples"]
RING_WIDTH = 2 + RING_COPIES
COPIED = slice(INDEX["samples"], INDEX["samples"] + RING_COPIES)
RING_SLOTS = RING_STEPS * RING_WIDTH

# An entry of the device ring: its number among the measured steps, the step's number, its end on the host (monotonic),
# the number of collectives that the default group had issued by then, the device's seconds by phase.
DEVICE_RING_STEPS = 32
DEVICE_RING_WIDTH = 4 + len(PHASES)
DEVICE_RING_SLOTS = DEVICE_RING_STEPS * DEVICE_RING_WIDTH

LAYOUT = hashlib.sha256(repr((FIELDS, PHASES, OPS, STEP_BOUNDS, RING_STEPS, DEVICE_RING_STEPS)).encode()).digest()[:8]


def _page_from(offset: int) -> int:
    """Return the start of the first page at or after `offset`."""
    return -(-offset // PAGE) * PAGE


INFO_OFFSET = _page_from(SLOTS_OFFSET + 8 * SLOTS)
RING_OFFSET = INFO_OFFSET + INFO_CAPACITY
DEVICE_RING_OFFSET = _page_from(RING_OFFSET + 8 * RING_SLOTS)
LAST_WORDS_OFFSET = _page_from(DEVICE_RING_OFFSET + 8 * DEVICE_RING_SLOTS)
SIZE = LAST_WORDS_OFFSET + LAST_WORDS_CAPACITY


def header() -> bytes:
    """Return the first bytes of every record of this version."""
    return HEADER.pack(MAGIC, VERSION, SIZE, LAYOUT)
