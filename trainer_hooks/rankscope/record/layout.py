"""The rank record: which fields it has and where they lie. The contract between the hook and the exporter.

A record is one file of `SIZE` bytes a rank, each part of which begins on a page:

    0      header        magic, version, size, layout digest: written once, before the file has its name
    64     slots         float64 each, 8-byte aligned: a store is one machine word, so no reader sees half of it
    4096   info          JSON (identity, names of phases and groups), guarded by the slot `info_sequence`
    12288  ring          the last steps, float64 too: what the slots were when each ended
    28672  device ring   the last steps that were measured on the device, by its own clock
    32768  last words    empty, or what faulthandler wrote when SIGTERM came: at the end, because it may be long

Counters are float64 too: exact for whole numbers up to 2**53. Times are seconds of CLOCK_MONOTONIC, which all
processes of a machine share until it boots again; the info's `boot_id` says which boot that was. Unix times are by one
setting of the clock: all are changed when one is written and the clock was set meanwhile. Fields are only ever changed
together with the layout digest, so a reader of another version says so instead of misreading.

Each slot makes sense alone, so nothing has to be read together and no sequence word is on the fast path. At every event
the time since the last one is charged to the phase that was open; so the sum of all phases, counted from the start,
*is* the time of the last event, and what is missing to now belongs to the phase that is open.

A new info is written beside the old one where both fit, then named by one store: whenever the process is killed, the
slot `info_place` names a whole text.

Step n is entry n % RING_STEPS of the ring, and is written before `steps` becomes n: a reader who takes `steps`
before and after the ring knows which entries nobody touched in between. The device ring is written likewise, with the
counter `device_steps`.
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
LAST_WORDS_CAPACITY = PAGE  # more is appended to the file

PHASE_NAMES_CAPACITY = 3 * 1024  # bytes of the info that the names of the script's phases may take

# The first phases of every record; the user's own follow, up to MAX_PHASES, named in the info.
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

# These absorb what they contain: a data wait within an evaluation is evaluation.
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

# Upper bounds of the step-time histogram, in seconds: a factor of about two apart, because what a chart needs
# is the shape over five decades (a toy step takes a millisecond, an accumulated one minutes).
STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# How a rank ended; 0 while it runs. A free lock with 0 here and no last words means: killed. A rank that has left its
# process group has finished its work and may still run; how it ends may replace that.
RUNNING, FINISHED, EXCEPTION, INTERRUPTED, LEFT_GROUP = 0.0, 1.0, 2.0, 3.0, 4.0
NOT_ENDED = (RUNNING, LEFT_GROUP)
ENDINGS = {FINISHED: "finished", EXCEPTION: "exception", INTERRUPTED: "interrupted", LEFT_GROUP: "finished"}

MAX_GROUPS = 16  # groups of ranks that this rank synchronizes with, named in the info
GC_GENERATIONS = 3

LOADER_WORKER_STATES = ("working", "idle")  # making a batch, waiting for storage included; having none to make

# What was chosen for the run and may explain its speed: the labels of rankscope_rank_settings_info, named in the info.
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

# What the info may say of the rank's Slurm job.
SLURM = ("job_id", "sluid", "job_name", "account", "partition")
TRACKERS = ("wandb", "mlflow", "tensorboard")  # whose run's id and URL the info may have

# What marks the steps. Each takes over for good from those before it, and no step is counted twice.
STEP_MARKERS = ("", "backward_pass", "optimizer", "script")
# After so many backward passes without a step each of them is one: in a loop that updates its parameters by hand, or
# whose optimizer's step is compiled. Few accumulate more; those are put right by their first step. It is a number and
# no time, so that all ranks come to it in the same pass: their steps have the same numbers.
PASSES_WITHOUT_STEP = 100

FIELDS = {
    "info_sequence": 1,  # 2 more with each change; odd while a new info overwrites the old one
    "info_place": 1,  # of the text within the info: its offset * 2**16 + its bytes, so that one store names a new text
    "started_monotonic": 1,
    "started_unix": 1,
    "ended": 1,
    "ended_unix": 1,
    "step_buckets": len(STEP_BOUNDS) + 1,  # the histogram's counts, not cumulated; the last is +Inf
    # What changes at every event stands together, as it is touched when nothing of ours is in the caches.
    "step_seconds": 1,  # the histogram's sum
    "steps": 1,  # as STEP_MARKERS
    "micro_steps": 1,  # backward passes
    # From here to the last of PHASES the slots are what an entry of the ring copies.
    "samples": 1,
    "tokens": 1,
    "phase_seconds": MAX_PHASES,  # up to the last event: the reader adds the open phase
    "phase": 1,  # the phase that is open, as an index
    "phase_since": 1,  # monotonic, of a phase that absorbs what it contains; 0: it is open since the last event
    "device_steps": 1,  # measured by the device's clock from begin to end
    "device_seconds": MAX_PHASES,  # the same phases in the device's time, of these steps
    "device_dry_seconds": MAX_PHASES,  # of that, while the device had done all that was issued
    "device_waits": 1,  # of the host for the device
    "collectives": len(OPS),
    "collective_seconds": len(OPS),  # exposed: what the training thread waited
    "collective_duration_seconds": len(OPS),  # from issue to completion, overlapped or not; 0 where it is not known
    "collective_bytes": len(OPS),  # payload
    "collective_bus_bytes": len(OPS),  # what that means for each rank's link, after NCCL-tests' bus bandwidth
    "collective_op": 1,  # that the training thread is in: its index + 1; 0 in none
    "collective_group": 1,  # and with whom: the group's index
    "group_collectives": MAX_GROUPS,  # sequence number of the last collective that was issued
    "group_wait_seconds": MAX_GROUPS,  # exposed
    "device_group_wait_seconds": MAX_GROUPS,  # the same in the device's time, of the steps measured on it
    "checkpoints": 1,
    "checkpoint_bytes": 1,
    "checkpoint_last_seconds": 1,
    "checkpoint_last_bytes": 1,
    "checkpoint_last_unix": 1,
    "gc_collections": GC_GENERATIONS,
    "gc_seconds": GC_GENERATIONS,
    "copies": 1,  # from the host to a device, that the training thread waited for
    "copy_bytes": 1,
    "loader_worker_seconds": len(LOADER_WORKER_STATES),
    "amp_scale": 1,  # 0 without a gradient scaler
    "amp_skipped_steps": 1,
    "cuda_allocated_bytes": 1,
    "cuda_reserved_bytes": 1,
    "cuda_peak_allocated_bytes": 1,
    "cuda_allocation_retries": 1,
    "cuda_out_of_memory": 1,
}
# Of each field, the index of its first slot.
INDEX = dict(zip(FIELDS, accumulate([0, *FIELDS.values()]), strict=False))
SLOTS = sum(FIELDS.values())
INFO_OFFSET_UNIT = 2**16  # a text is shorter

# An entry of the ring: the step's number, its end (monotonic), then a copy of the slots from `samples` on.
RING_STEPS = 128
RING_COPIES = INDEX["phase_seconds"] + len(PHASES) - INDEX["samples"]
RING_WIDTH = 2 + RING_COPIES
COPIED = slice(INDEX["samples"], INDEX["samples"] + RING_COPIES)
RING_SLOTS = RING_STEPS * RING_WIDTH

# An entry of the device ring: which measured step it is, the step's number, its end on the host (monotonic), the
# collectives that the default group had issued by then, then the device's seconds by phase.
DEVICE_RING_STEPS = 32
DEVICE_RING_WIDTH = 4 + len(PHASES)
DEVICE_RING_SLOTS = DEVICE_RING_STEPS * DEVICE_RING_WIDTH

LAYOUT = hashlib.sha256(repr((FIELDS, PHASES, OPS, STEP_BOUNDS, RING_STEPS, DEVICE_RING_STEPS)).encode()).digest()[:8]


def _page_from(offset: int) -> int:
    """Where the first page begins that is not before `offset`."""
    return -(-offset // PAGE) * PAGE


INFO_OFFSET = _page_from(SLOTS_OFFSET + 8 * SLOTS)
RING_OFFSET = INFO_OFFSET + INFO_CAPACITY
DEVICE_RING_OFFSET = _page_from(RING_OFFSET + 8 * RING_SLOTS)
LAST_WORDS_OFFSET = _page_from(DEVICE_RING_OFFSET + 8 * DEVICE_RING_SLOTS)
SIZE = LAST_WORDS_OFFSET + LAST_WORDS_CAPACITY


def header() -> bytes:
    """The bytes that every record of this version begins with."""
    return HEADER.pack(MAGIC, VERSION, SIZE, LAYOUT)
