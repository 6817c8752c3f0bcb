"""Noting what the exception that ends a rank says: which memory was exhausted in which phase, or that a peer is gone.

All of it is in the exception: its type and text, the exceptions that it was raised from, and the frames of the
traceback. The phases are over when it ends the process.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

CHAIN_LIMIT, FRAMES_LIMIT = 16, 1000
EXHAUSTED, PHASE = INDEX["exhausted_memory"], INDEX["exhausted_in_phase"]
REQUESTED, CAPACITY = INDEX["exhausted_request_bytes"], INDEX["device_capacity_bytes"]
LOST_PEER = INDEX["lost_peer"]
DEVICE, HOST, SHARED, WORKER = (layout.EXHAUSTED.index(name) + 1 for name in ("device", "host", "shared", "worker"))

# Texts of torch, CUDA's libraries, NCCL and the DataLoader. torch's own type for the device is checked first.
TEXTS = (
    (SHARED, re.compile(r"out of shared memory|insufficient shared memory|(shared memory|/torch_).*No space left")),
    (WORKER, re.compile(r"DataLoader worker .*killed by signal: Killed")),
    (HOST, re.compile(r"DefaultCPUAllocator: |not enough memory: you tried to allocate|Cannot allocate memory")),
    (DEVICE, re.compile(r"(CUDA|HIP|Cuda|nccl\w*Error)\b.*out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED")),
)
# Texts of gloo, NCCL and torch's store of a rank whose peer has ended, or is not reachable any more.
LOST = re.compile(
    r"gloo/transport.*((closed|reset) by peer|Broken pipe)|ncclRemoteError|NCCL.*remote process exited"
    r"|remote server shutdown|on SocketImpl.*(got 0 bytes|reset by peer|Broken pipe)",
    re.DOTALL,
)
SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB|TiB)"
REQUEST = re.compile(rf"Tried to allocate {SIZE}")
CAPACITIES = (re.compile(rf"{SIZE} allowed"), re.compile(rf"total capacity of {SIZE}"))  # the first limits the process
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}

# Where a phase shows in a traceback: a module of torch, and the functions of it that count (empty: all).
FRAMES: tuple[tuple[int, str, frozenset[str]], ...] = (
    (layout.CHECKPOINT, "torch.serialization", frozenset({"save", "_save"})),
    (layout.CHECKPOINT, "torch.distributed.checkpoint.state_dict_saver", frozenset()),
    (layout.BACKWARD, "torch.autograd", frozenset()),
    (layout.BACKWARD, "torch.autograd.graph", frozenset({"_engine_run_backward"})),
    (layout.FORWARD, "torch.nn.modules.module", frozenset({"_call_impl", "_wrapped_call_impl"})),
    (layout.OPTIMIZER, "torch.optim", frozenset()),
)
PLANNED = (layout.CHECKPOINT, layout.EVALUATION)
# The first of these that is in the traceback: an optimizer's closure runs the model, and a backward pass may run
# modules again (activation checkpointing).
ORDER = (*PLANNED, layout.BACKWARD, layout.FORWARD, layout.OPTIMIZER, layout.H2D_COPY)


class Exhaustion:
    """Notes in the record what memory was exhausted, before the end of the process is noted."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._left: tuple[int, int] | None = None

    def note_left(self, phase: int, error: BaseException | None) -> None:
        """Note that this exception has left a phase of the script, which its traceback does not show."""
        self._left = phase, id(error)

    def note(self, error: BaseException | None) -> None:
        """Write to the record what the exception that ends this process says about memory or a peer, if it does."""
        self._timeline.slots[LOST_PEER] = float(has_lost_peer(error))
        if (found := exhausted(error)) is None:
            return
        memory, cause = found
        if memory == DEVICE:
            self._timeline.job.read_allocator()
        slots = self._timeline.slots
        slots[REQUESTED] = _bytes(REQUEST, cause)
        capacity = next((size for one in CAPACITIES if (size := _bytes(one, cause))), 0.0)
        slots[CAPACITY] = min(capacity or slots[CAPACITY], slots[CAPACITY] or capacity)
        slots[PHASE] = 1 + self._phase(error, cause)
        slots[EXHAUSTED] = memory

    def _phase(self, error: BaseException | None, cause: BaseException) -> int:
        """Return the phase of the exception; -1 if it is not known."""
        errors = {id(one) for one in islice(_chain(error), CHAIN_LIMIT)}
        left = self._left[0] if self._left and self._left[1] in errors else None
        found = left if left in PLANNED else phase_of(cause)
        # An optimizer's phase is still open: its hook at the end is not called.
        rest = (left, self._timeline.open_phases[0])
        return next((one for one in (found, *rest) if one not in (None, layout.OTHER, layout.STARTUP)), -1)


def exhausted(error: BaseException | None) -> tuple[int, BaseException] | None:
    """Return the memory that was exhausted, as the field of the record has it, and the exception that says so.

    The first one of the chain counts: a script may raise another one, or exit, because of it.
    """
    for one in islice(_chain(error), CHAIN_LIMIT):
        if memory := _memory(one):
            return memory, one
    return None


def has_lost_peer(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, says that the connection to another rank broke."""
    return any(isinstance(one, RuntimeError) and LOST.search(str(one)) for one in islice(_chain(error), CHAIN_LIMIT))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _memory(error: BaseException) -> int:
    if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
        return DEVICE
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return HOST
    if not isinstance(error, RuntimeError | OSError):
        return 0
    text = str(error)
    found = next((memory for memory, pattern in TEXTS if pattern.search(text)), 0)
    # CUDA has the same words for the host's memory that it cannot pin.
    is_pinning = found == DEVICE and any("pin_memory" in one.f_code.co_name for one in _frames(error))
    return HOST if is_pinning else found


def _bytes(pattern: re.Pattern[str], error: BaseException) -> float:
    """Return a size in torch's text; 0 if it has none."""
    found = pattern.search(str(error))
    return float(found[1]) * UNITS[found[2]] if found else 0.0


def phase_of(error: BaseException) -> int | None:
    """Return the phase in which the exception was raised, by its traceback; None if no frame shows one."""
    phases = {phase for frame in _frames(error) if (phase := _phase(frame)) is not None}
    return next((phase for phase in ORDER if phase in phases), None)


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    for _ in range(FRAMES_LIMIT):
        if trace is None:
            return
        yield trace.tb_frame
        trace = trace.tb_next


def _phase(frame: FrameType) -> int | None:
    module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module.startswith("rankscope."):
        # The probes' wrappers keep the phase that they have opened, and the phases around it.
        opened: Any = frame.f_locals.get("opened") if "opened" in frame.f_code.co_varnames else None
        return opened[0] if type(opened) is tuple and type(opened[0]) is int else None
    for phase, name, functions in FRAMES:
        is_inside = module == name or (name == "torch.optim" and module.startswith("torch.optim."))
        if is_inside and (not functions or function in functions):
            return phase
    return None
