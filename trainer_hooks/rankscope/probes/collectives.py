"""Plain collectives: what the script calls through torch.distributed, by operation and group, seconds and bytes.

DDP's own all-reduce happens in C++ and does not pass here (ddp.py measures its exposed wait), nor do functional
collectives (functional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, strided
from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.probes.span import Function
from rankscope.record import layout
from rankscope.record.layout import COLLECTIVE_WAIT, INDEX
from rankscope.timeline.groups import Group
from rankscope.timeline.phases import OPEN_OP, Phases
from rankscope.timeline.timeline import Timeline

COLLECTIVES = INDEX["collectives"]
COLLECTIVE_SECONDS = INDEX["collective_seconds"]
COLLECTIVE_DURATION = INDEX["collective_duration_seconds"]
COLLECTIVE_BYTES = INDEX["collective_bytes"]
COLLECTIVE_BUS_BYTES = INDEX["collective_bus_bytes"]
OPEN_GROUP = INDEX["collective_group"]

# ProcessGroup's method: the operation, and which argument holds this rank's payload (None: there is none). One method
# has several names, as torch renamed it; C++ code never calls one through another.
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
# Not everybody of the group does these, or not equally often: gloo's monitored barrier is made of sends.
POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
UNEVEN = POINT_TO_POINT | {"monitored_barrier"}

MAX_PENDING = 4096  # works that nobody has waited for yet; past that they are forgotten, not kept alive

# A wait that finds its collective complete cannot know when that was. Where it follows so closely upon the issue (a
# synchronous call), the answer is this exact all the same.
TIGHT = 50e-6  # seconds
BARRIER = layout.OPS.index("barrier")  # has no tensors; its wait blocks the host whatever the device

Count = Callable[[Any], Group]


# Plain tuples, as a named one costs five times as much to make, and four a call are made:
Payload = tuple[float, bool]  # bytes, and whether the host sees the collective's end: its tensors are on the CPU
# The operation, the group, the payload, when it began to be issued and when it was issued.
Pending = tuple[int, Group, Payload, float, float]
# Of the phase (None: it has ended already), the group, what the record said before, when it began.
Issue = tuple[Phases | None, Group, float, float]
Wait = tuple[
    Phases | None, Pending | None, float, float, bool
]  # likewise; whether the wait's end will be the collective's

NOTHING: Payload = (0.0, False)


class Collectives:
    """Counts collectives when they are issued and charges their waits to them.

    What the record says of the collective that the thread is in: of one within another (a process group written in
    Python), the outer.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.groups = timeline.groups
        self._timeline = timeline
        # By a number and without a reference: keeping a work alive would keep its tensors alive.
        self._pending: dict[int, Pending] = {}

    def begin(self, process_group: Any, op: int, count: Count, on_behalf: bool = False) -> Issue | None:
        """The training thread issues a collective, or is about to wait for what C++ code has issued.

        `count` is the method of `groups` that counts it and gives its group; so the record says it all before the
        thread blocks. `on_behalf` as in `Timeline.enter`.
        """
        timeline = self._timeline
        opened = timeline.enter(COLLECTIVE_WAIT, on_behalf)
        if not opened:
            return None
        group = count(process_group)
        slots = timeline.slots
        outer = slots[OPEN_OP]
        if not outer:
            slots[OPEN_GROUP] = group.index
            slots[OPEN_OP] = op + 1
        return opened, group, outer, timeline.last_event

    def issued(self, call: Issue, op: int, payload: Payload, key: int | None, is_awaited: bool = False) -> None:
        """The call returned. `key` is what a later wait will name it by; None if there is nothing to wait for.

        If it `is_awaited`, its wait comes next, and goes on with the phase that is open: a synchronous call is one.
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
        elif is_on_host or op == BARRIER:  # as `completed`, without its call
            slots[COLLECTIVE_DURATION + op] += seconds
            slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]

    def abandon(self, call: Issue) -> None:
        """The call ended nobody knows how: an exception came up past us."""
        self._timeline.leave(call[0])
        self._timeline.slots[OPEN_OP] = call[2]

    def begin_wait(self, key: int, work: Any = None) -> Wait | None:
        """The training thread waits for a collective. `work` is what can be asked whether it is complete, if any."""
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
        sees_the_end = is_on_host or op == BARRIER
        if began - issued >= TIGHT:  # a device's work is not asked: that would break a CUDA graph being captured
            sees_the_end = is_on_host and work is not None and not work.is_completed()
        return opened, pending, outer, began, sees_the_end

    def waited(self, call: Wait, is_complete: bool) -> None:
        """The wait returned; `is_complete` unless it raised."""
        opened, pending, outer, began, sees_the_end = call
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
        if is_complete and sees_the_end:  # likewise
            slots[COLLECTIVE_DURATION + op] += now - issue_began
            slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]

    def completed(self, op: int, group: Group, duration: float, size: float) -> None:
        """A collective of `size` bytes took `duration` seconds from its issue to its completion.

        Only for those whose duration is known (from the host's clock or from a device's events, read later), so that
        bus bytes divided by duration is their bandwidth.
        """
        slots = self._timeline.slots
        slots[COLLECTIVE_DURATION + op] += duration
        slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a payload: one, or nested lists of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Iterable):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def measure(value: Any) -> Payload:
    """The payload that an argument of a collective holds. A sparse tensor's size is not asked lightly."""
    first = value[0] if type(value) is list and len(value) == 1 else value
    if type(first) is Tensor and first.layout is strided:  # nearly always
        return first.nbytes, first.is_cpu
    found = tensors(value)
    size = float(sum([tensor.nbytes for tensor in found if tensor.layout is strided]))
    return size, bool(found) and found[0].is_cpu


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the process group's methods and the wait of what they return. Nothing to do without distributed."""
    if not dist.is_available():
        return []
    collectives = Collectives(timeline)
    methods = [name for name in METHODS if hasattr(dist.ProcessGroup, name)]
    watches = [replace(dist.ProcessGroup, name, _issue(collectives, guard, name)) for name in methods]
    return [*watches, replace(dist.Work, "wait", _wait(collectives, guard))]


