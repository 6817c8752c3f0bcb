"""The writer of a rank record: first in private memory, then in a mapped file in the run directory.

The file has a POSIX record lock, which the kernel releases at any kind of death and which forked children do not
inherit. So a reader knows whether the rank is alive, even from another pid namespace. The lock is lost when the process
closes any descriptor of the file; `renew` takes it again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope.record import layout
from rankscope.record.directory import opened
from rankscope.record.layout import INDEX
from rankscope.record.mapping import map_shared
from rankscope.record.own_descriptor import OwnDescriptor, file_of

SUFFIX = ".rank"
SYSTEM_RUN_DIR = Path("/run/rankscope")
SHARED_MEMORY_RUN_DIR = Path("/dev/shm/rankscope")  # noqa: S108 - tmpfs by design: a disk-backed mapping stalls


def default_run_dirs(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the directories in which ranks write their records, unless others are named."""
    named = environment.get("RANKSCOPE_RUN_DIR")
    return (Path(named),) if named else (SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR)


def run_directory() -> Path:
    """Return the directory for the record: RANKSCOPE_RUN_DIR, else a writable /run/rankscope, else one in /dev/shm.

    Creates the first and the last if needed, but not /run/rankscope: the exporter's deployment makes that, on a tmpfs.
    Raises OSError if it cannot be created.
    """
    if named := os.environ.get("RANKSCOPE_RUN_DIR"):
        try:
            Path(named).mkdir(parents=True, exist_ok=True)
        except RecursionError as error:  # a thousand nested missing directories
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), named) from error
        return Path(named)
    if os.access(SYSTEM_RUN_DIR, os.W_OK | os.X_OK):
        return SYSTEM_RUN_DIR
    with contextlib.suppress(FileExistsError):
        SHARED_MEMORY_RUN_DIR.mkdir()
        # Like /tmp: the ranks of all users may write here. Only if it was just made: another user may have put a link
        # there, and this would make the link's target world-writable.
        SHARED_MEMORY_RUN_DIR.chmod(0o1777)
    return SHARED_MEMORY_RUN_DIR


