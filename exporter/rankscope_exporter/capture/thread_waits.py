"""The words for what a thread waits for, by the system call that it is in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from rankscope_exporter.capture.process_state import LOCKS, ON_FILES, OUTPUT, STORAGE, ProcessState, ThreadState

WAITS: Mapping[str, str] = {
    **dict.fromkeys(("open", "openat"), "to open a file"),
    **dict.fromkeys(("stat", "lstat", "newfstatat", "statx"), "for the attributes of a file"),
}
"""What a thread waits for in a system call that names a file by its path: on a local disk it does not wait."""
OTHER_WAITS: Mapping[str, str] = {
    **dict.fromkeys(("recvfrom", "recvmsg"), "for data from a socket"),
    **dict.fromkeys(("sendto", "sendmsg"), "for a socket to take data"),
    **dict.fromkeys(("connect", "accept", "accept4"), "for a connection"),
    **dict.fromkeys(("wait4", "waitid"), "for another process"),
    "futex": "for a lock or another thread",
}
"""The same of those that are no storage."""
DISK = "D"
"""The state of a thread that waits in the kernel and cannot be interrupted."""
SHORTEST = 0.05
"""The fewest seconds that count."""
GIL_RATES = 100.0, 250.0
"""The fewest and the most waits per second of a thread that waits for the interpreter's lock."""
MAPPING = re.compile(r"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) \S+ \S+ \S+ \d+ *(.*)$", re.MULTILINE)
"""A line of /proc/PID/maps: begin, end and file."""


def storage_file(call: str) -> str:
    """Return the file that a system call is on; empty if it is none, or no file in a file system."""
    name, _, target = call.partition(" of ")
    return target if name in ON_FILES and STORAGE.match(target) else ""


def storage_wait(thread: ThreadState) -> str:
    """Return what a thread waits for in storage, as words after `waits`; empty if it does not."""
    name = thread.call.partition(" ")[0]
    if file := storage_file(thread.call):
        return f"for a lock on {file}" if name in LOCKS else f"in a {name} of {file}"
    if name in WAITS:
        return WAITS[name]
    in_kernel = f" ({thread.wait_channel})" if thread.wait_channel else ""
    return f"in the kernel without interruption, as for storage{in_kernel}" if thread.state.startswith(DISK) else ""


def other_wait(thread: ThreadState) -> str:
    """Return what a thread waits for outside of storage, as words after `waits`; empty if that is unknown."""
    name, _, target = thread.call.partition(" of ")
    if target.startswith(("pipe:", "socket:")):
        return "to write its output" if target.endswith(OUTPUT) else f"in a {name} of a {target.partition(':')[0]}"
    return OTHER_WAITS.get(name, "")


def threads_for_gil(before: ProcessState, after: ProcessState, seconds: float) -> frozenset[int]:
    """Return the threads that wait for the interpreter's lock (GIL), by two readings so many seconds apart.

    Python's `take_gil` waits for it 5 ms at a time, in a futex: 200 times a second. Waits for anything else are longer,
    and those of gloo are not in a futex. A script that waits for 5 ms at a time does so in a lock, which is on the heap
    or a stack, and not among the interpreter's variables.
    """
    then = {one.number: one for one in before.threads}
    in_futex = [one for one in after.threads if one.call == "futex" and one.number in then]
    rates = {one: _waits_per_second(then[one.number], one, seconds) for one in in_futex}
    often = [one for one, rate in rates.items() if GIL_RATES[0] <= rate <= GIL_RATES[1]]
    return frozenset(one.number for one in often if _is_interpreters(one.address, after.maps))


def _is_interpreters(address: int, maps: str) -> bool:
    """Return whether an address is in the variables of the program `python` or of its library."""
    file, last = "", 0
    for begin, end, name in MAPPING.findall(maps):
        # Variables without a value at the start follow the file, in a mapping without a name.
        file, first, last = name or file * (int(begin, 16) == last), int(begin, 16), int(end, 16)
        if first <= address < last:
            return "python" in PurePosixPath(file).name
    return False


def _waits_per_second(then: ThreadState, now: ThreadState, seconds: float) -> float:
    """Return how often a thread began to wait per second that it did not spend in a run queue, as on a busy node."""
    return (now.switches - then.switches) / max(seconds - (now.run_queue - then.run_queue), SHORTEST)
