"""DistributedDataParallel: its forward, its buffer broadcast, and the exposed wait of its gradient all-reduce.

A timer around the reducer measures the exposed wait: an early gradient of the backward pass queues a callback in the
autograd engine. It runs when the backward computation is done, before the reducer's own callback waits for the
all-reduce. What lies between it and the end of the backward pass is the wait that the overlap with the backward
computation did not hide; where that end is not seen, a second callback after the reducer's ends it. No communication
hook is used: a user may have one, and results stay bit-identical.

A backward pass is synchronized if the reducer was prepared for it. DDP's forward does that, and so do `replicate()`,
pipeline stages and subclasses with methods of their own, so the reducer is watched and not the module's forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.collectives import Collectives, Issue, measure
from rankscope.probes.compiler import skip_call, skip_frame, uncompiled
from rankscope.probes.span import Arguments, Function, around, in_phase
from rankscope.record import layout
from rankscope.record.layout import BACKWARD
from rankscope.timeline.timeline import Timeline

DDP_ALL_REDUCE = layout.OPS.index("ddp_all_reduce")
DDP_BROADCAST = layout.OPS.index("ddp_broadcast")
# DDP's logger (kDDPRuntimeLoggingSampleRate in torch's reducer) measures the first ten passes, then each hundredth, and
# has the result at the next forward.
FIRST_SAMPLES, SAMPLING_RATE = 10, 100
# Has the autograd engine call something at the end of the backward pass that is running.
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - as DDP's and FSDP's own code
MAX_CALLERS = 8  # of `prepare_for_backward` that may be the module's method
MAX_OUTPUTS = 16  # outputs whose nodes get a hook; one would do, but any of them may stay out of the loss


class WatchedModule:
    """One DDP module: whether its next backward will synchronize, and the hook that notices its first gradient."""

    def __init__(self, module: DistributedDataParallel, on_gradient: Callable[[WatchedModule, object], None]) -> None:
        self.module = weakref.ref(module)
        self.armed = False
        self.gradient_bytes = gradient_bytes(module)
        self.buffers = uncompiled(measure)(module.buffers())  # once, as walking a large module costs more than the rest
        self.handle: RemovableHandle | None = None
        self.passes_to_sample = FIRST_SAMPLES + 1  # until DDP has a new sample
        self._sampled_at = logged(module)[1]
        self.hooks_outputs = may_lack_gradients(module)
        if not self.hooks_outputs:
            self.handle = gradient_node(synchronized_parameters(module)[0]).register_prehook(partial(on_gradient, self))

    def new_sample(self) -> float:
        """Seconds of an all-reduce that DDP has measured since we last asked; 0 if there was none."""
        module = self.module()
        if module is None or module._comm_hooks:  # noqa: SLF001 - no public question
            return 0.0
        seconds, at = logged(module)
        is_new, self._sampled_at = at != self._sampled_at, at
        return seconds if is_new else 0.0


class ExposedWaitTimer:
    """Times the exposed all-reduce wait of each backward pass that DDP synchronizes."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._backward = timeline.backward
        self._guard = guard
        self._collectives = Collectives(timeline)
        self._in_flight: list[WatchedModule] = []  # those that the backward which is running will synchronize
        self._call: Issue | None = None  # the wait, while it lasts
        self.modules: dict[int, WatchedModule] = {}  # by the id of the reducer: a weak dictionary is slow
        self._unprepared: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
        self._undo: list[Undo] = []  # of what is replaced as the first module is met whose outputs get hooks
        # Bound once, as each of them is looked up at every backward.
        self._first, self._second = self.before_reducer, self.after_reducer
        self._count = self._collectives.groups.issued

    def add(self, module: DistributedDataParallel) -> None:
        """Remember whose reducer this is, until it is prepared for the first time."""
        self._unprepared[id(module.reducer)] = module
        if may_lack_gradients(module):
            self._watch_outputs()

    def arm(self, reducer: Any, *outputs: Any) -> None:
        """After the reducer was prepared for outputs: it synchronizes the next backward pass."""
        watched = self.modules.get(id(reducer)) or self._find(reducer)
        if watched is None:
            return
        if self._in_flight:  # an exception in the last backward left it so
            self._close()
        watched.armed = True
        watched.passes_to_sample -= 1
        if not watched.passes_to_sample:
            self._take_sample(watched)
        if watched.hooks_outputs:
            self.hook(watched, outputs)

    def hook(self, watched: WatchedModule, outputs: Any) -> None:
        """Notice the first gradient at the outputs of a module whose parameters may get none."""
        for node in graph_nodes(outputs)[:MAX_OUTPUTS]:
            node.register_prehook(partial(self.queue, watched))

    def _find(self, reducer: Any) -> WatchedModule | None:
        """Return the module of a reducer that was not prepared before; None if it belongs to no DDP module."""
        module = self._unprepared.pop(id(reducer), None) or calling_module(reducer)
        return None if module is None else self.watch(module)

    def watch(self, module: DistributedDataParallel) -> WatchedModule:
        """What is kept of a module, made when it is first seen."""
        key, modules = id(module.reducer), self.modules
        modules[key] = watched = WatchedModule(module, self.queue)
        if watched.hooks_outputs:
            self._watch_outputs()
        weakref.finalize(module, modules.pop, key, None).atexit = False  # before its id is another's
        self._timeline.job.objects["ddp"] = watched.module
        return watched

    def _watch_outputs(self) -> None:
        """DDP's forward and `replicate()` prepare the reducer in `_post_forward`, for the outputs that it returns."""
        if not self._undo:
            wrapper = _post_forward(self, self._guard)
            self._undo.append(replace(DistributedDataParallel, "_post_forward", wrapper))

    def _take_sample(self, watched: WatchedModule) -> None:
        """Only what was sampled gets a duration and bus bytes: their quotient is the bandwidth, nothing is guessed."""
        watched.passes_to_sample = SAMPLING_RATE
        module = watched.module()
        if module is not None and (seconds := watched.new_sample()):
            group = self._timeline.groups.of(module.process_group)
            self._collectives.completed(DDP_ALL_REDUCE, group, seconds, watched.gradient_bytes)

    def remove(self) -> None:
        """Take every hook off the modules."""
        while self._undo:
            self._undo.pop()()
        for watched in self.modules.values():
            if watched.handle is not None:
                watched.handle.remove()
        self.modules.clear()

    def queue(self, watched: WatchedModule, _gradients: object) -> None:
        """A gradient arrived. The first of a backward pass that will synchronize counts."""
        try:
            if not watched.armed or self._guard.blown:
                return
            watched.armed = False
            if not self._in_flight:
                queue_callback(self._first)
            self._in_flight.append(watched)
        except BaseException as error:
            self._guard.blow(error)

    def before_reducer(self) -> None:
        """The backward computation is done, and the wait for the other ranks' gradients begins."""
        try:
            if self._guard.blown or not self._in_flight:
                return
            module = self._in_flight[-1].module()
            if module is None:
                return
            # The reducer has issued all its buckets now; the record says so before it waits for the other ranks.
            # The engine may run this on a device's thread; the training thread waits for the engine.
            call = self._collectives.begin(module.process_group, DDP_ALL_REDUCE, self._count, True)
            if call is None:
                return
            if self._timeline.open_phases[1][0] == BACKWARD and not self._backward.nested:
                self._call = (None, *call[1:])  # the phase will have ended with the backward pass around it
                self._backward.on_end = self._second
            else:  # a backward that is not seen, or one that ends before that which is
                self._call = call
                queue_callback(self._second)
        except BaseException as error:
            self._guard.blow(error)

    def after_reducer(self) -> None:
        """The gradients are averaged, and the wait for them has ended."""
        try:
            self._backward.on_end = None
            if self._call is not None and not self._guard.blown:
                size = 0.0
                for watched in self._in_flight:
                    module = watched.module()
                    # A communication hook's bytes are its own affair (it may compress).
                    if module is not None and not module._comm_hooks:  # noqa: SLF001 - no public question
                        size += watched.gradient_bytes
                self._collectives.issued(self._call, DDP_ALL_REDUCE, (size, False), None)
                self._call = None
            self._in_flight = []
        except BaseException as error:
            self._guard.blow(error)

    def _close(self) -> None:
        self._backward.on_end = None
        if self._call is not None:
            self._collectives.abandon(self._call)
        self._call = None
        self._in_flight = []