def encode_info(info: object) -> bytes:
    """Return an info, or a part of one, as the record's bytes: UTF-8, because escapes take twice as many bytes."""
    return json.dumps(info, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


class RankWriter:
    """The writer of one record, and the only writer of its slots.

    It starts in private memory, so that counting starts at once. `publish` moves the record to a file that others can
    read. If that fails, the writer keeps counting in private memory, and its callers need not know.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._descriptor: OwnDescriptor | None = None
        self._info_sequence = 0
        self.on_move: Callable[[], object] = lambda: None  # called when the slots have moved
        self._use(memoryview(bytearray(layout.SIZE)))
        self._memory[: layout.HEADER.size] = layout.header()

    def publish(self, directory: Path, name: str, info: dict[str, Any]) -> None:
        """Make the record readable for others as `directory/name.rank`, or under a longer name if that is taken.

        Raises OSError if that fails.
        """
        self.write_info(info)
        with opened(directory) as parent:
            unique = f"{name}.{secrets.token_hex(8)}"
            try:
                # A link replaces no file: a process in another container may have the same ID.
                self._publish(directory, parent, f".{unique}{SUFFIX}", f"{name}{SUFFIX}", os.link)
            except OSError:  # the name is taken, by any user who can guess it, or the file system has no links
                self._publish(directory, parent, f".{unique}{SUFFIX}", f"{unique}{SUFFIX}", os.rename)

    def _publish(self, directory: Path, parent: int, temporary: str, final: str, place: Callable[..., object]) -> None:
        # Unreadable until it is locked: another user's read lock would prevent ours.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        own = OwnDescriptor(os.open(temporary, flags, 0o600, dir_fd=parent))
        descriptor = own.number
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Writing every byte reserves the memory. On a full tmpfs this raises, while a later store into a hole of
            # the mapping would kill the process with SIGBUS.
            if os.write(descriptor, self._memory) != layout.SIZE:
                raise OSError(f"no space for a rank record in {directory}")
            os.lseek(descriptor, layout.LAST_WORDS_OFFSET, os.SEEK_SET)
            memory = map_shared(descriptor, layout.SIZE)
            # Readable for all users, writable for none: a careless `: > x.rank` of the job's own user would truncate
            # the mapping, and the next store would kill the training with SIGBUS.
            os.fchmod(descriptor, 0o444)
            place(temporary, final, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            own.close()
            _unlink(temporary, parent)
            raise
        _unlink(temporary, parent)  # unless it was renamed
        if self._descriptor is not None:
            self._descriptor.close()  # of the removed record
        self.path, self._descriptor = directory / final, own
        self._use(memory)

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace the info. Raises ValueError if it does not fit."""
        text = encode_info(info)
        if len(text) > layout.INFO_CAPACITY:
            raise ValueError(f"the rank's info has {len(text)} bytes; {layout.INFO_CAPACITY} fit")
        at = self._free_place(len(text))
        self._info_sequence += 2
        if at is None:
            at = 0
            self.slots[INDEX["info_sequence"]] = self._info_sequence - 1
        self._memory[layout.INFO_OFFSET + at : layout.INFO_OFFSET + at + len(text)] = text
        self.slots[INDEX["info_place"]] = at * layout.INFO_OFFSET_UNIT + len(text)
        self.slots[INDEX["info_sequence"]] = self._info_sequence

    def _free_place(self, length: int) -> int | None:
        """Return the offset for a new info, before or after the current one; None if it fits in neither place.

        So a process that is killed or stopped while it writes leaves a complete info.
        """
        offset, present = divmod(int(self.slots[INDEX["info_place"]]), layout.INFO_OFFSET_UNIT)
        if length <= offset:
            return 0
        return offset + present if offset + present + length <= layout.INFO_CAPACITY else None

    def fileno(self) -> int:
        """Return the record's descriptor, positioned at the last words; -1 while it has none."""
        return self._descriptor.number if self._descriptor and self._descriptor.is_ours else -1

    def last_words_end(self) -> int:
        """Return the offset of the end of the last words; 0 if there are none, or if the descriptor is lost."""
        has_words = self._memory[layout.LAST_WORDS_OFFSET] and self.fileno() >= 0
        return os.lseek(self.fileno(), 0, os.SEEK_CUR) if has_words else 0

    def forget_last_words(self) -> None:
        """Erase the last words, so that later ones are the first."""
        os.lseek(self.fileno(), layout.LAST_WORDS_OFFSET, os.SEEK_SET)
        self._memory[layout.LAST_WORDS_OFFSET] = 0

    def renew(self) -> bool:
        """Lock the record again, and reopen it if the job has closed its descriptor.

        Return whether the descriptor was lost. Takes two system calls, about 2 µs, if it was not.
        """
        if self._descriptor is None:
            return False
        is_lost = not self._descriptor.is_ours
        with contextlib.suppress(OSError):  # another file has its name, or another process has a read lock
            if is_lost:
                self._reopen(self._descriptor)
            fcntl.lockf(self._descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return is_lost

    @property
    def is_removed(self) -> bool:
        """True if the record's file has no name any more, so that no reader finds it. Takes two system calls."""
        own = self._descriptor
        if own is None or self.path is None or (own.is_ours and os.fstat(own.number).st_nlink):
            return False
        try:
            found = self.path.lstat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != own.file

    def _reopen(self, lost: OwnDescriptor) -> None:
        """Open the record for writing, despite its mode. Raises OSError if its path is another file."""
        assert self.path is not None
        reading = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if file_of(reading) != lost.file:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            os.fchmod(reading, 0o644)
            try:
                descriptor = os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.fchmod(reading, 0o444)
        finally:
            os.close(reading)
        os.lseek(descriptor, layout.LAST_WORDS_OFFSET, os.SEEK_SET)
        self._descriptor = OwnDescriptor(descriptor)

    def detach(self) -> None:
        """Continue in private memory and leave the file as it is. For a forked child, which is not the rank."""
        if self._descriptor is not None:
            self._descriptor.close()  # does not release the parent's lock: locks belong to a process
        self.path = self._descriptor = None
        self._use(memoryview(bytearray(self._memory)))
        self._memory[layout.LAST_WORDS_OFFSET] = 0  # they are not of the process or rank that continues

    def _use(self, view: memoryview[int]) -> None:
        self._memory = view
        self.slots = view[layout.SLOTS_OFFSET : layout.SLOTS_OFFSET + 8 * layout.SLOTS].cast("d")
        self.phase_seconds = self.slots[INDEX["phase_seconds"] : INDEX["phase"] + 1]  # and the open phase at its end
        self.copied = self.slots[layout.COPIED]
        self.ring = _entries(view, layout.RING_OFFSET, layout.RING_STEPS, layout.RING_WIDTH)
        self.device_ring = _entries(view, layout.DEVICE_RING_OFFSET, layout.DEVICE_RING_STEPS, layout.DEVICE_RING_WIDTH)
        self.on_move()


def _unlink(name: str, directory: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _entries(view: memoryview, offset: int, steps: int, width: int) -> list[memoryview[float]]:
    ring = view[offset : offset + 8 * steps * width].cast("d")
    return [ring[begin : begin + width] for begin in range(0, steps * width, width)]
