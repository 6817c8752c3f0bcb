"""The kernel's messages about GPUs, network adapters, memory, storage and hardware since a run's start.

Where a message names a process of another user, its name and ID are left out.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankscope.cli.printable import printable
from rankscope.record.process_stat import PROCFS
from rankscope.record.quantities import utc
from rankscope_exporter.capture.source import UnavailableError, cut
from rankscope_exporter.kernel_messages import KMSG, Message, read_messages

LINES = 400
"""The newest lines that are shown."""
LINE_LIMIT = 500
BYTES = 256 * 1024
TRACE_LINES, TRACE_SECONDS = 30, 0.1
"""What follows the message about a hung task of the run: its stack in the kernel."""

TOPICS = {
    "GPU": r"NVRM|nvidia|nvlink|nvswitch|\bXid\b|amdgpu",
    "network adapter": r"\b(mlx[45]_|mlx[45]\b|bnxt_|ionic|efa\b|irdma|hfi1|i40e|ice\b|ib_|rdma|infiniband)|"
    r"\blink (is )?(down|up)\b|NETDEV WATCHDOG|carrier",
    "memory": r"out of memory|oom-kill|oom_reaper|page allocation failure|EDAC|\bHardware Error\b|\bmce\b",
    "storage": r"I/O error|EXT4-fs (error|warning)|XFS \(|\bnvme\d|\bnfs: server|LustreError|\bceph\b|libceph|beegfs|"
    r"mmfs|remounting filesystem read-only|critical (medium|target) error",
    "CPU or bus": r"soft lockup|hard lockup|rcu.*(stall|detected)|\bAER:|PCIe Bus Error|\bDPC\b|pciehp|"
    r"CPU clock throttled",
}
TOPIC = re.compile(
    "|".join(f"(?P<t{number}>{pattern})" for number, pattern in enumerate(TOPICS.values())), re.IGNORECASE
)
XID = re.compile(r"^NVRM: Xid .*?(?P<text>pid='?(?P<pid>\d+|<unknown>)'?, name=(?P<name>.*?), )")
KILLED = re.compile(r"Killed process (?P<pid>\d+) .*?(?:UID:(?P<uid>\d+)|$)")
OOM_KILL = re.compile(r"^oom-kill:.*,pid=(?P<pid>\d+),uid=(?P<uid>\d+)$")
OOM_TASK = re.compile(r"^\[\s*(?P<pid>\d+)\]\s+(?P<uid>\d+)\s+\d+\s+\d+\s+\d+")
INVOKED = re.compile(r"^.{0,16} invoked oom-killer: ")
HUNG = re.compile(r"task .{1,64}:(?P<pid>\d+) blocked (?P<rest>for more than .*)")
CRASHED = re.compile(r"^(?:traps: )?.{1,16}\[(?P<pid>\d+)\]:? .*(?:segfault|general protection|trap|error)")


class Concern(NamedTuple):
    """The processes that messages may name."""

    tasks: frozenset[int]
    """The process and thread IDs of the run."""
    owner: int
    """The run's user ID. The out of memory killer names user IDs."""


def read_kernel_log(
    since: float, pids: Collection[int], owner: int, *, path: Path = KMSG, procfs: Path = PROCFS
) -> str:
    """Return the messages since a unix time, in at most 5 s and 256 KiB, after a line that counts them by topic.

    `pids` are the run's processes, and `owner` is its user ID. Raise UnavailableError.
    """
    to_unix = time.time() - time.monotonic()
    try:
        messages = read_messages(path)
    except OSError as error:
        raise UnavailableError(
            f"the kernel's log may not be read ({error.strerror}): it takes CAP_SYSLOG, or kernel.dmesg_restrict=0"
        ) from error
    if not messages:
        raise UnavailableError("the kernel's log is empty")
    concern = Concern(frozenset(_tasks(pids, procfs)), owner)
    recent = [one for one in messages if one.at + to_unix >= since]
    counts: Counter[str] = Counter()
    shown: deque[str] = deque(maxlen=LINES)
    for at, topic, text in _select(recent, concern):
        counts[topic] += topic != ""
        shown.append(f"{utc(at + to_unix)}  {printable(text, LINE_LIMIT)}")
    found = ", ".join(f"{topic} {number}" for topic, number in counts.most_common())
    lines = [f"Messages of the kernel since the run's start: {found or 'none about ' + ', '.join(TOPICS)}."]
    if messages[0].at + to_unix > since:
        lines.append(f"The kernel has no message from before {utc(messages[0].at + to_unix)} any more.")
    return cut("\n".join([*lines, "", *shown]), BYTES)


def _tasks(pids: Collection[int], procfs: Path) -> Iterator[int]:
    """Yield the processes, and their threads, which the kernel names alike."""
    for pid in pids:
        yield pid
        with suppress(OSError):
            yield from (int(task.name) for task in (procfs / str(pid) / "task").iterdir())


def _select(messages: Iterable[Message], concern: Concern) -> Iterator[tuple[float, str, str]]:
    """Yield the time, the topic and the text of each message that is shown. What continues another has no topic."""
    trace, until = 0, 0.0
    for at, text in messages:
        is_hung = HUNG.search(text)
        topic, shown = _topic(text, concern)
        if shown:
            yield at, topic, shown
            if is_hung and int(is_hung["pid"]) in concern.tasks:
                trace, until = TRACE_LINES, at + TRACE_SECONDS
        elif trace and at <= until and not is_hung:
            trace -= 1
            yield at, "", text


def _topic(text: str, concern: Concern) -> tuple[str, str]:
    """Return the topic of a message, and what may be shown of it; nothing if it does not concern the run.

    Messages about processes come first: a user chooses the name of a process, which may look like another message.
    """
    for form, topic, replacement in PROCESSES:
        if match := form.search(text):
            groups = match.groupdict()
            is_own = int(groups["pid"]) in concern.tasks if groups.get("pid", "").isdecimal() else False
            is_own = is_own or (groups.get("uid") or "") == str(concern.owner)
            return topic, text if is_own else replacement(match)
    if match := TOPIC.search(text):
        return [*TOPICS][int(str(match.lastgroup)[1:])], text
    return "", ""


def _without_process(match: re.Match[str]) -> str:
    return match.string[: match.start("text")] + match.string[match.end("text") :]


OTHERS = "the out of memory killer: a process of another user or job"
PROCESSES: tuple[tuple[re.Pattern[str], str, Callable[[re.Match[str]], str]], ...] = (
    (INVOKED, "memory", lambda match: f"a process invoked oom-killer: {match.string[match.end() :]}"),
    (OOM_KILL, "memory", lambda _: f"{OTHERS} is chosen"),
    (KILLED, "memory", lambda _: f"{OTHERS} was killed"),
    (OOM_TASK, "memory", lambda _: ""),
    (HUNG, "hung task", lambda match: f"a task of another user or job blocked {match['rest']}"),
    (XID, "GPU", _without_process),
    (CRASHED, "crashed process", lambda _: ""),
)
"""Messages about a process: its form, its topic, and what is shown if it is not the run's."""
