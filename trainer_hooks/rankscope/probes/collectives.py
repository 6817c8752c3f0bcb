"""Collectives that Python code calls through torch.distributed: their seconds and bytes by operation and group.

Not DDP's all-reduce, which C++ code calls (ddp.py measures its exposed wait), and not functional collectives
(functional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, strided
from torch.compiler import is_dynamo_compiling

from rankscope.foreign import items
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.batch_size import is_tensor
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.probes.span import Function, around
from rankscope.record import layout
from rankscope.record.layout import COLLECTIVE_WAIT, INDEX
from rankscope.timeline.groups import Group
from rankscope.timeline.phases import OPEN_OP, Phases
from rankscope.timeline.timeline import Timeline

Future: Any = torch._C.Future  # noqa: SLF001 - the class of these futures, and the base class of torch.futures.Future

COLLECTIVES = INDEX["collectives"]
COLLECTIVE_SECONDS = INDEX["collective_seconds"]
COLLECTIVE_DURATION = INDEX["collective_duration_seconds"]
COLLECTIVE_BYTES = INDEX["collective_bytes"]
COLLECTIVE_BUS_BYTES = INDEX["collective_bus_bytes"]
OPEN_GROUP = INDEX["collective_group"]

# ProcessGroup's method: the operation, and which argument holds this rank's payload (None: there is none). Some methods
# have several names because torch renamed them; C++ code never calls one of these through another.
METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "gather_single": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
# Not all ranks of the group call these, or not equally often: gloo's monitored barrier consists of sends.
POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
UNEVEN = POINT_TO_POINT | {"monitored_barrier"}

MAX_PENDING = 4096  # works not waited for yet; past that they are forgotten

# A wait that finds its collective complete does not know when it completed. If the wait follows the issue this closely
# (a synchronous call), the error is at most this.
MAX_GAP = 50e-6  # seconds
BARRIER = layout.OPS.index("barrier")  # has no tensors; its wait blocks the host on any device

Count = Callable[[Any], Group]


# Plain tuples: a named tuple takes five times as long to create, and each call creates four.
Payload = tuple[float, bool]  # bytes, and whether the host sees the collective's end: its tensors are on the CPU
# The operation, the group, the payload, the time before the issue and after it.
Pending = tuple[int, Group, Payload, float, float]
# The open phases (None: already left), the group, the operation in the record before, the time of the start.
Issue = tuple[Phases | None, Group, float, float]
# The open phases, the collective, the operation in the record before, the start; whether it completes in this wait.
Wait = tuple[Phases | None, Pending | None, float, float, bool]

NOTHING: Payload = (0.0, False)


class Collectives:
    """Counts collectives when they are issued and charges their waits to them.

    The record names the collective that the thread is in. If one calls another (a process group in Python), it names
    the outer one.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.groups = timeline.groups
        self._timeline = timeline
        # By a number, not by reference: keeping a work alive would keep its tensors alive.
        self._pending: dict[int, Pending] = {}

    def begin(self, process_group: Any, op: int, count: Count, on_behalf: bool = False) -> Issue | None:
        """Begin a collective: the training thread issues it, or waits for one that C++ code has issued.

        `count` is the method of `groups` that counts it and returns its group. The record is complete before the thread
        blocks. `on_behalf` as in `Timeline.enter`.
        """
        timeline = self._timeline
        opened = timeline.enter(COLLECTIVE_WAIT, on_behalf)
        if not opened:
            return None
        try:
            group = count(process_group)
        except BaseException:  # a process group of the job may raise anything
            timeline.leave(opened)
            raise
        slots = timeline.slots
        outer = slots[OPEN_OP]
        if not outer:
            slots[OPEN_GROUP] = group.index
            slots[OPEN_OP] = op + 1
        return opened, group, outer, timeline.last_event

    def end_issue(self, call: Issue, op: int, payload: Payload, key: int | None, is_awaited: bool = False) -> None:
        """Count an issued collective. A later wait finds it by `key`; None if there is nothing to wait for.

        If it `is_awaited`, its wait comes next and keeps the phase open: a synchronous call.
        """
        opened, group, outer, began = call
        size, is_on_host = payload
        timeline = self._timeline
        slots = timeline.slots
        slots[COLLECTIVES + op] += 1
        slots[COLLECTIVE_BYTES + op] += size
        if is_awaited and not outer:
            wait: Wait = opened, (op, group, payload, began, began), 0.0, began, is_on_host or op == BARRIER
            if timeline.keep_open(key, wait):
                return
        if opened is not None:
            timeline.leave(opened)
        now = timeline.last_event
        slots[OPEN_OP] = outer
        seconds = 0.0 if outer else now - began
        slots[COLLECTIVE_SECONDS + op] += seconds
        if group.wait_slot is not None:
            slots[group.wait_slot] += seconds
        if key is not None:
            if len(self._pending) >= MAX_PENDING:
                self._pending.clear()
            self._pending[key] = op, group, payload, began, now
        elif is_on_host or op == BARRIER:  # `add_completed`, inlined
            slots[COLLECTIVE_DURATION + op] += seconds
            slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]

    def abandon(self, call: Issue) -> None:
        """Drop a call whose end was not seen, because an exception passed by."""
        self._timeline.leave(call[0])
        self._timeline.slots[OPEN_OP] = call[2]

    def begin_wait(self, key: int, work: Any = None) -> Wait | None:
        """Begin a wait for a collective. `work`, if given, or its future knows whether the collective is complete."""
        timeline = self._timeline
        kept: Wait | None = timeline.resume(key)
        if kept is not None:
            return kept
        opened = timeline.enter(COLLECTIVE_WAIT)
        if not opened:
            return None
        slots = timeline.slots
        outer, began = slots[OPEN_OP], timeline.last_event
        pending = self._pending.pop(key, None)
        if pending is None:
            return opened, None, outer, began, False
        op, group, (_, is_on_host), _, issued = pending
        if not outer:
            slots[OPEN_GROUP] = group.index
            slots[OPEN_OP] = op + 1
        sees_end = is_on_host or op == BARRIER
        if began - issued >= MAX_GAP:  # do not query a device's work: that would break a CUDA graph capture
            sees_end = is_on_host and work is not None and not is_completed(work)
        return opened, pending, outer, began, sees_end

    def note_future(self, _call: bool, args: tuple[Any, ...], future: Any, _returned: bool) -> None:
        """Let a wait for the future of a work count as a wait for its collective."""
        pending = self._pending.get(id(args[0]))
        if pending is not None and future is not None:
            self._pending[id(future)] = pending

    def end_wait(self, call: Wait, is_complete: bool) -> None:
        """Charge a wait that has ended; `is_complete` unless it raised."""
        opened, pending, outer, began, sees_end = call
        timeline = self._timeline
        timeline.leave(opened)
        now = timeline.last_event
        slots = timeline.slots
        slots[OPEN_OP] = outer
        if pending is None:
            return
        op, group, (size, _), issue_began, _ = pending
        if not outer:
            slots[COLLECTIVE_SECONDS + op] += now - began
            if group.wait_slot is not None:
                slots[group.wait_slot] += now - began
        if is_complete and sees_end:  # `add_completed`, inlined
            slots[COLLECTIVE_DURATION + op] += now - issue_began
            slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]

    def add_completed(self, op: int, group: Group, duration: float, size: float) -> None:
        """Add a collective of `size` bytes that took `duration` seconds from issue to completion.

        Only for a known duration (from the host's clock or a device's events), so that bus bytes divided by duration is
        the bandwidth.
        """
        slots = self._timeline.slots
        slots[COLLECTIVE_DURATION + op] += duration
        slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]


