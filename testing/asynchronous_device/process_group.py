"""A process group whose collectives run on the asynchronous device, as NCCL's do on CUDA.

A collective is issued after what is in the current stream and meets the other ranks in the group's own stream, by way
of gloo and in the order of issue. `wait()` makes the current stream wait. A synchronous call has its own stream wait at
once and gives no work, as ProcessGroupNCCL does (torch 2.8 and newer); only a barrier blocks the host.

**By which way a call came** decides where it is done. On CUDA the hook sees what Python code issues, in the attributes
of `ProcessGroup` and `Work`, and not what DDP's reducer and functional collectives issue in C++. Here C++ code reaches
Python as well, by the methods that pybind finds in a subclass. So `Group`'s methods look at the frame that called them:
torch.distributed's Python goes by `dist.ProcessGroup`, everything else directly. Accordingly Python code is given a
work of torch's own class, whose methods are replaced in `dist.Work` itself, and C++ code one of a subclass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future

from testing.asynchronous_device.streams import Mark, Stream, current_stream

BACKEND = "asynchronous"
DISTRIBUTED = distributed_c10d.__file__
MEETING, TELLING = 0, 1  # tags of what two ranks exchange over gloo
NO_GRAPH_TASK = -1  # as torch says outside of the autograd engine

c10d: Any = torch._C._distributed_c10d  # its stubs lack most of it
Method = Callable[..., Any]
Fill = Callable[["Group", tuple[Any, ...]], None]

# Torch's own, for gloo below and for what is no collective of ours. Of the class, past whatever has replaced them.
gloo_wait = dist.Work.wait
_marks: weakref.WeakKeyDictionary[dist.Work, Mark] = weakref.WeakKeyDictionary()
on_transfer: list[Callable[[], None]] = []
"""What the device does in each collective once all ranks are there: a slow network, a hang."""


# What stands in for the results, by method: finite, and of the right shape.


def keep(_group: Group, _arguments: tuple[Any, ...]) -> None:
    """The tensors stay as they are."""


def make_finite(_group: Group, arguments: tuple[Any, ...]) -> None:
    """They may be memory that nobody has written."""
    for tensor in arguments[0]:
        if tensor.is_floating_point():
            tensor.detach().nan_to_num_()


def gather_lists(_group: Group, arguments: tuple[Any, ...]) -> None:
    """The own part in every place."""
    for outputs, own in zip(arguments[0], arguments[1], strict=False):
        for output in outputs:
            output.detach().copy_(own)


def gather_into(group: Group, arguments: tuple[Any, ...]) -> None:
    """The own part in every place of one tensor; it may lie in there already."""
    output, own = arguments[0].detach(), arguments[1].detach().clone()
    output.view(group.size(), -1).copy_(own.view(1, -1))


def scatter_lists(group: Group, arguments: tuple[Any, ...]) -> None:
    """The own place of the own list. Who has none keeps what is there."""
    for output, own in zip(arguments[0], arguments[1], strict=False):
        output.detach().copy_(own[group.rank()])
    make_finite(group, arguments)


def scatter_from(group: Group, arguments: tuple[Any, ...]) -> None:
    """The own place of one tensor."""
    output, own = arguments[0].detach(), arguments[1].detach()
    output.view(-1).copy_(own.reshape(group.size(), -1)[group.rank()])


def exchange_lists(_group: Group, arguments: tuple[Any, ...]) -> None:
    """What would go to each rank comes from it."""
    for output, own in zip(arguments[0], arguments[1], strict=True):
        exchange(_group, (output, own))


def exchange(_group: Group, arguments: tuple[Any, ...]) -> None:
    """The own tensor, as far as there is place for it."""
    output, own = arguments[0].detach().view(-1), arguments[1].detach().reshape(-1)
    size = min(output.numel(), own.numel())
    output.zero_()
    output[:size].copy_(own[:size])


def for_each(fill: Fill) -> Fill:
    """Of several at once."""

    def fill_all(group: Group, arguments: tuple[Any, ...]) -> None:
        for pair in zip(*arguments[:2], strict=True):
            fill(group, pair)

    return fill_all


FILLS: dict[str, Fill] = {
    "allreduce": keep,
    "allreduce_coalesced": keep,
    "broadcast": make_finite,
    "reduce": keep,
    "barrier": keep,
    "allgather": gather_lists,
    "allgather_coalesced": gather_lists,
    "all_gather_single": gather_into,
    "_allgather_base": gather_into,
    "all_gather_single_coalesced": for_each(gather_into),
    "allgather_into_tensor_coalesced": for_each(gather_into),
    "gather": gather_lists,
    "scatter": scatter_lists,
    "reduce_scatter": scatter_lists,
    "reduce_scatter_single": scatter_from,
    "_reduce_scatter_base": scatter_from,
    "reduce_scatter_single_coalesced": for_each(scatter_from),
    "reduce_scatter_tensor_coalesced": for_each(scatter_from),
    "alltoall": exchange_lists,
    "all_to_all_single": exchange,
    "alltoall_base": exchange,
    "send": keep,
    "recv": make_finite,
}
POINT_TO_POINT = frozenset({"send", "recv"})
# Those that C++ code calls, and pybind looks for in a subclass (torch/csrc/distributed/c10d/PyProcessGroup.hpp).
FROM_CPP = (
    "allgather", "allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce_scatter", "send", "recv",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "all_to_all_single", "alltoall_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class CppWork(dist.Work):
    """What C++ code is given: it asks no more than this."""

    def __init__(self, mark: Mark, result: Any) -> None:
        super().__init__()
        self._mark, self._result = mark, result

    def wait(self, *_timeout: timedelta) -> bool:
        """Of the current stream."""
        current_stream().put_wait(self._mark)
        return True

    def get_future(self) -> Future[Any]:
        """Complete, see `future_of`."""
        return future_of(self._mark, self._result)


class Group(dist.ProcessGroup):
    """The ranks of one group: a stream for its collectives, and for each peer one to send and one to receive."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload that torch's stub does not know
        self._gloo: Any = dist.ProcessGroupGloo(c10d.PrefixStore("meetings", store), rank, size, timeout)
        self._token = torch.zeros(1)  # lives as long as gloo, whose threads must not be the last to let go of it
        self._streams: dict[tuple[str, int], Stream] = {}
        self._told: list[dist.Work] = []
        self._sequence = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """As registered."""
        return BACKEND

    @property
    def group_name(self) -> Any:
        """As torch.distributed knows it: in C++ it is the backends' below the group, of which this has none."""
        return distributed_c10d._world.pg_names[self]

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were issued. As NCCL's, without what only two ranks do."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Begins with 0."""

    def issue(self, name: str, arguments: tuple[Any, ...]) -> Mark:
        """Put it into the group's stream, and give the place in there where it is over."""
        FILLS[name](self, arguments)
        if name in POINT_TO_POINT:
            if not arguments[0][0].is_floating_point():
                self._tell(name, *arguments[:2])
            stream = self._stream(name, arguments[1])
            meet = partial(getattr(self._gloo, name), [self._token], arguments[1], MEETING)
        else:
            self._sequence += 1
            stream = self._stream("all", -1)
            meet = partial(self._gloo.allreduce, [self._token])
        stream.put_wait(current_stream().put_mark())
        stream.put_unless_failed(lambda: transfer(meet))
        return stream.put_mark()

    def _tell(self, name: str, tensors: list[torch.Tensor], peer: int) -> None:
        """Whole numbers that two ranks exchange are sizes, pickled objects and votes: the next line reads them."""
        if name == "send":
            self._told.append(self._gloo.send([tensor.clone() for tensor in tensors], peer, TELLING))
        else:
            gloo_wait(self._gloo.recv(tensors, peer, TELLING))

    def _stream(self, kind: str, peer: int) -> Stream:
        if (kind, peer) not in self._streams:
            self._streams[kind, peer] = Stream()
        return self._streams[kind, peer]


