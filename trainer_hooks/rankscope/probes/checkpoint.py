"""Checkpoints: it watches the functions that write them, called by the script or by a framework.

Of an asynchronous save, only the time that blocks the training thread is checkpoint time, and the save counts when it
is finished. So does one of a state by another thread of the script. A save that raises does not count.

A method of an object of the job may have an effect (a spooled file that is asked for its descriptor moves to the disk)
or raise anything. So only objects of known types are asked.
"""

from __future__ import annotations

import atexit
import io
import os
import socket
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import getattr_static
from itertools import islice, takewhile
from pathlib import PosixPath, PurePosixPath
from types import FrameType
from typing import Any

import torch

from rankscope.foreign import items
from rankscope.guard import Guard
from rankscope.patch import Patches, Undo
from rankscope.probes.span import Arguments, Function, around
from rankscope.timeline.phases import Phases
from rankscope.timeline.timeline import Timeline

# A smaller file is a checkpoint only if it holds a model's or an optimizer's state: scripts save metrics too.
MIN_CHECKPOINT_BYTES = 64 * 1024

MOST_ITEMS, MOST_LEVELS = 32, 3  # of containers in which a state is looked for
PARAMETERS = (".weight", ".bias")  # the last parts of their names

PATHS = (PosixPath, PurePosixPath)
RAW_FILES = (io.FileIO, socket.SocketIO)

MOST_FILES = 256  # of one rank in a distributed save; it writes one, or one for each thread; more are not read

Count = Callable[[float, float], None]  # takes the bytes of a finished save, and its unix time

# Takes a save's result; returns the bytes that it wrote (0: not known; None: not a checkpoint).
Size = Callable[[Any], float | None]
# Called before a save; returns None if it is not a checkpoint.
Measure = Callable[[Arguments, dict[str, Any]], Size | None]


def argument(args: Arguments, kwargs: dict[str, Any], index: int, name: str) -> Any:
    """Return an argument of a call by index or name; None if it is missing."""
    return args[index] if len(args) > index else kwargs.get(name)


def measure_torch_save(args: Arguments, kwargs: dict[str, Any]) -> Size | None:
    """Measure `torch.save(obj, f)` to a path, to a regular file, or of a state into memory, for the script to write.

    A save into a pipe is communication, and so is what torch.distributed serializes to send.
    """
    value, target = argument(args, kwargs, 0, "obj"), argument(args, kwargs, 1, "f")
    if file_path(target) is None:
        mode = file_mode(target)
        is_saved = holds_state(value) and not is_called_by("torch.distributed") if mode is None else stat.S_ISREG(mode)
        if not is_saved:
            return None
    before = written_bytes(target, before=True)

    def size(_result: object) -> float | None:
        written = written_bytes(target) - before
        return written if written >= MIN_CHECKPOINT_BYTES or holds_state(value) else None

    return size


def measure_thread_save(args: Arguments, kwargs: dict[str, Any]) -> Size | None:
    """Measure `torch.save` of a state by another thread than the training's, but not by a thread of torch."""
    is_state = holds_state(argument(args, kwargs, 0, "obj")) and not is_called_by("torch.distributed")
    return measure_torch_save(args, kwargs) if is_state else None


def measure_path(index: int, name: str) -> Measure:
    """Return a measure of functions that write one file, whose path is this argument."""

    def measure(args: Arguments, kwargs: dict[str, Any]) -> Size:
        path = argument(args, kwargs, index, name)
        return lambda _result: written_bytes(path)

    return measure


def measure_distributed(args: Arguments, kwargs: dict[str, Any]) -> Size:
    """Measure `torch.distributed.checkpoint.save`, which returns the metadata of the whole checkpoint to every rank."""
    rank, directory = rank_in_group(kwargs), directory_of(args, kwargs)
    return lambda metadata: bytes_of_rank(metadata, rank, directory)