def is_completed(work: Any) -> bool:
    """Return whether a work, or the future of one, is completed. True for a work of the job's own type."""
    if issubclass(type(work), Future):
        return bool(Future.done(work))
    return type(work) is not dist.Work or bool(work.is_completed())


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a payload: one, or nested lists of them."""
    if is_tensor(value):
        return [value]
    return [tensor for item in items(value) or () for tensor in tensors(item)]


def measure(value: Any) -> Payload:
    """Return the payload in an argument of a collective. Sparse tensors count 0 bytes: their size is expensive."""
    first = value[0] if type(value) is list and len(value) == 1 else value
    if type(first) is Tensor and first.layout is strided:  # nearly always
        return first.nbytes, first.is_cpu
    found = tensors(value)
    size = float(sum([tensor.nbytes for tensor in found if tensor.layout is strided]))
    return size, bool(found) and found[0].is_cpu


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the methods of ProcessGroup, and the waits for them. Does nothing without torch.distributed."""
    if not dist.is_available():
        return []
    collectives = Collectives(timeline)
    methods = [name for name in METHODS if hasattr(dist.ProcessGroup, name)]
    watches = [replace(dist.ProcessGroup, name, _issue(collectives, guard, name)) for name in methods]
    futures = around(guard, lambda _args, _kwargs: True, collectives.note_future)
    return [
        *watches,
        replace(dist.Work, "wait", _wait(collectives, guard)),
        replace(dist.Work, "get_future", futures),
        replace(Future, "wait", _wait(collectives, guard)),
    ]


