"""Checkpoints: the functions that write them, whether the script or a framework calls them.

Of a save that goes on in the background only what keeps the training thread is checkpoint time; it counts when it
is finished. A save that raises counts for nothing.
"""

from __future__ import annotations

import atexit
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import Arguments, Function, around
from rankscope.timeline.phases import Phases
from rankscope.timeline.timeline import Timeline

# Smaller files are checkpoints only if they hold a model's or an optimizer's state: metrics are saved too.
SMALLEST = 64 * 1024

Count = Callable[[float, float], None]  # of a save that is finished: its bytes, and when in unix time

# From a save's result, how many bytes it wrote (0: not known; None: it was no checkpoint after all).
Size = Callable[[Any], float | None]
# Asked before a save: None if it is no checkpoint.
Measure = Callable[[Arguments, dict[str, Any]], Size | None]


def argument(args: Arguments, kwargs: dict[str, Any], index: int, name: str) -> Any:
    """An argument of a call by index or name; None if it is missing."""
    return args[index] if len(args) > index else kwargs.get(name)


def of_torch_save(args: Arguments, kwargs: dict[str, Any]) -> Size | None:
    """`torch.save(obj, f)`: to a path, to a regular file, or of a state into memory, from where the script writes it.

    What goes into a pipe is communication, and so is what torch.distributed serializes to send it.
    """
    value, target = argument(args, kwargs, 0, "obj"), argument(args, kwargs, 1, "f")
    if not isinstance(target, (str, os.PathLike)):
        mode = file_mode(target)
        is_saved = holds_state(value) and not is_called_by("torch.distributed") if mode is None else stat.S_ISREG(mode)
        if not is_saved:
            return None
    before = extent(target, before=True)

    def size(_result: object) -> float | None:
        written = extent(target) - before
        return written if written >= SMALLEST or holds_state(value) else None

    return size


def to_path(index: int, name: str) -> Measure:
    """A function that writes one file, which this argument names."""

    def measure(args: Arguments, kwargs: dict[str, Any]) -> Size:
        path = argument(args, kwargs, index, name)
        return lambda _result: extent(path)

    return measure


def of_distributed(_args: Arguments, kwargs: dict[str, Any]) -> Size:
    """`torch.distributed.checkpoint.save`: every rank learns the metadata of the whole checkpoint."""
    rank = rank_within(kwargs)
    return lambda metadata: bytes_of_rank(metadata, rank)


class AsyncSaves:
    """`torch.distributed.checkpoint.async_save`: what goes on after it returned.

    Its future is finished on another thread, which may not write to the record: that thread only notes it, and the
    training thread counts it at the next poll, or at the end of the process.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._finished: deque[tuple[Any, Count, int, float]] = deque()

    def measure(self, _args: Arguments, kwargs: dict[str, Any]) -> Size:
        """As `Measure`: never a checkpoint when the call returns."""
        rank = rank_within(kwargs)

        def started(result: Any) -> None:
            count = self._timeline.checkpoints.later()
            future = getattr(result, "upload_completion", result)
            future.add_done_callback(lambda done: self._finished.append((done, count, rank, time.time())))

        return started

    def poll(self) -> None:
        """Count what was finished since the last poll."""
        while self._finished:
            future, count, rank, unix = self._finished.popleft()
            if not future.cancelled() and future.exception() is None:
                count(bytes_of_rank(future.result(), rank), unix)


def file_mode(target: Any) -> int | None:
    """Return the mode of the file that a file object writes to; None if it writes into memory."""
    try:
        return os.fstat(target.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no descriptor, or closed
        return None


def is_called_by(package: str) -> bool:
    """Whether the watched function was called by code of this package."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("rankscope."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(package)


def of_safetensors_bytes(_args: Arguments, _kwargs: dict[str, Any]) -> Size:
    """`safetensors.torch.save(tensors)`: returns the bytes of a file, which the script writes."""
    return lambda result: float(len(result)) if len(result) >= SMALLEST else None


def extent(target: Any, before: bool = False) -> float:
    """Bytes in a path's file (none `before` it is written over), or up to where a file object stands."""
    try:
        if isinstance(target, (str, os.PathLike)):
            return 0.0 if before else float(os.stat(target).st_size)  # noqa: PTH116 - any PathLike, as torch takes it
        return float(target.tell())
    except (AttributeError, OSError):  # no file of this name, or no position: the size is not known
        return 0.0


