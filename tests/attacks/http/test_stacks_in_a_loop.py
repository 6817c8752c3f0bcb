"""Attack: a client that asks for stacks without end, so that the ranks handle signals all the time."""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.attacks.http.clients import Large, request, scrape, server

from rankscope_exporter.web import limits, stacks


class Ranks:
    """The ranks of two runs. `asked` counts how often those of each were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        names = ("mine", "victim")
        self.ranks = [
            SimpleNamespace(owner=0, snapshot=SimpleNamespace(alive=True, info={"run": one})) for one in names
        ]
        monkeypatch.setattr(stacks, "collect", self._collect)
        monkeypatch.setattr(stacks, "as_json", str)

    def scan(self) -> Any:
        return SimpleNamespace(ranks=self.ranks)

    def _collect(self, ranks: Any) -> str:
        self.asked[ranks[0].snapshot.info["run"]] += 1
        return "{}"


def test_a_run_is_asked_once_in_an_interval_and_scrapes_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STACKS_INTERVAL", 3600.0)
    monkeypatch.setattr(limits, "REQUEST_INTERVAL", 0.0)
    ranks = Ranks(monkeypatch)
    with server(Large(), stacks_of=ranks.scan) as ports, ExitStack() as stack:
        assert scrape(ports[0], "/api/v1/stacks?run=mine") == 200
        paths = ("/api/v1/stacks?run=mine", "/api/v1/stacks?run=victim", "/api/v1/stacks?run=none")
        clients = [
            stack.enter_context(request(port, path, host=host, Connection="close"))
            for _ in range(5)
            for path in paths
            for port, host in zip(ports, ("127.0.0.1", "::1"), strict=True)
        ]
        assert [scrape(ports[0]) for _ in range(5)] == [200] * 5
        answered = select.select(clients, [], [], 0.5)[0]
    assert set(answered) <= set(clients[4::6] + clients[5::6])  # those about no run
    assert ranks.asked == {"mine": 1}


def test_a_client_that_asks_for_one_run_all_the_time_delays_another_run_by_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "STACKS_INTERVAL", 0.0)
    made: list[str] = []

    async def ask() -> None:
        pages = stacks.StackPages(lambda run: made.append(run) or "")

        async def insist() -> None:
            while "victim" not in made:
                await pages.next("mine")

        clients = [asyncio.create_task(insist()) for _ in range(20)]
        while not made:
            await asyncio.sleep(0)
        before = len(made)
        await pages.next("victim")
        assert made[before:].index("victim") <= 1
        await asyncio.gather(*clients)

    asyncio.run(ask())