def option_types() -> frozenset[type]:
    """Return torch's types of a collective's options."""
    classes = vars(torch._C._distributed_c10d)  # noqa: SLF001 - not all of them have a public name
    return frozenset(kind for name, kind in classes.items() if name.endswith("Options"))


def _issue(collectives: Collectives, guard: Guard, name: str) -> Callable[[Function], Function]:
    """Wrap the process group's method `name`: count its collective and charge the time of the call."""
    op, index = layout.OPS.index(METHODS[name][0]), METHODS[name][1]
    at = 0 if index is None else index + 1  # index in the method's arguments; the first is the process group
    is_uneven, work_class = name in UNEVEN, dist.Work  # a Python subclass has its own wait
    begin, end_issue, groups = collectives.begin, collectives.end_issue, collectives.groups
    options = option_types()
    count = groups.catch_up if name in POINT_TO_POINT else groups.count_next
    for called in (begin, end_issue, measure, groups.skip):
        skip_call(called)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.disabled or is_dynamo_compiling():
                return original(*args, **kwargs)
            call = work = None
            try:
                call = begin(args[0], op, count)
            except BaseException as error:
                guard.handle(error)
            try:
                work = original(*args, **kwargs)
                return work
            finally:
                if call is not None:
                    try:
                        payload = measure(args[at]) if at and at < len(args) else NOTHING
                        if type(work) is work_class:
                            # asyncOp is False (since torch 2.8) in torch's own synchronous functions, which wait next.
                            is_awaited = type(args[-1]) in options and getattr(args[-1], "asyncOp", True) is False
                            end_issue(call, op, payload, id(work), is_awaited)
                        else:
                            end_issue(call, op, payload, None if work is None else id(work))
                        if is_uneven:
                            groups.skip(call[1], args[0])
                    except BaseException as error:
                        guard.handle(error)

        return skip_frame(watched)

    return wrap


def _wait(collectives: Collectives, guard: Guard) -> Callable[[Function], Function]:
    """Wrap `Work.wait`, or that of its future: charge the wait to the work's collective."""
    begin_wait, end_wait = collectives.begin_wait, collectives.end_wait
    skip_call(begin_wait)
    skip_call(end_wait)

    def wrap(original: Function) -> Function:
        def watched(work: Any, *args: Any, **kwargs: Any) -> Any:
            if guard.disabled or is_dynamo_compiling():
                return original(work, *args, **kwargs)
            call, returned = None, False
            try:
                call = begin_wait(id(work), work)
            except BaseException as error:
                guard.handle(error)
            try:
                result = original(work, *args, **kwargs)
                returned = True
                return result
            finally:
                if call is not None:
                    try:
                        end_wait(call, returned)
                    except BaseException as error:
                        guard.handle(error)

        return skip_frame(watched)

    return wrap
