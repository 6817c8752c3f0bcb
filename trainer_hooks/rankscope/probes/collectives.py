"""Plain collectives: what the script calls through torch.distributed, by operation, seconds and bytes.

DDP's own all-reduce happens in C++ and does not pass here (ddp.py measures its exposed wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline import Depth, Timeline

# ProcessGroup's method: the operation, and which argument holds this rank's payload (None: there is none).
METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
MAX_PENDING = 4096  # works that nobody has waited for yet; past that they are forgotten, not kept alive


class CollectiveCounter:
    """Counts collectives when they are issued and charges their waits to them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        # By id and without a reference: keeping a work alive would keep its tensors alive.
        self._pending: dict[int, int] = {}

    def begin(self) -> Depth:
        """The training thread goes into a collective, or into waiting for one."""
        return self._timeline.enter(record.COLLECTIVE_WAIT)

    def issued(self, depth: Depth, op: int, payload: Any, work: Any) -> None:
        """The call returned; `work` may still have to be waited for."""
        if depth < 0:
            return
        self._timeline.collective(op, self._timeline.leave(depth), float(payload_bytes(payload)))
        if work is not None:
            if len(self._pending) >= MAX_PENDING:
                self._pending.clear()
            self._pending[id(work)] = op

    def waited(self, depth: Depth, work: Any) -> None:
        """A wait for `work` returned."""
        seconds = self._timeline.leave(depth)
        op = self._pending.pop(id(work), None)
        if depth > 0 and op is not None:
            self._timeline.collective_wait(op, seconds)


def payload_bytes(payload: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes if payload.layout is torch.strided else 0  # a sparse one's size is not asked lightly
    if isinstance(payload, Iterable):
        return sum(map(payload_bytes, payload))
    return 0


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the process group's methods and the wait of what they return. Nothing to do without distributed."""
    if not dist.is_available():
        return []
    counter = CollectiveCounter(timeline)
    methods = {name: where for name, where in METHODS.items() if hasattr(dist.ProcessGroup, name)}
    watches = [
        replace(dist.ProcessGroup, name, _issue(counter, guard, record.OPS.index(op), place))
        for name, (op, place) in methods.items()
    ]
    return [*watches, replace(dist.Work, "wait", _wait(counter, guard))]


def _issue(
    counter: CollectiveCounter, guard: Guard, op: int, place: int | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    begin, issued = guard(counter.begin), guard(counter.issued)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            depth = begin()
            work = None
            try:
                work = original(group, *args, **kwargs)
                return work
            finally:
                if depth is not None:
                    payload = args[place] if place is not None and place < len(args) else None
                    issued(depth, op, payload, work)

        return issue

    return wrap


def _wait(counter: CollectiveCounter, guard: Guard) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    begin, waited = guard(counter.begin), guard(counter.waited)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            depth = begin()
            try:
                return original(work, *args, **kwargs)
            finally:
                if depth is not None:
                    waited(depth, work)

        return wait

    return wrap
