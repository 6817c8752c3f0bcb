"""The thread that asks all targets for their facts, each every two seconds, with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Mapping

from pydantic import ValidationError

from rankscope_exporter.analyzer.request import RequestError, Target, get
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.analyzer.targets import Targets
from rankscope_exporter.node_facts.wire import ANALYZER, HANGING, MOMENTS_LIMIT, Answer, written_runs

INTERVAL = 2.0
"""Seconds between two requests to a target with ranks of runs that span nodes. All are asked at the same time, because
a second is judged when all nodes have sent it."""
IDLE_INTERVAL, IDLE_RATE = 10.0, 200.0
"""The same for other targets, and the most requests to them per second: the interval grows with their number."""
LONGEST_PAUSE = 60.0
"""The longest pause after failures: each doubles it, except for a target whose ranks a run misses."""
TIMEOUT = 5.0
CONCURRENT, CONCURRENT_MISSED, CONCURRENT_FAILING = 128, 128, 256
"""The most requests at once to targets that answered last time, to failing ones whose ranks a run misses, and to
others: none of them delays those before it."""
DISCOVERY_INTERVAL = 10.0
"""Seconds between two looks for new targets."""
REASON_LIMIT = 100
"""The most characters of each part of a validation error."""
FACTS = "/api/v1/facts"
FACTS_LIMIT = 6 * 2**20
"""The most bytes of an answer: an exporter keeps 4 MiB."""
CATCH_UP = 8
"""The most answers in a row without a pause: an exporter keeps 90 moments."""
READ_SHARE = 0.1
"""The largest share of this thread's time for the answers of one target. The largest answer takes 0.3 s."""

logger = logging.getLogger(__name__)


class Puller:
    """Asks all targets until it is stopped. In a `with` statement, its thread runs as long as the block."""

    def __init__(
        self,
        targets: Targets,
        analyzer: Analyzer,
        tls: ssl.SSLContext | None = None,
        credentials: str = "",
        address: str = "",
    ) -> None:
        """Set how certificates are checked, and the header `Authorization` for targets with a configured name.

        `address` is this analyzer's own one, which the pages of the nodes name.
        """
        self._own = {ANALYZER: address} if address else {}
        self._targets = targets
        self._analyzer = analyzer
        self._tls = tls
        self._credentials = {"Authorization": credentials} if credentials else {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self.failures: dict[Target, str] = {}
        """The reason why a target's last request failed; empty if it did not."""
        self._up, self._missed, self._failing = map(
            asyncio.Semaphore, (CONCURRENT, CONCURRENT_MISSED, CONCURRENT_FAILING)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pull", daemon=True)

    def __enter__(self) -> Puller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        self._thread.join(TIMEOUT)

    def answers(self) -> Mapping[str, str]:
        """Return by name of each target that was asked why its last request failed; empty if it did not."""
        return {target.name: reason for target, reason in list(self.failures.items())}

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._discover())
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _discover(self) -> None:
        while True:
            found = await self._targets.find()
            gone, new = self._tasks.keys() - set(found), set(found) - self._tasks.keys()
            if gone or new:
                logger.info("asking targets total=%d new=%d gone=%d", len(found), len(new), len(gone))
            for target in gone:
                self._tasks.pop(target).cancel()
                self.failures.pop(target, None)
            for number, target in enumerate(found):
                if target in new:
                    begin = 0.0 if len(found) <= CONCURRENT else IDLE_INTERVAL * number / len(found)
                    self._tasks[target] = self._loop.create_task(self._ask_forever(target, begin))
            await asyncio.sleep(DISCOVERY_INTERVAL)

    async def _ask_forever(self, target: Target, begin: float) -> None:
        await asyncio.sleep(begin)
        pause, in_a_row = INTERVAL, 0
        while True:
            try:
                async with self._slots_of(target):
                    has_more, spent = await self._ask(target)
                if self.failures.get(target):
                    logger.info("target answers again target=%s", target.name)
                in_a_row = in_a_row + 1 if has_more else 0
                pause = 0.0 if 0 < in_a_row < CATCH_UP else self._pause(target)
                self.failures[target], pause = "", max(pause, spent / READ_SHARE)
            except RequestError as error:
                if not self.failures.get(target):
                    logger.warning("target does not answer target=%s reason=%s", target.name, error)
                self.failures[target] = str(error)
                longest = INTERVAL if self._analyzer.has_ranks(target.name) else LONGEST_PAUSE
                pause = min(max(2.0 * pause, INTERVAL), longest)
            await asyncio.sleep(pause)

    def _slots_of(self, target: Target) -> asyncio.Semaphore:
        """Return the semaphore that limits the requests to such targets."""
        if self.failures.get(target) == "":
            return self._up
        return self._missed if self._analyzer.has_ranks(target.name) else self._failing

    def _pause(self, target: Target) -> float:
        """Return the seconds until the next request to a target that has just answered."""
        if self._analyzer.has_ranks(target.name):
            return INTERVAL - self._loop.time() % INTERVAL
        return max(IDLE_INTERVAL, len(self._tasks) / IDLE_RATE)

    async def _ask(self, target: Target) -> tuple[bool, float]:
        """Ask a target for what it has not sent yet. Return whether it has more, and the seconds for its answer.

        Raise RequestError.
        """
        cursor = self._analyzer.cursor(target.name)
        path = FACTS if cursor is None else f"{FACTS}?after={cursor!r}"
        sent = self._analyzer.now()
        headers = {**self._own, **(self._credentials if target.is_configured else {})}
        if self._own and (hanging := written_runs(self._analyzer.hanging(target.name))):
            headers[HANGING] = hanging
        body = await get(target, path, headers, TIMEOUT, self._tls, FACTS_LIMIT)
        received, began = self._analyzer.now(), time.thread_time()
        try:
            answer = Answer.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:REASON_LIMIT]
            raise RequestError(f"invalid answer: {where} {first['msg'][:REASON_LIMIT]}") from error
        self._analyzer.take(target.name, answer, sent, received, len(body))
        has_more = len(answer.moments) == MOMENTS_LIMIT and self._analyzer.cursor(target.name) != cursor
        return has_more, time.thread_time() - began