def holds_state(value: Any) -> bool:
    """Whether this is what a module's or an optimizer's `state_dict` gave, or a dict that has one in it."""
    return is_state(value) or (isinstance(value, Mapping) and any(map(is_state, value.values())))


def is_state(value: Any) -> bool:
    """Whether this is a module or a `state_dict`: a module's carries `_metadata`, an optimizer's has two known keys."""
    if isinstance(value, torch.nn.Module):
        return True
    return hasattr(value, "_metadata") or (isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys())


def rank_within(kwargs: dict[str, Any]) -> int:
    """This rank's number among those that save together, which names its files."""
    distributed = torch.distributed
    if kwargs.get("no_dist") or not (distributed.is_available() and distributed.is_initialized()):
        return 0
    return max(0, distributed.get_rank(kwargs.get("process_group")))


def bytes_of_rank(metadata: Any, rank: int) -> float:
    """What `rank` wrote, by the metadata of the whole: torch's writers name its files `__<rank>_<number>.distcp`."""
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(stored, Mapping):
        return 0.0
    prefix = f"__{rank}_"
    files = (info for info in stored.values() if str(getattr(info, "relative_path", "")).startswith(prefix))
    return float(sum(info.length for info in files))


class Patches:
    """The functions that are watched, of the modules that the job has imported so far."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._guard = guard
        self._undo: list[Undo] = []
        # One for each function, however many modules have it: pickle finds a function by its own module's name.
        self._wrappers: dict[Function, Function] = {}
        self.saves = AsyncSaves(timeline)
        distributed = (
            ("save", of_distributed),
            ("_save_state_dict", of_distributed),
            ("async_save", self.saves.measure),
        )
        self._awaited: dict[str, Sequence[tuple[str, Measure]]] = {
            "torch": (("save", of_torch_save),),
            "torch.serialization": (("save", of_torch_save),),
            "torch.distributed.checkpoint": distributed,
            # Whoever took `save` from there before us still ends up in the second of the three.
            "torch.distributed.checkpoint.state_dict_saver": distributed,
            # As transformers does with `save_file`, which ends up in the third.
            "safetensors.torch": (
                *((name, to_path(1, "filename")) for name in ("save_file", "save_model", "serialize_file")),
                ("save", of_safetensors_bytes),
            ),
            # It has torch.save write into memory, then writes that.
            "lightning.fabric.plugins.io.torch_io": (("TorchCheckpointIO.save_checkpoint", to_path(2, "path")),),
            "lightning_fabric.plugins.io.torch_io": (("TorchCheckpointIO.save_checkpoint", to_path(2, "path")),),
        }

    def poll(self) -> None:
        """Watch what has been imported since, and count what was finished since."""
        for module in [name for name in self._awaited if name in sys.modules]:
            for path, measure in self._awaited.pop(module):
                self._watch(sys.modules[module], path, measure)
        self.saves.poll()

    def remove(self) -> None:
        """Restore every function."""
        self.saves.poll()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _watch(self, owner: Any, path: str, measure: Measure) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        wrap = in_checkpoint(self._timeline, self._guard, measure)
        if hasattr(owner, name):
            self._undo.append(replace(owner, name, lambda it: self._wrappers.setdefault(it, wrap(it))))


def in_checkpoint(timeline: Timeline, guard: Guard, measure: Measure) -> Callable[[Function], Function]:
    """A wrapper that counts a call as a checkpoint, if `measure` says that it is one."""

    def begin(args: Arguments, kwargs: dict[str, Any]) -> tuple[Phases, Size] | None:
        size = measure(args, kwargs)
        opened = timeline.checkpoints.begin() if size is not None else None
        return (opened, size) if opened and size is not None else None

    def end(call: tuple[Phases, Size], _args: Arguments, result: Any, returned: bool) -> None:
        opened, size = call
        written = None
        try:
            written = size(result) if returned else None
        finally:
            timeline.checkpoints.end(opened, written)

    return around(guard, begin, end)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch what is imported already, and later, at a step's end, what has come."""
    patches = Patches(timeline, guard)
    poll: Any = guard(patches.poll)
    last_poll: Any = guard(patches.saves.poll)  # the last save of a job is often finished after its last step
    poll()
    timeline.steps.polls.append(poll)
    atexit.register(last_poll)
    return [patches.remove, lambda: timeline.steps.polls.remove(poll), lambda: atexit.unregister(last_poll)]
