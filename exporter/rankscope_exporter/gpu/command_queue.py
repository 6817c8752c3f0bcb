"""Work for another thread: given by any, done by the one that takes orders, and answered to whoever gave it."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable
from concurrent.futures import Future


class CommandQueue:
    """The driver is connected and closed by one thread alone, and requests come on others."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()

    def give(self, order: Callable[[], None], within: float) -> None:
        """Have it done. Raises what it raises, and TimeoutError if it is not done within so many seconds.

        Then it is not begun any more; only one that has begun goes on.
        """
        answer = self.post(order)
        try:
            answer.result(within)
        except concurrent.futures.TimeoutError:  # in Python 3.10 not the built-in one
            raise TimeoutError from None
        finally:
            answer.cancel()

    def post(self, order: Callable[[], None]) -> Future[None]:
        """Have it done some time, after those that were given before."""
        answer: Future[None] = Future()
        self._given.put((order, answer))
        return answer

    def take(self, within: float) -> None:
        """Do the next order, if one comes within so many seconds."""
        try:
            order, answer = self._given.get(timeout=within)
        except queue.Empty:
            return
        if not answer.set_running_or_notify_cancel():
            return
        try:
            order()
        except Exception as error:  # whoever gave the order learns of it, and this thread goes on
            answer.set_exception(error)
        else:
            answer.set_result(None)
