"""The writing end of a rank record: private memory first, then a mapped file in the run directory.

The file carries a POSIX record lock: the kernel frees it at death however that comes, and forked children do not
inherit it, so that a reader knows whether the rank lives without sharing a pid namespace with it. The job may lose the
lock for us: it is gone when the process closes any descriptor of the file. `renew` takes it again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable
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


def run_directory() -> Path:
    """Where this process's record goes: RANKSCOPE_RUN_DIR, else /run/rankscope if it can be written, else /dev/shm.

    /run/rankscope is never made here: whoever deploys the exporter makes it, on a tmpfs. What is named is, and the
    fallback. Raises OSError where that fails.
    """
    if named := os.environ.get("RANKSCOPE_RUN_DIR"):
        try:
            Path(named).mkdir(parents=True, exist_ok=True)
        except RecursionError as error:  # a thousand missing directories in one another
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), named) from error
        return Path(named)
    if os.access(SYSTEM_RUN_DIR, os.W_OK | os.X_OK):
        return SYSTEM_RUN_DIR
    with contextlib.suppress(FileExistsError):
        SHARED_MEMORY_RUN_DIR.mkdir()
        # Like /tmp: every user's ranks may write here. Only of what we have made just now: another user may have put a
        # link there since one looked, and then it is the link's target that everybody could write to.
        SHARED_MEMORY_RUN_DIR.chmod(0o1777)
    return SHARED_MEMORY_RUN_DIR


def encode_info(info: object) -> bytes:
    """Return an info, or a part of one, as the record holds it: UTF-8, as escapes would take twice as many bytes."""
    return json.dumps(info, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


class RankWriter:
    """The writing end of one record; the single writer of its slots.

    It begins in private memory, so that counting starts at once; `publish` moves it into a file that others can
    read. A writer that could not be published goes on counting in private memory: nothing above needs to know.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._descriptor: OwnDescriptor | None = None
        self._info_sequence = 0
        self.on_move: Callable[[], object] = lambda: None  # called when the slots are in another memory
        self._use(memoryview(bytearray(layout.SIZE)))
        self._memory[: layout.HEADER.size] = layout.header()

    def publish(self, directory: Path, name: str, info: dict[str, Any]) -> None:
        """Make the record readable for others as `directory/name.rank`, or a longer name where that is taken.

        Raises OSError where that fails.
        """
        self.write_info(info)
        with opened(directory) as parent:
            try:
                self._publish(directory, parent, name)
            except OSError:
                # Where only its owner may remove a file, anybody can keep a name from us. Not one that he cannot guess.
                self._publish(directory, parent, f"{name}.{secrets.token_hex(8)}")

    def _publish(self, directory: Path, parent: int, name: str) -> None:
        final, temporary = f"{name}{SUFFIX}", f".{name}{SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)  # of a process with the same number that was killed before the renaming
        # Not for others to open before it is locked: a lock for reading would keep us from ours.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        own = OwnDescriptor(os.open(temporary, flags, 0o600, dir_fd=parent))
        descriptor = own.number
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Writing every byte reserves the memory: on a full tmpfs this raises, where a store into a
            # hole of the mapping would kill the process with SIGBUS.
            if os.write(descriptor, self._memory) != layout.SIZE:
                raise OSError(f"no room for a rank record in {directory}")
            os.lseek(descriptor, layout.LAST_WORDS_OFFSET, os.SEEK_SET)
            memory = map_shared(descriptor, layout.SIZE)
            # Everybody may read it. Nobody opens it to write any more: a careless `: > x.rank` of the job's own user
            # would take the pages from under the mapping, and the next store would kill the training with SIGBUS.
            os.fchmod(descriptor, 0o444)
            os.rename(temporary, final, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            own.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise
        self.path, self._descriptor = directory / final, own
        self._use(memory)

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace the info. Raises ValueError if it does not fit."""
        text = encode_info(info)
        if len(text) > layout.INFO_CAPACITY:
            raise ValueError(f"the rank's info has {len(text)} bytes; {layout.INFO_CAPACITY} fit")
        at = self._room_beside(len(text))
        self._info_sequence += 2
        if at is None:
            at = 0
            self.slots[INDEX["info_sequence"]] = self._info_sequence - 1
        self._memory[layout.INFO_OFFSET + at : layout.INFO_OFFSET + at + len(text)] = text
        self.slots[INDEX["info_place"]] = at * layout.INFO_OFFSET_UNIT + len(text)
        self.slots[INDEX["info_sequence"]] = self._info_sequence

    def _room_beside(self, length: int) -> int | None:
        """Where a new info goes, before or after the present one; None if neither has room, as past half the capacity.

        So a process that is killed in the middle of it, or stopped, leaves one that is whole.
        """
        offset, present = divmod(int(self.slots[INDEX["info_place"]]), layout.INFO_OFFSET_UNIT)
        if length <= offset:
            return 0
        return offset + present if offset + present + length <= layout.INFO_CAPACITY else None

    def fileno(self) -> int:
        """Return the record's descriptor, placed at the last words; -1 while it has none."""
        return self._descriptor.number if self._descriptor and self._descriptor.is_ours else -1

    def renew(self) -> bool:
        """Take the record's lock again, and open the record again if the job has closed its descriptor.

        Return whether the descriptor was lost. This takes two system calls, some 2 µs, while nothing is lost.
        """
        if self._descriptor is None:
            return False
        is_lost = not self._descriptor.is_ours
        with contextlib.suppress(OSError):  # another file has its name, or another process locks it for reading
            if is_lost:
                self._open_again(self._descriptor)
            fcntl.lockf(self._descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return is_lost

    def _open_again(self, lost: OwnDescriptor) -> None:
        """Open the record to write, which its mode forbids. Raises OSError if it is not where it was."""
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
        """Go on in private memory and leave the file as it is. For a forked child, which is not the rank."""
        if self._descriptor is not None:
            self._descriptor.close()  # frees no lock of the parent's: locks belong to a process
        self.path = self._descriptor = None
        self._use(memoryview(bytearray(self._memory)))

    def _use(self, view: memoryview[int]) -> None:
        self._memory = view
        self.slots = view[layout.SLOTS_OFFSET : layout.SLOTS_OFFSET + 8 * layout.SLOTS].cast("d")
        self.phase_seconds = self.slots[INDEX["phase_seconds"] : INDEX["phase"] + 1]  # and at its end, the open phase
        self.copied = self.slots[layout.COPIED]
        self.ring = _entries(view, layout.RING_OFFSET, layout.RING_STEPS, layout.RING_WIDTH)
        self.device_ring = _entries(view, layout.DEVICE_RING_OFFSET, layout.DEVICE_RING_STEPS, layout.DEVICE_RING_WIDTH)
        self.on_move()


def _entries(view: memoryview, offset: int, steps: int, width: int) -> list[memoryview[float]]:
    ring = view[offset : offset + 8 * steps * width].cast("d")
    return [ring[begin : begin + width] for begin in range(0, steps * width, width)]
