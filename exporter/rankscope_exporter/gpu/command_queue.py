"""Work for another thread: any thread calls, one runs what is called, and the answer goes to the caller."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable
from concurrent.futures import Future


class CommandQueue:
    """The driver is connected and closed by one thread alone, and requests come on others."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()

    def call(self, command: Callable[[], None], within: float) -> None:
        """Have it run, and wait for that. Raises what it raises, and TimeoutError if it takes longer than `within`.

        Seconds. Then it is not begun any more; only one that has begun goes on.
        """
        answer = self.post(command)
        try:
            answer.result(within)
        except concurrent.futures.TimeoutError:  # in Python 3.10 not the built-in one
            raise TimeoutError from None
        finally:
            answer.cancel()

    def post(self, command: Callable[[], None]) -> Future[None]:
        """Have it run some time, after those that were posted before."""
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def run_next(self, within: float) -> None:
        """Run the next command, if one comes within so many seconds."""
        try:
            command, answer = self._commands.get(timeout=within)
        except queue.Empty:
            return
        if not answer.set_running_or_notify_cancel():
            return
        try:
            command()
        except Exception as error:  # the caller learns of it, and this thread goes on
            answer.set_exception(error)
        else:
            answer.set_result(None)