def calling_module(reducer: Any) -> DistributedDataParallel | None:
    """Return the module that prepares its reducer now; it was made before the hook was installed."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    for _ in range(MAX_CALLERS):
        module = frame.f_locals.get("self") if frame is not None else None
        if isinstance(module, DistributedDataParallel) and module.reducer is reducer:
            return module
        frame = frame.f_back if frame is not None else None
    return None


def logged(module: DistributedDataParallel) -> tuple[float, int]:
    """What DDP's own logger says of the last all-reduce that it sampled: its seconds, and when it began (0: none yet).

    From the issue of the first bucket to the end of the last, overlapped or not. It costs 15 µs: ask seldom.
    """
    logging_data: Any = module._get_ddp_logging_data  # noqa: SLF001 - documented as a prototype; there is no other
    data = logging_data()
    return data.get("backward_comm_time", 0) / 1e9, data.get("backward_comm_time_start", 0)


def gradient_bytes(module: DistributedDataParallel) -> float:
    """Bytes of all gradients that the module's backward synchronizes."""
    return float(sum(parameter.nbytes for parameter in synchronized_parameters(module)))


def synchronized_parameters(module: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP averages the gradients of."""
    ignored = module.parameters_to_ignore
    named = module.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def gradient_node(parameter: torch.Tensor) -> Node:
    """The node that accumulates the parameter's gradient: one and the same as long as DDP's reducer holds it."""
    with torch.inference_mode(False), torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def may_lack_gradients(module: DistributedDataParallel) -> bool:
    """Whether DDP may do without some parameters' gradients.

    Else any one parameter tells of each backward pass, and its node is as old as the module: it is hooked once and not
    at every forward.
    """
    return module.find_unused_parameters or module.static_graph or module.mixed_precision is not None


def graph_nodes(value: Any) -> list[Node]:
    """The autograd nodes that made a module's output, whatever containers hold its tensors."""
    if isinstance(value, torch.Tensor):
        return [] if value.grad_fn is None else [value.grad_fn]
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        items = (getattr(value, name) for name in getattr(value, "__dataclass_fields__", ()))
    return [node for item in items for node in graph_nodes(item)]


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the reducer of DDP, the module's forward and its buffer broadcast."""
    if not dist.is_available():
        return []
    exposed_wait = ExposedWaitTimer(timeline, guard)
    for called_by_the_engine in (exposed_wait.queue, exposed_wait.before_reducer, exposed_wait.after_reducer):
        skip_call(called_by_the_engine)
    return [
        exposed_wait.remove,
        replace(DistributedDataParallel, "__init__", _initialize(exposed_wait, guard)),
        replace(DistributedDataParallel, "forward", in_phase(timeline, guard, layout.FORWARD)),
        replace(DistributedDataParallel, "_sync_buffers", _broadcast(exposed_wait, Collectives(timeline), guard)),
        replace(dist.Reducer, "prepare_for_backward", _prepare(exposed_wait, guard)),  # type: ignore[attr-defined]
    ]


def _initialize(exposed_wait: ExposedWaitTimer, guard: Guard) -> Callable[[Function], Function]:
    """A module may prepare its reducer without DDP's own forward, as pipeline stages and older frameworks do."""

    def end(_call: bool, args: Arguments, _result: None, returned: bool) -> None:
        if returned:
            exposed_wait.add(args[0])

    return around(guard, lambda _args, _kwargs: True, end)


def _prepare(exposed_wait: ExposedWaitTimer, guard: Guard) -> Callable[[Function], Function]:
    """Not in `around`: this is called at each step, and needs nothing before the call."""
    skip_call(exposed_wait.arm)

    def wrap(original: Function) -> Function:
        def watched(*args: Any) -> Any:
            result = original(*args)
            if not (guard.blown or is_dynamo_compiling()):
                try:
                    exposed_wait.arm(*args)
                except BaseException as error:
                    guard.blow(error)
            return result

        return skip_frame(watched)

    return wrap


def _post_forward(exposed_wait: ExposedWaitTimer, guard: Guard) -> Callable[[Function], Function]:
    def begin(args: Arguments, _kwargs: dict[str, Any]) -> WatchedModule:
        return exposed_wait.modules.get(id(args[0].reducer)) or exposed_wait.watch(args[0])

    def end(watched: WatchedModule, _args: Arguments, outputs: Any, _returned: bool) -> None:
        if watched.hooks_outputs and watched.armed:
            exposed_wait.hook(watched, outputs)

    return around(guard, begin, end)


def _broadcast(
    exposed_wait: ExposedWaitTimer, collectives: Collectives, guard: Guard
) -> Callable[[Function], Function]:
    """By default DDP broadcasts its buffers in forward: the ranks wait there for whoever comes late to it."""
    issuing = collectives.groups.issuing

    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Issue | None:
        return collectives.begin(args[0].process_group, DDP_BROADCAST, issuing)

    def end(call: Issue, args: Arguments, _result: None, _returned: bool) -> None:
        watched = exposed_wait.modules.get(id(args[0].reducer)) or exposed_wait.watch(args[0])
        collectives.issued(call, DDP_BROADCAST, watched.buffers, None)

    return around(guard, begin, end)