def _issue(collectives: Collectives, guard: Guard, name: str) -> Callable[[Function], Function]:
    """Around the process group's method `name`: counts its collective and charges what the call itself takes."""
    op, index = layout.OPS.index(METHODS[name][0]), METHODS[name][1]
    at = 0 if index is None else index + 1  # among the method's arguments, of which the first is the process group
    is_uneven, work_class = name in UNEVEN, dist.Work  # a subclass in Python has a wait of its own
    begin, issued, groups = collectives.begin, collectives.issued, collectives.groups
    count = groups.catch_up if name in POINT_TO_POINT else groups.issuing
    for called in (begin, issued, measure, groups.skip):
        skip_call(called)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.blown or is_dynamo_compiling():
                return original(*args, **kwargs)
            call = work = None
            try:
                call = begin(args[0], op, count)
            except BaseException as error:
                guard.blow(error)
            try:
                work = original(*args, **kwargs)
                return work
            finally:
                if call is not None:
                    try:
                        payload = measure(args[at]) if at and at < len(args) else NOTHING
                        if type(work) is work_class:
                            # Of torch's own functions only; from torch 2.8 on they say so.
                            is_awaited = getattr(args[-1], "asyncOp", True) is False
                            issued(call, op, payload, id(work), is_awaited)
                        else:
                            issued(call, op, payload, None if work is None else id(work))
                        if is_uneven:
                            groups.skip(call[1], args[0])
                    except BaseException as error:
                        guard.blow(error)

        return skip_frame(watched)

    return wrap


def _wait(collectives: Collectives, guard: Guard) -> Callable[[Function], Function]:
    """Around `Work.wait`: charges the wait to the collective that the work is of."""
    begin_wait, waited = collectives.begin_wait, collectives.waited
    skip_call(begin_wait)
    skip_call(waited)

    def wrap(original: Function) -> Function:
        def watched(work: Any, *args: Any, **kwargs: Any) -> Any:
            if guard.blown or is_dynamo_compiling():
                return original(work, *args, **kwargs)
            call, returned = None, False
            try:
                call = begin_wait(id(work), work)
            except BaseException as error:
                guard.blow(error)
            try:
                result = original(work, *args, **kwargs)
                returned = True
                return result
            finally:
                if call is not None:
                    try:
                        waited(call, returned)
                    except BaseException as error:
                        guard.blow(error)

        return skip_frame(watched)

    return wrap
