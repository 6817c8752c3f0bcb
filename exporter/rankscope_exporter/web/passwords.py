"""Checks of passwords against bcrypt hashes: one at a time, the addresses in turn, and no more than can be done."""

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

NICE = 10  # more of the thread that checks, which gets a tenth of what another one gets
BCRYPT_BYTES = 72  # bcrypt takes no more of a password; hashes made elsewhere from longer ones silently used these

HasLeft = Callable[[], bool]
"""Whether the client that asks is gone."""


class TooManyChecksError(Exception):
    """A password is not looked at: too many wait."""


class Check:
    """A password that waits to be checked. Those who ask for the same wait for the same check."""

    def __init__(self, user: str, password: bytes, hashed: bytes, digest: bytes, *, is_known: bool) -> None:
        self.user = user
        self.password = password
        self.hashed = hashed
        self.digest = digest
        self.is_known = is_known  # else the hash is another user's, and no password is the right one
        self.askers: list[HasLeft] = []
        self.matches: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still asks."""
        return not all(has_left() for has_left in self.askers)


class Queue:
    """Checks that wait, in a line for each address; the addresses take turns.

    So the first check of one address waits for two others at the most, whatever another address sends.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Check]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, address: str, check: Check, has_left: HasLeft) -> Check:
        """This check or the one like it that waits already. Raises TooManyChecksError."""
        self._forget_unwanted()
        line = self._lines.get(address, deque())
        if same := next((one for one in line if (one.user, one.digest) == (check.user, check.digest)), None):
            check = same
        elif len(line) >= limits.CHECKS_OF_ONE_ADDRESS or not self._has_room(line):
            raise TooManyChecksError
        else:
            self._lines.setdefault(address, line).append(check)
        check.askers.append(has_left)
        return check

    def next(self) -> Check | None:
        """The first in the line whose turn it is."""
        self._forget_unwanted()
        if not self._lines:
            return None
        address, line = self._lines.popitem(last=False)
        check = line.popleft()
        if line:
            self._lines[address] = line
        return check

    def _has_room(self, line: deque[Check]) -> bool:
        """Whether there is room for one more in this line, if need be at the cost of a longer one."""
        if len(self) < limits.CHECKS:
            return True
        longest = max(self._lines.values(), key=len)
        if len(longest) <= len(line) + 1:
            return False
        longest.pop().matches.set_exception(TooManyChecksError())
        return True

    def _forget_unwanted(self) -> None:
        for address, line in [*self._lines.items()]:
            for check in [one for one in line if not one.is_wanted]:
                line.remove(check)
                check.matches.set_result(False)
            if not line:
                del self._lines[address]


class Passwords:
    """Checks passwords; a check takes 60 ms at cost 10, so a success is remembered.

    Remembered is a digest for each user, under a key that this process alone has: neither a password nor anything
    that grows. An unknown user costs a check like any other, and tells nothing by its timing. One check runs at a time,
    and the next begins after a rest that is as long: guessing takes at most half a core.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._queue = Queue()
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "passwords", _give_way)

    async def admits(
        self,
        users: Mapping[str, bytes],
        name: str,
        password: bytes,
        address: str = "",
        has_left: HasLeft = lambda: False,
    ) -> bool:
        """Whether `name` is a user and this the password. Raises TooManyChecksError."""
        hashed = users.get(name)
        digest = hmac.digest(self._key, (hashed or b"") + password, "sha256")
        if self._is_verified(name, digest):
            return True
        compared = hashed or next(iter(users.values()))
        new = Check(name, password[:BCRYPT_BYTES], compared, digest, is_known=hashed is not None)
        check = self._queue.add(address, new, has_left)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await asyncio.shield(check.matches)

    async def _work(self) -> None:
        """Check all that wait."""
        loop = asyncio.get_running_loop()
        try:
            while check := self._queue.next():
                began = loop.time()
                await self._answer(check)
                await asyncio.sleep(loop.time() - began)
        finally:
            self._worker = None

    async def _answer(self, check: Check) -> None:
        try:
            check.matches.set_result(await self._result(check))
        except Exception as error:  # what bcrypt says of a hash that it cannot use: its asker's to hear, not the next's
            check.matches.set_exception(error)

    async def _result(self, check: Check) -> bool:
        if self._is_verified(check.user, check.digest):  # by a check that was here first
            return True
        matches = await asyncio.get_running_loop().run_in_executor(
            self._thread, bcrypt.checkpw, check.password, check.hashed
        )
        if matches and check.is_known:
            self._verified[check.user] = check.digest
        return matches and check.is_known

    def _is_verified(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._verified.get(name, b""), digest)


def _give_way() -> None:
    """Let whatever else this process does go first: a check computes for 60 ms, and somebody waits for a page."""
    with suppress(OSError):
        thread = threading.get_native_id()  # on Linux each has a priority of its own
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
