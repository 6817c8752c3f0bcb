"""Queue of commands for another thread, which runs them and returns the result to the caller."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable
from concurrent.futures import Future


class CommandQueue:
    """Commands from any thread for the one thread that may connect and close the driver."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()

    def call(self, command: Callable[[], None], within: float) -> None:
        """Run the command on the other thread. Raises its exception, or TimeoutError after `within` seconds.

        After a timeout the command is canceled unless it has started.
        """
        answer = self.post(command)
        try:
            answer.result(within)
        except concurrent.futures.TimeoutError:  # differs from the built-in one in Python 3.10
            raise TimeoutError from None
        finally:
            answer.cancel()

    def post(self, command: Callable[[], None]) -> Future[None]:
        """Queue the command after earlier ones, without waiting."""
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def run_next(self, within: float) -> None:
        """Run the next command if one arrives within this many seconds."""
        try:
            command, answer = self._commands.get(timeout=within)
        except queue.Empty:
            return
        if not answer.set_running_or_notify_cancel():
            return
        try:
            command()
        except Exception as error:  # raised in the calling thread; this thread continues
            answer.set_exception(error)
        else:
            answer.set_result(None)
