"""The forward pass of any model: the calls of root modules, which the training thread calls outermost.

The root modules are found by search: for a few steps the probe watches `nn.Module.__call__`, afterwards only the
`__call__` of the classes whose instances it found. It puts nothing on instances, because they are copied, pickled and
compiled. A loss is a module too, and counts as forward. ddp.py watches DDP's class; the class of the module inside is
watched here, because scripts call it for evaluation.

A pass without gradients, in evaluation mode, is evaluation if the module also trains in training mode. A module that
never does (a teacher, a reference model, a frozen encoder) is part of training: its pass is forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from rankscope.foreign import own_attribute
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.probes.span import Arguments, Function, around
from rankscope.record.layout import BACKWARD, DATA_WAIT, EVALUATION, FORWARD
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline, is_in_training_mode

# A module called in these phases is part of them: a submodule, a recomputed activation, a data transform.
NOT_WITHIN = frozenset({FORWARD, BACKWARD, DATA_WAIT})

NOT_SEARCHED = NOT_WITHIN | {EVALUATION}

# An evaluation may call DDP's forward, which calls the trained module.
NO_EVALUATION_WITHIN = frozenset({EVALUATION, BACKWARD, DATA_WAIT})

# Replacing nn.Module.__call__ updates every module class of the process: 0.15 ms with torch's own 400 classes, 0.9 ms
# with 3,400. So searches are rare: after the first step (which is startup) and then at powers of ten. A search lasts
# two steps, so that it also sees what happens in every second step. The script may evaluate the model by its parts or
# its methods, so there are searches in evaluations, too: in the first one, the tenth, and so on.
SEARCH_FACTOR, SEARCH_STEPS = 10, 2

# A script may call its blocks one by one. Many short calls are not worth the cost of watching each (4 µs).
MANY_CALLS, SHORT_SECONDS = 16, 100e-6

WRAPPED = ("module", "_orig_mod")  # attributes with the wrapped module: of DDP, of torch.compile


class TrainedModules:
    """The instances of watched classes that train in training mode."""

    def __init__(self, timeline: Timeline) -> None:
        self._job = timeline.job
        self.ids: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty stand-in, as `Guard.__reduce__` does."""
        return SimpleNamespace, ()

    def add_parts(self, module: torch.nn.Module, parts: set[int]) -> None:
        """Treat passes of a module's parts, given by their ids, as passes of a module that trains in training mode."""
        parts -= self.ids
        self.ids |= parts
        weakref.finalize(module, self.ids.difference_update, parts).atexit = False  # before an id is reused

    def is_evaluated(self, module: torch.nn.Module) -> bool:
        """Return whether this pass is evaluation. Passes with gradients show in which mode the module trains."""
        is_known = id(module) in self.ids
        if not is_grad_enabled():
            return is_known and not is_in_training_mode(module)
        is_training = is_in_training_mode(module)
        if is_training and not is_known:
            self._add(module)
        elif is_known and not is_training:
            self.ids.discard(id(module))  # it also trains in evaluation mode
            if self._job.model() is module:
                self._job.model = lambda: None
        return False

    def _add(self, module: torch.nn.Module) -> None:
        self.ids.add(id(module))
        self._job.model = self._job.last_model = weakref.ref(module)
        if (wrapped := wrapped_module(module)) is not None and is_in_training_mode(wrapped):
            self.add_parts(module, {id(wrapped)})  # compiled code does not call it
        weakref.finalize(module, self.ids.discard, id(module)).atexit = False  # before its id is reused