class AsyncSaves:
    """Saves by `torch.distributed.checkpoint.async_save` that continue after it returns, and by threads of the script.

    The other thread must not write to the record, so it only notes the save; the training thread counts it at the next
    poll or at the end of the process.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._finished: deque[Callable[[], object]] = deque()

    def measure(self, args: Arguments, kwargs: dict[str, Any]) -> Size:
        """Register a save. It is not a checkpoint yet when the call returns."""
        rank, directory = rank_in_group(kwargs), directory_of(args, kwargs)

        def started(result: Any) -> None:
            count = self._timeline.checkpoints.count_later()
            future = getattr(result, "upload_completion", result)
            future.add_done_callback(
                lambda done: self._finished.append(partial(count_future, done, count, rank, directory, time.time()))
            )

        return started

    def note(self, size: float) -> None:
        """Note a save of `size` bytes that another thread has finished."""
        self._finished.append(partial(self._timeline.checkpoints.count, size, 0.0, time.time()))

    def poll(self) -> None:
        """Count the saves finished since the last poll."""
        while self._finished:
            self._finished.popleft()()


def count_future(future: Any, count: Count, rank: int, directory: Any, unix: float) -> None:
    """Count the save of a finished future, unless it failed."""
    if not future.cancelled() and future.exception() is None:
        count(bytes_of_rank(future.result(), rank, directory), unix)


def file_path(target: Any) -> str | None:
    """Return the path that a text or a path of pathlib holds; None for any other object."""
    if issubclass(type(target), str):
        return str.__str__(target)
    return os.fspath(target) if type(target) in PATHS else None


def opened_file(target: Any) -> Any:
    """Return the file that `open` or `tempfile.NamedTemporaryFile` has made; None for any other object."""
    file: Any = target.file if type(target) is tempfile._TemporaryFileWrapper else target  # noqa: SLF001 - no public name
    raw = file.raw if type(file) in (io.BufferedWriter, io.BufferedRandom) else file
    return file if type(raw) in RAW_FILES else None


def file_mode(target: Any) -> int | None:
    """Return the mode of the file that a file object writes to; None if it writes into memory or is not known."""
    with suppress(AttributeError, OSError, ValueError):  # closed, or its buffer is detached
        return os.fstat(opened_file(target).fileno()).st_mode
    return None


def is_called_by(package: str) -> bool:
    """Return whether code of this package called the watched function."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("rankscope."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(package)


def measure_safetensors_bytes(_args: Arguments, _kwargs: dict[str, Any]) -> Size:
    """Measure `safetensors.torch.save(tensors)`, which returns the bytes of a file for the script to write."""
    return lambda result: float(len(result)) if len(result) >= MIN_CHECKPOINT_BYTES else None


def written_bytes(target: Any, before: bool = False) -> float:
    """Return the bytes of a path's file (0 `before` it is overwritten), or the position of a file object."""
    with suppress(AttributeError, OSError, ValueError):  # no such file, or no position: the size is not known
        path = file_path(target)
        if path is not None:
            return 0.0 if before else float(os.stat(path).st_size)  # noqa: PTH116 - a Path is slower
        return float((target if type(target) is io.BytesIO else opened_file(target)).tell())
    return 0.0


