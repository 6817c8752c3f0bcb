"""The reader of a rank record: it returns a consistent `RankSnapshot` of a file that another user may have written.

It never writes to the file, follows a link or maps it (if another process truncates a mapped file, its reader is
killed).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from rankscope.record import layout
from rankscope.record.clock import MACHINE, Clocks, boot_id, own_clocks
from rankscope.record.directory import open_untrusted
from rankscope.record.labels import are_labels
from rankscope.record.layout import FIELDS, INDEX
from rankscope.record.numbers import LARGEST
from rankscope.record.process_stat import is_running
from rankscope.record.snapshot import RankSnapshot, Rings
from rankscope.record.text import is_link, is_name

_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock on 64 bits; the last field is l_pid
_READ_ATTEMPTS = 50
_BUCKETS = slice(INDEX["step_buckets"], INDEX["step_buckets"] + FIELDS["step_buckets"])
INFOS_REMEMBERED = 1024  # as many as the exporter reads in a second
REMEMBERED_BYTES = 4096  # of an info; one of a usual rank has about 1,500


class UnreadableRecordError(Exception):
    """A file is not a record that this version can read. `reason` is one of a few words, a metric's label."""

    def __init__(self, reason: str, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.reason = reason
        self.path = path


def read_rank(
    path: Path, directory: int | None = None, *, with_steps: bool = False, unix_offset: float | None = None
) -> RankSnapshot:
    """Return a consistent snapshot of a record. `directory`, if given, is an open descriptor of its directory.

    Its monotonic times are by this process's clock, also if the rank has another one, in a time namespace.
    The rings of the last steps, half of the file, are read only `with_steps`. `unix_offset` is the offset from
    monotonic to unix time; by default by the clocks' current setting. Raises FileNotFoundError if there is no such
    file, else UnreadableRecordError.
    """
    with _opened(path, directory) as descriptor:
        _check_header(path, os.fstat(descriptor), os.pread(descriptor, layout.HEADER.size, 0))
        # The lock before the data: then the data of a dead process is final, and a clean end never looks like a kill.
        lock_pid = lock_holder(descriptor)
        data = _consistent(descriptor, path, is_final=lock_pid is None)
        rings = _rings(descriptor, path) if with_steps else Rings()
        spoke_last_words = os.pread(descriptor, 1, layout.LAST_WORDS_OFFSET) != b"\0"
        modified = os.fstat(descriptor).st_mtime
    info = _info(path, data)
    ahead = _own_clocks().ahead_of(info.get("clocks", MACHINE))
    if lock_pid and is_running(lock_pid, info.get("process_start"), ahead.boottime) is False:
        lock_pid = None  # a process with the same descriptors keeps the lock of an ended one
    if unix_offset is None:
        unix_offset = time.time() - time.monotonic()
    is_of_this_boot = lock_pid is not None or (info.get("boot_id") or None) == boot_id()
    return RankSnapshot(
        path=path,
        alive=lock_pid is not None,
        slots=_slots(path, data, info, ahead.monotonic),
        info=info,
        last_words_at=modified if spoke_last_words else None,
        read_monotonic=time.monotonic(),
        lock_pid=lock_pid or 0,
        rings=rings,
        unix_offset=unix_offset if is_of_this_boot else None,
        ahead=ahead,
    )


@lru_cache(maxsize=1)
def _own_clocks() -> Clocks:
    """Return the reader's clocks, cached: it reads every second."""
    return own_clocks()


def _rings(descriptor: int, path: Path) -> Rings:
    steps = _ring(descriptor, path, layout.RING_OFFSET, layout.RING_SLOTS, "steps")
    return Rings(*steps, *_ring(descriptor, path, layout.DEVICE_RING_OFFSET, layout.DEVICE_RING_SLOTS, "device_steps"))


def _ring(descriptor: int, path: Path, offset: int, slots: int, counter: str) -> tuple[bytes, float]:
    """Read a ring and, right after it, the counter of its entries, to know which may have been overwritten."""
    ring = _read(descriptor, path, 8 * slots, offset)
    (after,) = struct.unpack("d", _read(descriptor, path, 8, layout.SLOTS_OFFSET + 8 * INDEX[counter]))
    return ring, after


@contextlib.contextmanager
def _opened(path: Path, directory: int | None) -> Iterator[int]:
    name = path if directory is None else path.name
    try:
        descriptor = open_untrusted(name, directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "symlink" if error.errno == errno.ELOOP else "unreadable"
        raise UnreadableRecordError(reason, path, error.strerror or str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableRecordError("foreign", path, "not a regular file")
        yield descriptor
    except OSError as error:  # a file system may fail at any call, even for locks
        raise UnreadableRecordError("unreadable", path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _check_header(path: Path, status: os.stat_result, header: bytes) -> None:
    if len(header) < layout.HEADER.size:
        raise UnreadableRecordError("truncated", path, f"only {status.st_size} bytes")
    magic, version, _, digest = layout.HEADER.unpack(header)
    if magic != layout.MAGIC:
        raise UnreadableRecordError("foreign", path, "not a rank record")
    if (version, digest) != (layout.VERSION, layout.LAYOUT):
        raise UnreadableRecordError(
            "version", path, f"from another version of Rankscope: layout {version}/{digest.hex()}"
        )
    if status.st_size < layout.SIZE:
        raise UnreadableRecordError("truncated", path, f"{status.st_size} bytes of {layout.SIZE}")


def _consistent(descriptor: int, path: Path, is_final: bool) -> bytes:
    """Return the record's bytes before the ring, read while its info did not change."""
    for _ in range(_READ_ATTEMPTS):
        data = _read(descriptor, path, layout.RING_OFFSET, 0)
        sequence = _info_sequence(data)
        if sequence % 2 == 0 and sequence == _info_sequence(os.pread(descriptor, 80, 0)):
            return data
    if is_final:
        return data
    raise UnreadableRecordError("unreadable", path, "its info changed during each read")


def _read(descriptor: int, path: Path, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) < size:
        raise UnreadableRecordError("truncated", path, f"{offset + len(data)} bytes of {layout.SIZE}")
    return data


def _info_sequence(data: bytes) -> float:
    return float(struct.unpack_from("d", data, layout.SLOTS_OFFSET + 8 * INDEX["info_sequence"])[0])


def _info(path: Path, data: bytes) -> dict[str, Any]:
    (text_at,) = struct.unpack_from("d", data, layout.SLOTS_OFFSET + 8 * INDEX["info_place"])
    offset, length = divmod(text_at, layout.INFO_OFFSET_UNIT)
    if not (offset >= 0 and length >= 1 and offset + length <= layout.INFO_CAPACITY):  # false for NaN
        raise UnreadableRecordError("foreign", path, f"invalid place of its info: {text_at}")
    begin = layout.INFO_OFFSET + int(offset)
    try:
        parse = _parsed if length <= REMEMBERED_BYTES else _parsed.__wrapped__
        return parse(data[begin : begin + int(length)])
    except (ValueError, RecursionError) as error:  # thousands of brackets exhaust the parser's stack
        raise UnreadableRecordError("foreign", path, f"its info is invalid: {error}") from error


@lru_cache(maxsize=INFOS_REMEMBERED)
def _parsed(text: bytes) -> dict[str, Any]:
    """Return the parsed info, cached by its text: it is read every second and rarely changes."""
    info = json.loads(text)
    if (
        not isinstance(info, dict)
        or not _are_names(info.get("phases", []))
        or not _are_texts(info.get("probes_disabled", []))
        or not all(_are_texts(info.get(name, [])) for name in ("groups", "group_descriptions", "pairwise"))
        or not _are_texts_by(layout.SETTINGS, info.get("settings", {}))
        or not _are_texts_by(layout.SLURM, info.get("slurm", {}))
        or not isinstance(info.get("rendezvous", ""), str)
        or not are_labels(info.get("labels", {}))
        or not all(_are_texts_by(layout.TRACKERS, info.get(name, {})) for name in ("tracker_ids", "tracker_urls"))
        or not all(url == "" or is_link(url) for url in info.get("tracker_urls", {}).values())
        or not _are_clocks(info.get("clocks", MACHINE))
    ):
        raise ValueError("unexpected structure")
    # Cache nothing that takes many times as much memory as its text.
    return {sys.intern(name): value for name, value in info.items() if _is_flat(value)}


def _is_flat(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(one, (dict, list)) for one in inner)


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_texts_by(names: Sequence[str], value: object) -> bool:
    return isinstance(value, dict) and value.keys() <= set(names) and _are_texts(list(value.values()))


def _are_clocks(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != len(MACHINE):
        return False
    return all(isinstance(offset, (int, float)) and abs(offset) <= LARGEST for offset in value)  # false for NaN


def _are_names(value: object) -> bool:
    if not _are_texts(value) or not all(map(is_name, value)):
        return False
    names = [*layout.PHASES, *value]
    return len(names) <= layout.MAX_PHASES and len(names) == len(set(names))


def _slots(path: Path, data: bytes, info: dict[str, Any], ahead: float) -> array[float]:
    """Return the slots, with times by the reader's clock, which is `ahead` of the rank's by so many seconds."""
    slots = array("d", data[layout.SLOTS_OFFSET : layout.SLOTS_OFFSET + 8 * layout.SLOTS])
    phases = len(layout.PHASES) + len(info.get("phases", ()))
    # NaN makes the sum NaN, and each comparison with NaN is false.
    are_values = min(slots) >= 0.0 and sum(slots) <= LARGEST and slots[INDEX["phase"]] < phases
    since = slots[INDEX["phase_since"]]
    is_in_order = since == 0.0 or slots[INDEX["started_monotonic"]] <= since
    # OpenMetrics requires integers in a histogram's buckets.
    if not (are_values and is_in_order and all(map(float.is_integer, slots[_BUCKETS]))):
        raise UnreadableRecordError("foreign", path, "values that no rank can have written")
    for name in layout.MONOTONIC if ahead else ():
        if slots[INDEX[name]]:
            slots[INDEX[name]] += ahead
    return slots


def lock_holder(descriptor: int) -> int | None:
    """Return the process that holds the record's write lock: None if free, 0 if not visible in this pid namespace.

    Only a write lock shows that the rank is alive: it takes a writable descriptor, which only the owner gets. Any user
    who can read the record can hold a read lock. So this asks the kernel about a read lock, which conflicts only with a
    write lock.
    """
    request = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))  # -1: the lock of an open file description