def transfer(meet: Callable[[], dist.Work]) -> None:
    """In the stream's thread: wait for the others, then do as long as the network does."""
    gloo_wait(meet())
    for take_time in on_transfer:
        take_time()


def method_for_cpp(name: str) -> Method:
    """`Group`'s own method, which C++ code finds, and Python code too."""

    def method(self: Group, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == DISTRIBUTED:
            return getattr(dist.ProcessGroup, name)(self, *args, **kwargs)
        return CppWork(self.issue(name, args), args[0] if args else None)

    method.__name__ = name
    return method


for _name in FROM_CPP:
    setattr(Group, _name, method_for_cpp(_name))


def method_for_python(name: str, original: Method) -> Method:
    """What stands in `dist.ProcessGroup`, for the hook to watch."""

    def method(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Group):
            return original(self, *args, **kwargs)
        mark = self.issue(name, args)
        options = kwargs.get("opts", args[-1] if args else None)
        if getattr(options, "asyncOp", True):
            return work_for_python(mark, args[0] if args else None)
        current_stream().put_wait(mark)
        if name == "barrier":
            current_stream().drain()
        return None

    return method


def work_for_python(mark: Mark, result: Any) -> dist.Work:
    """Of torch's own class."""
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = c10d._create_work_from_future(future)
    _marks[work] = mark
    return work


def future_of(mark: Mark, result: Any) -> Future[Any]:
    """A future that is complete, because DDP's reducer waits on the host for those of the host's tensors.

    The stream waits for the collective all the same: when the backward pass has ended, as with the reducer on CUDA.
    """
    future: Future[Any] = Future()
    future.set_result(result)
    if torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: current_stream().put_wait(mark))
    return future


def wait(original: Method) -> Method:
    """In the place of `Work.wait`."""

    def method(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        mark = _marks.get(self)
        if mark is None:
            return original(self, *args, **kwargs)
        current_stream().put_wait(mark)
        return True

    return method


def is_completed(original: Method) -> Method:
    """In the place of `Work.is_completed`."""

    def method(self: dist.Work) -> Any:
        mark = _marks.get(self)
        return original(self) if mark is None else mark.is_passed()

    return method


def get_future(original: Method) -> Method:
    """In the place of `Work.get_future`."""

    def method(self: dist.Work) -> Any:
        mark = _marks.get(self)
        return original(self) if mark is None else future_of(mark, original(self).value())

    return method


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    """For torch.distributed."""
    return Group(store, rank, size, timeout)
