"""A program in a pseudo-terminal of a size, and what its screen shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from testing.waiting import eventually

SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")
HOME, STYLE = "H", "m"
COLORS = re.compile(r"(^|;)(3[0-8]|4[0-8]|9\d)(;|$)")
"""The parameters of a style that sets a color."""


class Screen:
    """The cells of a terminal that knows the home position, styles, and line ends; other sequences do not move it."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells = [[" "] * width for _ in range(height)]
        self.row = self.column = 0
        self.has_scrolled = False
        self.has_color = False

    def feed(self, text: str) -> str:
        """Show the text. Return its end, if that is the begin of a sequence."""
        at = 0
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
            elif found := SEQUENCE.match(text, at):
                self._obey(*found.groups())
                at = found.end()
            else:
                return text[at:]
        return ""

    def _obey(self, parameters: str, command: str) -> None:
        if command == HOME and not parameters:
            self.row = self.column = 0
        self.has_color |= command == STYLE and bool(COLORS.search(parameters))

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
            return
        if sign == "\n" or self.column == self.width:
            self._next_line()
            self.column = 0 if sign != "\n" else self.column
        if sign != "\n":
            self.cells[self.row][self.column] = sign
            self.column += 1

    def _next_line(self) -> None:
        if self.row + 1 < self.height:
            self.row += 1
            return
        self.has_scrolled = True
        self.cells = [*self.cells[1:], [" "] * self.width]


class Terminal:
    """A program in a pseudo-terminal. It is killed at the end of the `with` statement."""

    def __init__(self, size: tuple[int, int], command: Sequence[object], env: Mapping[str, str] | None = None) -> None:
        self._terminal, inner = pty.openpty()
        self._lock = threading.Lock()
        self.resize(*size)
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**known, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(env or {})},
            start_new_session=True,
        )
        os.close(inner)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Terminal:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        os.close(self._terminal)

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size."""
        with self._lock:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
            self.screen = Screen(width, height)

    def press(self, keys: str) -> None:
        """Write as if these keys were pressed."""
        os.write(self._terminal, keys.encode())

    def lines(self) -> list[str]:
        """Return the lines of the screen."""
        with self._lock:
            return ["".join(row).rstrip() for row in self.screen.cells]

    def text(self) -> str:
        """Return the screen without line breaks."""
        return " ".join(" ".join(self.lines()).split())

    def wait_for(self, text: str) -> list[str]:
        """Wait until the screen has this text, and return its lines."""
        eventually(lambda: text in self.text())
        return self.lines()

    def wait(self) -> int:
        """Wait for the end of the program, and return its exit status."""
        return self._process.wait(60)

    def _read(self) -> None:
        rest, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
        with suppress(OSError):  # the program has ended
            while read := os.read(self._terminal, 65536):
                with self._lock:
                    rest = self.screen.feed(rest + decoder.decode(read))
