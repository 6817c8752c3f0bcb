"""Plain collectives: what the script calls through torch.distributed, by operation and group, seconds and bytes.

DDP's own all-reduce happens in C++ and does not pass here (ddp.py measures its exposed wait), nor do functional
collectives (functional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from rankscope import record
from rankscope.groups import Group
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline import Depth, Timeline

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
# There a wait returns when the collective is complete, elsewhere when it is queued; a barrier, without tensors, blocks.
HOST = frozenset({"cpu", None})

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


class Payload(NamedTuple):
    """What a rank hands to a collective: its bytes, and the kind of device that holds it (None: there is nothing)."""

    size: float
    device: str | None


class Pending(NamedTuple):
    """A collective that was issued and not yet waited for."""

    op: int
    group: Group
    payload: Payload
    began: float
    issued: float


class Issue(NamedTuple):
    """A collective that the training thread is issuing. `outer` is what the record said before it."""

    depth: Depth
    group: Group
    outer: float
    began: float


class Wait(NamedTuple):
    """A wait that the training thread is in."""

    depth: Depth
    pending: Pending | None
    outer: float
    began: float
    saw_the_end: bool  # the collective was not complete before: its end will be the wait's


class Collectives:
    """Counts collectives when they are issued and charges their waits to them."""

    def __init__(self, timeline: Timeline) -> None:
        self.groups = timeline.groups
        self._timeline = timeline
        # By a number and without a reference: keeping a work alive would keep its tensors alive.
        self._pending: dict[int, Pending] = {}

    def begin(self, process_group: Any, op: int, is_point_to_point: bool = False) -> Issue | None:
        """The training thread issues a collective."""
        timeline = self._timeline
        depth = timeline.enter(record.COLLECTIVE_WAIT)
        if depth < 0:
            return None
        groups = self.groups
        group = groups.of(process_group)
        if is_point_to_point:
            groups.catch_up(group, process_group)
        else:
            groups.issuing(group, process_group)
        return Issue(depth, group, timeline.open_collective(op, group), timeline.last_event)

    def issued(self, call: Issue, op: int, payload: Payload, key: int | None) -> None:
        """The call returned. `key` is what a later wait will name it by; None if there is nothing to wait for."""
        timeline = self._timeline
        timeline.leave(call.depth)
        timeline.close_collective(call.outer)
        now = timeline.last_event
        seconds = 0.0 if call.outer else now - call.began
        timeline.collective(op, call.group, seconds, payload.size)
        if key is not None:
            if len(self._pending) >= MAX_PENDING:
                self._pending.clear()
            self._pending[key] = Pending(op, call.group, payload, call.began, now)
        elif payload.device in HOST:
            timeline.collective_completed(op, call.group, seconds, payload.size)

    def begin_wait(self, key: int, is_completed: Callable[[], bool]) -> Wait | None:
        """The training thread waits for a collective."""
        timeline = self._timeline
        depth = timeline.enter(record.COLLECTIVE_WAIT)
        if depth < 0:
            return None
        began = timeline.last_event
        pending = self._pending.pop(key, None)
        if pending is None:
            return Wait(depth, None, timeline.opened, began, saw_the_end=False)
        device = pending.payload.device
        saw_the_end = device in HOST and began - pending.issued < TIGHT
        # A device's work is not asked: that would break a CUDA graph that is being captured.
        saw_the_end = saw_the_end or (device == "cpu" and not is_completed())
        return Wait(depth, pending, timeline.open_collective(pending.op, pending.group), began, saw_the_end)

    def waited(self, call: Wait, is_complete: bool) -> None:
        """The wait returned; `is_complete` unless it raised."""
        timeline = self._timeline
        timeline.leave(call.depth)
        timeline.close_collective(call.outer)
        pending, now = call.pending, timeline.last_event
        if pending is None:
            return
        if not call.outer:
            timeline.collective_wait(pending.op, pending.group, now - call.began)
        if is_complete and call.saw_the_end:
            timeline.collective_completed(pending.op, pending.group, now - pending.began, pending.payload.size)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a payload: one, or nested lists of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def measure(value: Any) -> Payload:
    """The payload that an argument of a collective holds. A sparse tensor's size is not asked lightly."""
    found = tensors(value)
    size = float(sum([tensor.nbytes for tensor in found if tensor.layout is torch.strided]))
    return Payload(size, found[0].device.type if found else None)


NOTHING = Payload(0.0, None)


def around(
    guard: Guard,
    begin: Callable[[Arguments, dict[str, Any]], Any],
    end: Callable[[Any, Arguments, Any, bool], None],
) -> Callable[[Function], Function]:
    """A wrapper that calls `begin` with a call's arguments and, unless that gave None, `end` after it.

    `end` gets what `begin` gave, the call's positional arguments, its result, and whether it returned at all. Its
    errors are its own; those of the call pass untouched. While torch.compile traces, the wrapper is transparent.
    """

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.blown or is_dynamo_compiling():
                return original(*args, **kwargs)
            call, result, returned = None, None, False
            try:
                call = begin(args, kwargs)
            except Exception as error:
                guard.blow(error)
            try:
                result = original(*args, **kwargs)
                returned = True
                return result
            finally:
                if call is not None:
                    try:
                        end(call, args, result, returned)
                    except Exception as error:
                        guard.blow(error)

        return watched

    return wrap


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the process group's methods and the wait of what they return. Nothing to do without distributed."""
    if not dist.is_available():
        return []
    collectives = Collectives(timeline)
    methods = [name for name in METHODS if hasattr(dist.ProcessGroup, name)]
    watches = [replace(dist.ProcessGroup, name, _issue(collectives, guard, name)) for name in methods]
    return [*watches, replace(dist.Work, "wait", _wait(collectives, guard))]


def _issue(collectives: Collectives, guard: Guard, name: str) -> Callable[[Function], Function]:
    op, place = record.OPS.index(METHODS[name][0]), METHODS[name][1]
    is_point_to_point, is_uneven = name in POINT_TO_POINT, name in UNEVEN
    issued, groups = collectives.issued, collectives.groups

    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Issue | None:
        return collectives.begin(args[0], op, is_point_to_point)

    def end(call: Issue, args: Arguments, work: Any, _returned: bool) -> None:
        payload = NOTHING if place is None or place + 1 >= len(args) else measure(args[place + 1])
        issued(call, op, payload, None if work is None else id(work))
        if is_uneven:
            groups.skip(call.group, args[0])

    return around(guard, begin, end)


def _wait(collectives: Collectives, guard: Guard) -> Callable[[Function], Function]:
    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Wait | None:
        work = args[0]
        return collectives.begin_wait(id(work), work.is_completed)

    def end(call: Wait, _args: Arguments, _result: Any, returned: bool) -> None:
        collectives.waited(call, returned)

    return around(guard, begin, end)