class RootModules:
    """Finds the classes of root modules and watches their calls."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._guard = guard
        self._objects = timeline.job.objects
        self._watched: dict[type[torch.nn.Module], Undo] = {}
        self._found: dict[type[torch.nn.Module], list[float]] = {}  # seconds of each call, by class
        self._seconds = 0.0  # of passes, in the record at the start of the search, or at the last call found
        self._next_search = 1
        self._evaluations, self._next_evaluation = 0, 1  # calls of a trained model's `eval`
        # Seconds of forward passes, number of steps and reference to the marking optimizer at the last poll.
        self._polled: tuple[float, int, Any] = (0.0, 0, None)
        self._signs, self._next_signs = 0, 1  # polls that showed that another model may train
        self._end_search: Undo | None = None
        self._trained = TrainedModules(timeline)
        skip_call(self._trained.is_evaluated)
        skip_call(self._note)
        self._wake = guard(self.wake)

    def begin(self) -> None:
        """Search from the end of the first step on."""
        self._timeline.steps.wake_at(1, self._wake)

    def wake(self, step: int) -> int:
        """Begin or end a search at the end of `step`. Returns the step for the next call."""
        self._stop_searching()
        if step < self._next_search:
            return self._next_search
        self._next_search = step * SEARCH_FACTOR
        self._search()
        return step + SEARCH_STEPS

    def poll(self) -> None:
        """Search again if another optimizer steps now, or if no known module is called: another model may train."""
        steps = self._timeline.steps
        now = self._timeline.seconds[FORWARD], steps.count, self._objects.get("optimizer")
        before, self._polled = self._polled, now
        is_unused = now[0] == before[0] and now[1] > before[1]
        if steps.count < SETTLED_STEPS or not (is_unused or now[2] is not before[2]):
            return
        self._signs += 1
        if self._signs >= self._next_signs and self._end_search is None:
            self._next_signs *= 2  # the job may have no modules, or many optimizers
            self._search_until(steps.count + SEARCH_STEPS)

    def trained_parts(self, args: Arguments, _kwargs: dict[str, Any]) -> set[int] | None:
        """Return the ids of a module and its parts that are in training mode, if a search in its evaluation is due."""
        module, known = args[0], self._trained.ids
        # First what has no parts: some scripts set each normalization layer to evaluation mode in each step.
        if not (parts := submodules(module)) or self._end_search is not None or not self._timeline.steps.has_started:
            return None
        if known.isdisjoint((id(module), *map(id, parts.values()))):
            return None
        self._evaluations += 1
        if self._evaluations < self._next_evaluation:
            return None
        self._next_evaluation *= SEARCH_FACTOR
        return {id(part) for part in all_parts(module) if is_in_training_mode(part)}

    def begin_evaluation(self, parts: set[int], args: Arguments, _result: object, returned: bool) -> None:
        """Search in an evaluation: the script may call parts of the model, or methods that do."""
        if returned:
            self._trained.add_parts(args[0], parts)
            self._search_until(self._timeline.steps.count + 1)

    def remove(self) -> None:
        """Restore every class."""
        self._pause_search()
        self._forget_compiler()
        for undo in reversed(self._watched.values()):
            undo()
        self._watched.clear()

    def _search_until(self, step: int) -> None:
        self._search()
        self._timeline.steps.wake_at(step, self._wake)

    def _search(self) -> None:
        self._seconds = self._pass_seconds()
        self._end_search = replace(torch.nn.Module, "__call__", self._in_search)
        if handler := _compiler_callbacks():
            handler.register_start_callback(self._pause_search)

    def _pass_seconds(self) -> float:
        return self._timeline.seconds[FORWARD] + self._timeline.seconds[EVALUATION]

    def _note(self, module: torch.nn.Module) -> None:
        """Keep the class and the seconds of a root module's call until the end of the search."""
        before, self._seconds = self._seconds, self._pass_seconds()
        seconds = self._seconds - before
        if not seconds:  # on another thread
            return
        self._found.setdefault(type(module), []).append(seconds)
        if (wrapped := wrapped_module(module)) is not None:
            self._found.setdefault(type(wrapped), []).append(seconds)

    def _pause_search(self, *_: object) -> None:
        """Stop the search before torch.compile traces, so that it compiles the same as without the hook."""
        if self._end_search:
            self._end_search()
            self._end_search = None

    def _stop_searching(self) -> None:
        self._pause_search()
        self._forget_compiler()
        if (reference := self._objects.get("ddp")) and (module := reference()) is not None:  # ddp.py watches its calls
            self._found.setdefault(type(module.module), []).append(SHORT_SECONDS)
        for module_class, calls in self._found.items():
            if is_worth_watching(module_class, calls) and module_class not in self._watched:
                self._watch(module_class)
        self._found.clear()

    def _forget_compiler(self) -> None:
        handler = _compiler_callbacks()
        if handler and self._pause_search in handler.start_callbacks:  # torch._dynamo.reset() forgets it, too
            handler.remove_start_callback(self._pause_search)

    def _watch(self, module_class: type[torch.nn.Module]) -> None:
        inherits = "__call__" not in vars(module_class)

        def make(original: Function) -> Function:
            return self._in_pass(original, inherited_call(module_class) if inherits else original)

        self._watched[module_class] = replace(module_class, "__call__", make)

    def _in_search(self, original: Function) -> Function:
        """Wrap the call of a module of any class, and note the outermost ones."""
        timeline, guard, within = self._timeline, self._guard, self._in_pass(original, original)

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if guard.disabled or is_dynamo_compiling() or timeline.is_within(NOT_SEARCHED):
                return original(module, *args, **kwargs)
            try:
                return within(module, *args, **kwargs)
            finally:
                try:
                    self._note(module)
                except BaseException as error:
                    guard.handle(error)

        return skip_frame(watched)

    def _in_pass(self, original: Function, plain: Function) -> Function:
        """Wrap `plain`, a call of a module of a watched class, as forward or evaluation.

        torch.compile gets `original`: code that looks it up would be recompiled at the next search.
        """
        timeline, guard, trained = self._timeline, self._guard, self._trained
        known = trained.ids

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if guard.disabled:
                return plain(module, *args, **kwargs)
            if is_dynamo_compiling():
                return original(module, *args, **kwargs)
            try:
                if not (id(module) in known and module.training) and trained.is_evaluated(module):
                    opened = None if timeline.is_within(NO_EVALUATION_WITHIN) else timeline.enter(EVALUATION)
                elif timeline.open_phases[1] is not None and (
                    (timeline.open_phases[0] in NOT_WITHIN and timeline.usual_owner is not None)
                    or timeline.is_within(NOT_WITHIN)
                ):
                    opened = None
                else:
                    opened = timeline.enter(FORWARD)
            except BaseException as error:
                guard.handle(error)
                opened = None
            try:
                return plain(module, *args, **kwargs)
            finally:
                if opened is not None:
                    try:
                        timeline.leave(opened)
                    except BaseException as error:
                        guard.handle(error)

        return skip_frame(watched)


