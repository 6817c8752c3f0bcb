"""The threads in a text of Python stacks, as py-spy or faulthandler writes it. Any process can forge such a text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath

FRAME = re.compile(r' +File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
"""A frame in faulthandler's text. In py-spy's it is `    FUNCTION (FILE:LINE)`."""
THREAD = re.compile(
    r"(?P<current>Current t|T)hread 0x[0-9a-f]+(?: \(.*\))?(?: \[(?P<name>.*)\])? \(most recent call first\):"
    r'|Thread \d+ \([a-z+]+\)(?:: "(?P<spied>.*)")?'
)
LINE_LIMIT = 1024
"""Characters of a line. A longer one counts for nothing, so that none takes long to match."""
FRAMES_LIMIT = 256
THREADS_LIMIT = 128
"""faulthandler writes at most 100 of both."""
LIBRARY = re.compile(r"(?:^|/)(?:site|dist)-packages/|^(?:torch|numpy|rankscope|tensorboard|tqdm|wandb)/")
"""Files of libraries. py-spy names a file by its package, so that only well-known libraries show."""
STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)|^<frozen ")
OWN = re.compile(r"(?:^|/)rankscope/(?:probes|timeline|process)/|(?:^|/)rankscope/[a-z]+\.py$")
TRAMPOLINE = "<shim>"
"""The file of a frame that py-spy shows below each call from C, since Python 3.12."""


@dataclass(frozen=True)
class Frame:
    """A call in a stack."""

    function: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """The file's name without folders, which differ by node, and which py-spy cuts off.

        torch.fx numbers the code that it makes, such as `<eval_with_key>.12`: the number is cut off, too.
        """
        name = PurePosixPath(self.file).name
        return name.rstrip("0123456789.") if name.startswith("<") else name

    @cached_property
    def is_standard(self) -> bool:
        """Return whether the file belongs to the standard library."""
        top = self.file.partition("/")[0].removesuffix(".py")
        return bool(STANDARD.search(self.file)) or top in sys.stdlib_module_names

    @cached_property
    def is_own(self) -> bool:
        """Return whether the file belongs to the hook, which wraps calls of torch."""
        return bool(OWN.search(self.file))

    @cached_property
    def is_users(self) -> bool:
        """Return whether the file belongs to the training script, and not to a library."""
        return not (self.is_standard or self.is_own or LIBRARY.search(self.file))

    def __str__(self) -> str:
        where = f"{self.name}:{self.line}" if self.line else self.name
        return where if self.function == "<module>" else f"{where} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """A thread with its frames, the innermost first."""

    name: str
    """Its name, if the text has it. faulthandler has names since Python 3.14."""
    is_current: bool
    """Whether faulthandler ran in it: usually the main thread."""
    frames: Sequence[Frame]

    @property
    def is_pythons(self) -> bool:
        """Return whether Python started it: not the main thread, and not one of C++, such as autograd's."""
        return bool(self.frames) and self.frames[-1].function == "_bootstrap" and self.frames[-1].name == "threading.py"

    @property
    def is_idle(self) -> bool:
        """Return whether it is a library's thread that waits in the standard library, or runs no Python."""
        if not self.frames:
            return True
        return self.is_pythons and self.frames[0].is_standard and not any(frame.is_users for frame in self.frames)

    @property
    def task(self) -> str:
        """Return the function that the thread runs, such as `_pin_memory_loop`."""
        inner = [frame for frame in self.frames if frame.name != "threading.py"]
        return inner[-1].function if inner else self.name or "a thread without Python code"


def read_threads(text: str) -> list[Thread]:
    """Return the threads of a process, the main thread first. Empty if the text is no text of stacks."""
    threads = [*islice(_read(text), THREADS_LIMIT)]
    main = next((one for one in threads if _is_main(one)), None)
    main = main or next((one for one in threads if one.is_current), None) or (threads[-1] if threads else None)
    return sorted(threads, key=lambda one: one is not main)


def _is_main(thread: Thread) -> bool:
    if thread.name:
        return thread.name == "MainThread"
    return not thread.is_pythons and any(frame.function == "<module>" for frame in thread.frames)


def _read(text: str) -> Iterator[Thread]:
    """Yield the threads in the order of the text. Lines that are not known count for nothing."""
    head: re.Match[str] | None = None
    frames: list[Frame] = []
    for line in (one.rstrip() for one in text.split("\n") if len(one) <= LINE_LIMIT):
        if begins := THREAD.fullmatch(line):
            if head:
                yield _thread(head, frames)
            head, frames = begins, []
        elif head and len(frames) < FRAMES_LIMIT and (frame := _frame(line)):
            frames.append(frame)
    if head:
        yield _thread(head, frames)


def _thread(head: re.Match[str], frames: Sequence[Frame]) -> Thread:
    called = tuple(frame for frame in frames if frame.file != TRAMPOLINE)
    return Thread(head["name"] or head["spied"] or "", head["current"] == "Current t", called)


def _frame(line: str) -> Frame | None:
    if match := FRAME.fullmatch(line):
        return Frame(match[3], match[1], int(match[2]) if match[2].isdecimal() else 0)
    if not (line.startswith("    ") and line.endswith(")") and " (" in line):
        return None
    function, _, place = line[4:-1].rpartition(" (")
    file, _, number = place.rpartition(":")
    is_numbered = number.isdecimal() and number.isascii()
    return Frame(function, file, int(number[:9])) if is_numbered else Frame(function, place, 0)
