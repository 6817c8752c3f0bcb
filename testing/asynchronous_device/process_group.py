"""A process group whose collectives run on the asynchronous device, as NCCL's do on CUDA.

A collective is issued after the work in the current stream and meets the other ranks in the group's own stream, over
gloo and in the order of issue. `wait()` blocks the current stream. A synchronous call blocks its own stream at once and
returns no work, as in ProcessGroupNCCL (torch 2.8 and newer); only a barrier blocks the host.

**The caller decides which class handles a call.** With CUDA, the hook sees what Python code issues, in the attributes
of `ProcessGroup` and `Work`, but not what DDP's reducer and functional collectives issue in C++. Here, C++ code calls
Python as well: pybind finds the methods of a subclass. So `Group`'s methods look at the calling frame: calls from
torch.distributed's Python go to `dist.ProcessGroup`, all others are handled directly. Python code gets a work of
torch's own class, whose methods are replaced in `dist.Work`; C++ code gets a work of a subclass.
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
MEETING, VALUES = 0, 1  # tags of messages between two ranks over gloo
NO_GRAPH_TASK = -1  # torch's value outside of the autograd engine

c10d: Any = torch._C._distributed_c10d  # its stubs lack most of it
Method = Callable[..., Any]
Fill = Callable[["Group", tuple[Any, ...]], None]

# torch's own, for gloo and for work that is not of this device. It is read before it is replaced.
gloo_wait = dist.Work.wait
_marks: weakref.WeakKeyDictionary[dist.Work, Mark] = weakref.WeakKeyDictionary()
on_transfer: list[Callable[[], None]] = []
"""Called in each collective once all ranks are there, to simulate a slow network or a hang."""


# Stand-ins for the results, by method: finite, and of the right shape.


def keep(_group: Group, _arguments: tuple[Any, ...]) -> None:
    """Leave the tensors as they are."""


def make_finite(_group: Group, arguments: tuple[Any, ...]) -> None:
    """Replace NaN and infinity: the tensors may be uninitialized memory."""
    for tensor in arguments[0]:
        if tensor.is_floating_point():
            tensor.detach().nan_to_num_()


def gather_lists(_group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy the rank's own part to every place."""
    for outputs, own in zip(arguments[0], arguments[1], strict=False):
        for output in outputs:
            output.detach().copy_(own)