def wrapped_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that another one wraps, which a script may call directly; None if it wraps none."""
    parts = submodules(module)
    return next((parts[name] for name in WRAPPED if parts.get(name) is not None), None)


def submodules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the module's submodules; its methods for that may be the script's."""
    return own_attribute(module, "_modules") or {}


def all_parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the module and its submodules of all levels, each once."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        new = {
            id(part): part for part in submodules(waiting.pop()).values() if part is not None and id(part) not in found
        }
        found |= new
        waiting += new.values()
    return list(found.values())


def is_worth_watching(module_class: type[torch.nn.Module], calls: list[float]) -> bool:
    """Return whether to watch a class, by the seconds of each root call of its instances."""
    if issubclass(module_class, DistributedDataParallel):
        return False
    return len(calls) <= MANY_CALLS or min(calls) >= SHORT_SECONDS


def inherited_call(module_class: type[torch.nn.Module]) -> Function:
    """Return the inherited `__call__`, looked up at each call: torch.fx replaces nn.Module's while it traces."""

    def inherited(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super(module_class, module).__call__(*args, **kwargs)  # type: ignore[misc]  # torch does not declare it

    return skip_frame(inherited)


def _compiler_callbacks() -> Any:
    """Return torch.compile's registry of callbacks; None if torch._dynamo is not loaded."""
    dynamo = sys.modules.get("torch._dynamo")
    return getattr(dynamo, "callback_handler", None)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Search for root modules from the end of the first step on."""
    roots = RootModules(timeline, guard)
    roots.begin()
    watch = around(guard, roots.trained_parts, roots.begin_evaluation)
    return [roots.remove, timeline.steps.add_poll(guard(roots.poll)), replace(torch.nn.Module, "eval", watch)]
