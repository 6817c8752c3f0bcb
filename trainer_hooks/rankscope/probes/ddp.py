"""DistributedDataParallel: its forward, its buffer broadcast, and the exposed wait of its gradient all-reduce.

A timer around the reducer measures the exposed wait. An early gradient of the backward pass queues a callback in the
autograd engine. That runs when the backward computation is done, before the reducer's own callback waits for the
all-reduce. The time from there to the end of the backward pass is the wait that overlap did not hide. If that end is
not seen, a second callback, after the reducer's, ends the wait. No communication hook is used: a user may have one, and
results stay bit-identical.

A backward pass is synchronized if the reducer was prepared for it. DDP's forward does that, and so do `replicate()`,
pipeline stages and subclasses with their own methods. So the reducer is watched, not the module's forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.foreign import attribute, items, own_attribute
from rankscope.guard import Guard
from rankscope.patch import Patches, Undo, replace
from rankscope.probes.collectives import Collectives, Issue, measure
from rankscope.probes.compiler import skip_call, skip_frame, uncompiled
from rankscope.probes.span import Arguments, Function, around, in_phase
from rankscope.record import layout
from rankscope.record.layout import BACKWARD
from rankscope.timeline.timeline import Timeline

DDP_ALL_REDUCE = layout.OPS.index("ddp_all_reduce")
DDP_BROADCAST = layout.OPS.index("ddp_broadcast")
# DDP's logger (kDDPRuntimeLoggingSampleRate in torch's reducer) measures the first ten passes, then every hundredth.
# The result is available at the next forward.
FIRST_SAMPLES, SAMPLING_RATE = 10, 100
# Makes the autograd engine call a function at the end of the running backward pass.
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - DDP and FSDP use it too
MAX_CALLERS = 8  # frames above `prepare_for_backward` in which the module is looked for
MAX_OUTPUTS = 16  # outputs whose nodes get a hook; one suffices, but any of them may not be part of the loss


class WatchedModule:
    """A DDP module: whether its next backward pass will synchronize, and the hook on its first gradient."""

    def __init__(self, module: DistributedDataParallel, on_gradient: Callable[[WatchedModule, object], None]) -> None:
        self.module = weakref.ref(module)
        self.armed = False
        self.gradient_bytes = gradient_bytes(module)
        self.buffers = uncompiled(measure)(list(module.buffers()))  # once: walking a large module is expensive
        self.handle: RemovableHandle | None = None
        self.passes_to_sample = FIRST_SAMPLES + 1  # until DDP has a new sample
        self._sampled_at = last_sample(module)[1]
        self.hooks_outputs = may_lack_gradients(module)
        if not self.hooks_outputs:
            self.handle = gradient_node(synchronized_parameters(module)[0]).register_prehook(partial(on_gradient, self))

    def new_sample(self) -> float:
        """Return the seconds of an all-reduce that DDP has measured since the last call; 0 if there is none."""
        module = self.module()
        if module is None or module._comm_hooks:  # noqa: SLF001 - no public API
            return 0.0
        seconds, at = last_sample(module)
        is_new, self._sampled_at = at != self._sampled_at, at
        return seconds if is_new else 0.0


class ExposedWaitTimer:
    """Measures the exposed all-reduce wait of each backward pass that DDP synchronizes."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._backward = timeline.backward
        self._guard = guard
        self._collectives = Collectives(timeline)
        self._in_flight: list[WatchedModule] = []  # modules that the running backward pass will synchronize
        self._call: Issue | None = None  # the current wait
        self.modules: dict[int, WatchedModule] = {}  # by the reducer's id: a weak dictionary is slow
        self._unprepared: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
        self._patches = Patches()  # for modules with hooked outputs, made for the first of them
        # Bound once, because every backward pass looks them up.
        self._first, self._second = self.before_reducer, self.after_reducer
        self._count = self._collectives.groups.count_issued

    def add(self, module: DistributedDataParallel) -> None:
        """Remember the module of its reducer until the reducer is first prepared."""
        self._unprepared[id(module.reducer)] = module
        if may_lack_gradients(module):
            self._watch_outputs()

    def arm(self, reducer: Any, *outputs: Any) -> None:
        """Note that the reducer was prepared for outputs, and so synchronizes the next backward pass."""
        watched = self.modules.get(id(reducer)) or self._find(reducer)
        if watched is None:
            return
        if self._in_flight:  # left over from an exception in the last backward pass
            self._close()
        watched.armed = True
        watched.passes_to_sample -= 1
        if not watched.passes_to_sample:
            self._take_sample(watched)
        if watched.hooks_outputs:
            self.hook(watched, outputs)

    def hook(self, watched: WatchedModule, outputs: Any) -> None:
        """Register hooks on the outputs of a module whose parameters may get no gradient."""
        for node in graph_nodes(outputs)[:MAX_OUTPUTS]:
            node.register_prehook(partial(self.queue, watched))

    def _find(self, reducer: Any) -> WatchedModule | None:
        """Return the module of a reducer that is prepared for the first time; None if it belongs to no DDP module."""
        module = self._unprepared.pop(id(reducer), None) or calling_module(reducer)
        return None if module is None else self.watch(module)

    def watch(self, module: DistributedDataParallel) -> WatchedModule:
        """Start to watch a module."""
        key, modules = id(module.reducer), self.modules
        modules[key] = watched = WatchedModule(module, self.queue)
        if watched.hooks_outputs:
            self._watch_outputs()
        weakref.finalize(module, modules.pop, key, None).atexit = False  # before its id is reused
        self._timeline.job.objects["ddp"] = watched.module
        return watched

    def _watch_outputs(self) -> None:
        """Watch `_post_forward`, where DDP's forward and `replicate()` prepare the reducer for the outputs."""
        self._patches.add(DistributedDataParallel, "_post_forward", _post_forward(self, self._guard))

    def _take_sample(self, watched: WatchedModule) -> None:
        """Count a sampled all-reduce. Only these get a duration and bus bytes, so their quotient is the bandwidth."""
        watched.passes_to_sample = SAMPLING_RATE
        module = watched.module()
        if module is not None and (seconds := watched.new_sample()):
            group = self._timeline.groups.find(module.process_group)
            self._collectives.add_completed(DDP_ALL_REDUCE, group, seconds, watched.gradient_bytes)

    def remove(self) -> None:
        """Remove all hooks and patches."""
        self._patches.undo()
        for watched in self.modules.values():
            if watched.handle is not None:
                watched.handle.remove()
        self.modules.clear()

    def queue(self, watched: WatchedModule, _gradients: object) -> None:
        """Queue the callback at the first gradient of a backward pass that will synchronize."""
        try:
            if not watched.armed or self._guard.disabled:
                return
            watched.armed = False
            if not self._in_flight:
                queue_callback(self._first)
            self._in_flight.append(watched)
        except BaseException as error:
            self._guard.handle(error)

    def before_reducer(self) -> None:
        """Begin the wait for the other ranks' gradients: the backward computation is done."""
        try:
            if self._guard.disabled or not self._in_flight:
                return
            module = self._in_flight[-1].module()
            if module is None:
                return
            # The reducer has issued all buckets. The record says so before the wait for the other ranks begins.
            # The engine may run this on a device's thread while the training thread waits for the engine.
            call = self._collectives.begin(module.process_group, DDP_ALL_REDUCE, self._count, True)
            if call is None:
                return
            if self._timeline.open_phases[1][0] == BACKWARD and not self._backward.nested:
                self._call = (None, *call[1:])  # the phase ends with the enclosing backward pass
                self._backward.on_end = self._second
            else:  # the backward pass is not watched, or is nested in a watched one
                self._call = call
                queue_callback(self._second)
        except BaseException as error:
            self._guard.handle(error)

    def after_reducer(self) -> None:
        """End the wait: the gradients are averaged."""
        try:
            self._backward.on_end = None
            if self._call is not None and not self._guard.disabled:
                size = 0.0
                for watched in self._in_flight:
                    module = watched.module()
                    # The bytes of a communication hook are not known: it may compress.
                    if module is not None and not module._comm_hooks:  # noqa: SLF001 - no public API
                        size += watched.gradient_bytes
                self._collectives.end_issue(self._call, DDP_ALL_REDUCE, (size, False), None)
                self._call = None
            self._in_flight = []
        except BaseException as error:
            self._guard.handle(error)

    def _close(self) -> None:
        self._backward.on_end = None
        if self._call is not None:
            self._collectives.abandon(self._call)
        self._call = None
        self._in_flight = []