def gather_into(group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy the rank's own part to every place of one tensor. The own part may be in it already."""
    output, own = arguments[0].detach(), arguments[1].detach().clone()
    output.view(group.size(), -1).copy_(own.view(1, -1))


def scatter_lists(group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy the rank's place of its own list. A rank without a list keeps its tensors."""
    for output, own in zip(arguments[0], arguments[1], strict=False):
        output.detach().copy_(own[group.rank()])
    make_finite(group, arguments)


def scatter_from(group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy the rank's own place of one tensor."""
    output, own = arguments[0].detach(), arguments[1].detach()
    output.view(-1).copy_(own.reshape(group.size(), -1)[group.rank()])


def exchange_lists(_group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy the part for each rank as the part from that rank."""
    for output, own in zip(arguments[0], arguments[1], strict=True):
        exchange(_group, (output, own))


def exchange(_group: Group, arguments: tuple[Any, ...]) -> None:
    """Copy as much of the rank's own tensor as there is space for."""
    output, own = arguments[0].detach().view(-1), arguments[1].detach().reshape(-1)
    size = min(output.numel(), own.numel())
    output.zero_()
    output[:size].copy_(own[:size])


def for_each(fill: Fill) -> Fill:
    """Return a fill that applies `fill` to each of several tensors."""

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
# Methods that C++ code calls, and that pybind looks for in a subclass (torch/csrc/distributed/c10d/PyProcessGroup.hpp).
FROM_CPP = (
    "allgather", "allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce_scatter", "send", "recv",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "all_to_all_single", "alltoall_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class CppWork(dist.Work):
    """A work for C++ code, which uses only these methods."""

    def __init__(self, mark: Mark, result: Any) -> None:
        super().__init__()
        self._mark, self._result = mark, result

    def wait(self, *_timeout: timedelta) -> bool:
        """Block the current stream."""
        current_stream().put_wait(self._mark)
        return True

    def get_future(self) -> Future[Any]:
        """Return a complete future, see `future_of`."""
        return future_of(self._mark, self._result)


class Group(dist.ProcessGroup):
    """The ranks of one group: a stream for its collectives, and one stream for each peer and direction."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload that torch's stub does not know
        self._gloo: Any = dist.ProcessGroupGloo(c10d.PrefixStore("meetings", store), rank, size, timeout)
        self._token = torch.zeros(1)  # lives as long as gloo, because gloo's threads must not free it
        self._streams: dict[tuple[str, int], Stream] = {}
        self._sent: list[dist.Work] = []
        self._sequence = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return BACKEND

    @property
    def group_name(self) -> Any:
        """The name in torch.distributed's registry: C++ takes it from a group's backends, and this one has none."""
        return distributed_c10d._world.pg_names[self]

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives were issued. As with NCCL, send and receive do not count."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 0."""

    def issue(self, name: str, arguments: tuple[Any, ...]) -> Mark:
        """Issue a collective in the group's stream, and return the mark of its end."""
        FILLS[name](self, arguments)
        if name in POINT_TO_POINT:
            if not arguments[0][0].is_floating_point():
                self._exchange_values(name, *arguments[:2])
            stream = self._stream(name, arguments[1])
            meet = partial(getattr(self._gloo, name), [self._token], arguments[1], MEETING)
        else:
            self._sequence += 1
            stream = self._stream("all", -1)
            meet = partial(self._gloo.allreduce, [self._token])
        stream.put_wait(current_stream().put_mark())
        stream.put_unless_failed(lambda: transfer(meet))
        return stream.put_mark()

    def _exchange_values(self, name: str, tensors: list[torch.Tensor], peer: int) -> None:
        """Exchange integers: they are sizes, pickled objects and votes, which the next line of the caller reads."""
        if name == "send":
            self._sent.append(self._gloo.send([tensor.clone() for tensor in tensors], peer, VALUES))
        else:
            gloo_wait(self._gloo.recv(tensors, peer, VALUES))

    def _stream(self, kind: str, peer: int) -> Stream:
        if (kind, peer) not in self._streams:
            self._streams[kind, peer] = Stream()
        return self._streams[kind, peer]


def transfer(meet: Callable[[], dist.Work]) -> None:
    """Wait for the other ranks, then take the network's time. Runs in the stream's thread."""
    gloo_wait(meet())
    for take_time in on_transfer:
        take_time()


def method_for_cpp(name: str) -> Method:
    """Return the method of `Group`, which C++ code finds, and Python code too."""

    def method(self: Group, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == DISTRIBUTED:
            return getattr(dist.ProcessGroup, name)(self, *args, **kwargs)
        return CppWork(self.issue(name, args), args[0] if args else None)

    method.__name__ = name
    return method


for _name in FROM_CPP:
    setattr(Group, _name, method_for_cpp(_name))


def method_for_python(name: str, original: Method) -> Method:
    """Return the replacement in `dist.ProcessGroup`, which the hook patches."""

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
    """Return a work of torch's own class."""
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = c10d._create_work_from_future(future)
    _marks[work] = mark
    return work


def future_of(mark: Mark, result: Any) -> Future[Any]:
    """Return a complete future, because DDP's reducer waits on the host for futures of host tensors.

    The stream waits for the collective when the backward pass has ended, as with the reducer on CUDA.
    """
    future: Future[Any] = Future()
    future.set_result(result)
    if torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: current_stream().put_wait(mark))
    return future


def wait(original: Method) -> Method:
    """Return the replacement of `Work.wait`."""

    def method(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        mark = _marks.get(self)
        if mark is None:
            return original(self, *args, **kwargs)
        current_stream().put_wait(mark)
        return True

    return method


def is_completed(original: Method) -> Method:
    """Return the replacement of `Work.is_completed`."""

    def method(self: dist.Work) -> Any:
        mark = _marks.get(self)
        return original(self) if mark is None else mark.is_passed()

    return method


def get_future(original: Method) -> Method:
    """Return the replacement of `Work.get_future`."""

    def method(self: dist.Work) -> Any:
        mark = _marks.get(self)
        return original(self) if mark is None else future_of(mark, original(self).value())

    return method


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    return Group(store, rank, size, timeout)
