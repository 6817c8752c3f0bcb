"""Programs that a test starts and talks to in lines. They are killed when the test ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Program(subprocess.Popen[str]):
    """A process with pipes to its standard input and output."""

    def read_line(self) -> str:
        """Return the next line without its end, or '' at the end of the output."""
        assert self.stdout is not None
        return self.stdout.readline().removesuffix("\n")

    def ask(self, line: str) -> str:
        """Write a line and return the answer, one line."""
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()
        return self.read_line()

    def end(self) -> None:
        """Kill the process, as the kernel does when memory runs out."""
        self.kill()
        self.wait()


def start(*command: object, env: Mapping[str, str] | None = None, stderr: int | None = None) -> Program:
    """Start a command. `stderr` is as for Popen."""
    words = [str(word) for word in command]
    return Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)


@contextmanager
def running(
    *command: object, ready: str = "ready", env: Mapping[str, str] | None = None, stderr: int | None = None
) -> Iterator[Program]:
    """Start a command, wait for its line `ready`, and kill it at the end of the block."""
    with start(*command, env=env, stderr=stderr) as program:
        try:
            line = program.read_line()
            assert line == ready, line or program.communicate()
            yield program
        finally:
            program.kill()


def python(code: str, *arguments: object) -> list[object]:
    """Return the command that runs the code."""
    return [sys.executable, "-c", code, *arguments]