def calling_module(reducer: Any) -> DistributedDataParallel | None:
    """Return the module that is preparing its reducer, for modules made before the probe was installed."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    for _ in range(MAX_CALLERS):
        module: Any = frame.f_locals.get("self") if frame is not None else None
        if issubclass(type(module), DistributedDataParallel) and own_attribute(module, "reducer") is reducer:
            return cast("DistributedDataParallel", module)
        frame = frame.f_back if frame is not None else None
    return None


def last_sample(module: DistributedDataParallel) -> tuple[float, int]:
    """Return the seconds and the start (0: none yet) of the last all-reduce that DDP's own logger sampled.

    It lasts from the issue of the first bucket to the end of the last, overlapped or not. The call takes 15 µs.
    """
    logging_data: Any = module._get_ddp_logging_data  # noqa: SLF001 - documented as a prototype; no public API
    data = logging_data()
    return data.get("backward_comm_time", 0) / 1e9, data.get("backward_comm_time_start", 0)


def gradient_bytes(module: DistributedDataParallel) -> float:
    """Return the bytes of all gradients that the module's backward pass synchronizes."""
    return float(sum(parameter.nbytes for parameter in synchronized_parameters(module)))


def synchronized_parameters(module: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages."""
    ignored = module.parameters_to_ignore
    named = module.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def gradient_node(parameter: torch.Tensor) -> Node:
    """Return the node that accumulates the parameter's gradient. It is the same while DDP's reducer holds it."""
    with torch.inference_mode(False), torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def may_lack_gradients(module: DistributedDataParallel) -> bool:
    """Return whether some parameters may get no gradient in a backward pass.

    Otherwise any one parameter shows each backward pass, and its node is hooked once instead of at every forward pass.
    """
    return module.find_unused_parameters or module.static_graph or module.mixed_precision is not None


def graph_nodes(value: Any) -> list[Node]:
    """Return the autograd nodes of a module's output, whatever containers hold its tensors."""
    if issubclass(type(value), torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - a subclass of the script would see the question
            node = vars(torch._C.TensorBase)["grad_fn"].__get__(value)  # noqa: SLF001 - as above
        return [] if node is None else [node]
    found: Iterable[Any] | None = items(value)
    if found is None:
        fields = attribute(type(value), "__dataclass_fields__")
        found = (attribute(value, name) for name in (fields if type(fields) is dict else ()))
    return [node for item in found for node in graph_nodes(item)]


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
    """Wrap `__init__`: pipeline stages and older frameworks prepare the reducer without DDP's forward."""

    def end(_call: bool, args: Arguments, _result: None, returned: bool) -> None:
        if returned:
            exposed_wait.add(args[0])

    return around(guard, lambda _args, _kwargs: True, end)


def _prepare(exposed_wait: ExposedWaitTimer, guard: Guard) -> Callable[[Function], Function]:
    """Wrap `prepare_for_backward`, without `around`: it runs in each step, with nothing to do before the call."""
    skip_call(exposed_wait.arm)

    def wrap(original: Function) -> Function:
        def watched(*args: Any) -> Any:
            result = original(*args)
            if not (guard.disabled or is_dynamo_compiling()):
                try:
                    exposed_wait.arm(*args)
                except BaseException as error:
                    guard.handle(error)
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
    """Wrap DDP's buffer broadcast in forward, where the ranks wait for the last one."""
    count_next = collectives.groups.count_next

    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Issue | None:
        return collectives.begin(args[0].process_group, DDP_BROADCAST, count_next)

    def end(call: Issue, args: Arguments, _result: None, _returned: bool) -> None:
        watched = exposed_wait.modules.get(id(args[0].reducer)) or exposed_wait.watch(args[0])
        collectives.end_issue(call, DDP_BROADCAST, watched.buffers, None)

    return around(guard, begin, end)
