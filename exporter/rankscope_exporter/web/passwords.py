"""Password checks against bcrypt hashes: one at a time, fair between client addresses, with a bounded queue."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import bcrypt

from rankscope_exporter.web import limits

NICE = 10  # added to the checking thread's nice value: it gets a tenth of the CPU time of another thread
PAUSE = 3  # times the length of a check, after it
BCRYPT_BYTES = 72  # bcrypt ignores the rest of a password, and other programs have made hashes from longer ones

IsGone = Callable[[], bool]
"""Returns whether the client has closed its connection."""


class TooManyChecksError(Exception):
    """A password is not checked because the queue is full."""


class Check:
    """A queued password check. Requests with the same credentials share one check."""

    def __init__(self, user: str, password: bytes, hashed: bytes, digest: bytes, *, is_known: bool) -> None:
        self.user = user
        self.password = password
        self.hashed = hashed
        self.digest = digest
        self.is_known = is_known  # False: the hash is another user's, and the result is always False
        self.clients: list[IsGone] = []
        self.matches: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_abandoned(self) -> bool:
        """Return whether all clients have closed their connections."""
        return all(is_gone() for is_gone in self.clients)


class CheckQueue:
    """Waiting checks, in one queue for each address; the addresses take turns.

    The first check of an address waits for at most two others, whatever other addresses send.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Check]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, address: str, check: Check, is_gone: IsGone) -> Check:
        """Return the check, or an equal one that is already queued. Raises TooManyChecksError."""
        self._drop_abandoned()
        queue = self._queues.get(address, deque())
        if same := next((one for one in queue if (one.user, one.digest) == (check.user, check.digest)), None):
            check = same
        elif len(queue) >= limits.PASSWORD_CHECKS_PER_ADDRESS or not self._make_room(queue):
            raise TooManyChecksError
        else:
            self._queues.setdefault(address, queue).append(check)
        check.clients.append(is_gone)
        return check

    def next(self) -> Check | None:
        """Remove and return the first check of the next address, or None."""
        self._drop_abandoned()
        if not self._queues:
            return None
        address, queue = self._queues.popitem(last=False)
        check = queue.popleft()
        if queue:
            self._queues[address] = queue
        return check

    def _make_room(self, queue: deque[Check]) -> bool:
        """Return whether this queue may grow by one; if necessary, drop a check of a longer queue."""
        if len(self) < limits.PASSWORD_CHECKS:
            return True
        longest = max(self._queues.values(), key=len)
        if len(longest) <= len(queue) + 1:
            return False
        longest.pop().matches.set_exception(TooManyChecksError())
        return True

    def _drop_abandoned(self) -> None:
        for address, queue in [*self._queues.items()]:
            for check in [one for one in queue if one.is_abandoned]:
                queue.remove(check)
                check.matches.set_result(False)
            if not queue:
                del self._queues[address]


class Passwords:
    """Checks passwords. A check takes 60 ms at bcrypt's cost 10, so a success is remembered.

    One digest for each user is remembered, under a key that exists only in this process: no password is stored, and the
    memory does not grow. A check of an unknown user takes as long as any other, so timing reveals nothing. One check
    runs at a time, followed by a pause of three times its length: guessing takes at most a quarter of a core.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._queue = CheckQueue()
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "passwords", _lower_priority)

    async def verify(
        self,
        users: Mapping[str, bytes],
        name: str,
        password: bytes,
        address: str = "",
        is_gone: IsGone = lambda: False,
    ) -> bool:
        """Return whether `name` is a user with this password. Raises TooManyChecksError."""
        hashed = users.get(name)
        digest = hmac.digest(self._key, (hashed or b"") + password, "sha256")
        if self._is_verified(name, digest):
            return True
        known_hash = hashed or next(iter(users.values()))
        new = Check(name, password[:BCRYPT_BYTES], known_hash, digest, is_known=hashed is not None)
        check = self._queue.add(address, new, is_gone)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run_queue())
        return await asyncio.shield(check.matches)

    async def _run_queue(self) -> None:
        """Run checks until the queue is empty."""
        loop = asyncio.get_running_loop()
        try:
            while check := self._queue.next():
                began = loop.time()
                await self._set_result(check)
                await asyncio.sleep(PAUSE * (loop.time() - began))
        finally:
            self._worker = None

    async def _set_result(self, check: Check) -> None:
        try:
            check.matches.set_result(await self._run(check))
        except Exception as error:  # bcrypt rejects the hash: an error for this check's clients, not for the next check
            check.matches.set_exception(error)

    async def _run(self, check: Check) -> bool:
        if self._is_verified(check.user, check.digest):  # by an earlier check
            return True
        matches = await asyncio.get_running_loop().run_in_executor(
            self._thread, bcrypt.checkpw, check.password, check.hashed
        )
        if matches and check.is_known:
            self._verified[check.user] = check.digest
        return matches and check.is_known

    def _is_verified(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._verified.get(name, b""), digest)


def _lower_priority() -> None:
    """Lower this thread's priority: a check computes for 60 ms while other requests wait."""
    with suppress(OSError):
        thread = threading.get_native_id()  # on Linux, each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