def holds_state(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Return whether this is the `state_dict` of a module or an optimizer, or nested containers that hold one."""
    if is_state(value):
        return True
    found = items(value) if levels else None
    return any(holds_state(item, levels - 1) for item in islice(found or (), MOST_ITEMS))


def is_state(value: Any) -> bool:
    """Return whether this is a module, or a `state_dict`.

    That is one by its `_metadata` (module), its two keys (optimizer), or the names of its tensors: a plain dict.
    """
    if issubclass(type(value), torch.nn.Module):
        return True
    if not issubclass(type(value), dict):
        return False
    if getattr_static(value, "_metadata", None) is not None or {"state", "param_groups"} <= dict.keys(value):
        return True
    return any(map(is_parameter, islice(dict.items(value), MOST_ITEMS)))


def is_parameter(item: tuple[Any, Any]) -> bool:
    """Return whether this is a tensor with a parameter's name, such as `layers.0.weight`."""
    return type(item[0]) is str and item[0].endswith(PARAMETERS) and issubclass(type(item[1]), torch.Tensor)


def rank_in_group(kwargs: dict[str, Any]) -> int:
    """Return this rank's number among the ranks that save together, which is part of its files' names."""
    distributed = torch.distributed
    if kwargs.get("no_dist") or not (distributed.is_available() and distributed.is_initialized()):
        return 0
    return max(0, distributed.get_rank(kwargs.get("process_group")))


def directory_of(args: Arguments, kwargs: dict[str, Any]) -> str | None:
    """Return the directory of a distributed save; None if it is not known. It may be a URL."""
    path = file_path(kwargs.get("checkpoint_id"))
    return path or file_path(getattr_static(argument(args, kwargs, 1, "storage_writer"), "path", None))


def bytes_of_rank(metadata: Any, rank: int, directory: str | None = None) -> float:
    """Return the bytes that `rank` wrote; 0 if they are not known. Its files are `__<rank>_<number>.distcp`.

    The metadata has their sizes, but not the one that torch 2.9 to 2.11 returns; there the files are read.
    """
    prefix = f"__{rank}_"
    stored = getattr_static(metadata, "storage_data", None)
    if type(stored) is dict:
        with suppress(Exception):  # a writer of the script gives sizes of its own
            return float(sum(info.length for info in stored.values() if info.relative_path.startswith(prefix)))
    if directory is None:
        return 0.0
    paths = (f"{directory}/{prefix}{number}.distcp" for number in range(MOST_FILES))
    sizes = list(takewhile(bool, map(written_bytes, paths)))
    return sum(sizes) if len(sizes) < MOST_FILES else 0.0


class SavePatches:
    """The watched functions of the modules that the job has imported so far."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._guard = guard
        self._patches = Patches()
        # One wrapper per function, however many modules have it: pickle finds a function by its own module's name.
        self._wrappers: dict[Function, Function] = {}
        self.saves = AsyncSaves(timeline)
        distributed = (
            ("save", measure_distributed),
            ("_save_state_dict", measure_distributed),
            ("async_save", self.saves.measure),
        )
        self._awaited: dict[str, Sequence[tuple[str, Measure]]] = {
            "torch": (("save", measure_torch_save),),
            "torch.serialization": (("save", measure_torch_save),),
            "torch.distributed.checkpoint": distributed,
            # A `save` imported from there before the patch still calls the second of the three.
            "torch.distributed.checkpoint.state_dict_saver": distributed,
            # transformers imports `save_file` before the patch; it calls the third of these.
            "safetensors.torch": (
                *((name, measure_path(1, "filename")) for name in ("save_file", "save_model", "serialize_file")),
                ("save", measure_safetensors_bytes),
            ),
            # It calls torch.save into memory, then writes that to the file.
            "lightning.fabric.plugins.io.torch_io": (("TorchCheckpointIO.save_checkpoint", measure_path(2, "path")),),
            "lightning_fabric.plugins.io.torch_io": (("TorchCheckpointIO.save_checkpoint", measure_path(2, "path")),),
        }

    def poll(self) -> None:
        """Watch modules imported since the last poll, and count saves finished since then."""
        for module in [name for name in self._awaited if name in sys.modules]:
            for path, measure in self._awaited.pop(module):
                self._watch(sys.modules[module], path, measure)
        self.saves.poll()

    def remove(self) -> None:
        """Restore every function."""
        self.saves.poll()
        self._patches.undo()

    def _watch(self, owner: Any, path: str, measure: Measure) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        note = self.saves.note if measure is measure_torch_save else None
        wrap = in_checkpoint(self._timeline, self._guard, measure, note)
        if hasattr(owner, name):
            self._patches.add(owner, name, lambda it: self._wrappers.setdefault(it, wrap(it)))


def in_checkpoint(
    timeline: Timeline, guard: Guard, measure: Measure, note: Callable[[float], object] | None = None
) -> Callable[[Function], Function]:
    """Return a wrapper that counts a call as a checkpoint if `measure` does not return None.

    If it is given, `note` is called with the bytes of a state that another thread has saved.
    """

    def begin(args: Arguments, kwargs: dict[str, Any]) -> tuple[Phases | None, Size] | None:
        size = measure(args, kwargs)
        opened = timeline.checkpoints.begin() if size is not None else None
        if opened is None and note is not None:
            size = measure_thread_save(args, kwargs)
        return (opened, size) if size is not None and (opened or note) else None

    def end(call: tuple[Phases | None, Size], _args: Arguments, result: Any, returned: bool) -> None:
        opened, size = call
        written = None
        try:
            written = size(result) if returned else None
        finally:
            if opened:
                timeline.checkpoints.end(opened, written)
            elif note is not None and written is not None:
                note(written)

    return around(guard, begin, end)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the modules that are imported already; at each poll, those imported since."""
    patches = SavePatches(timeline, guard)
    poll = guard(patches.poll)
    last_poll = guard(patches.saves.poll)  # a job's last save often finishes after its last step
    poll()
    atexit.register(last_poll)
    return [patches.remove, timeline.steps.add_poll(poll), lambda: atexit.unregister(last_poll)]
