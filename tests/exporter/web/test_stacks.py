"""The stacks of a run's ranks at /api/v1/stacks: only if it is allowed, and within limits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from testing.programs import python, running
from tests.trainer_hooks.scripts import WITHOUT_TORCH, watched

from rankscope.cli import rank_stacks
from rankscope.cli.living_ranks import RecordedRank, all_ranks
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.web import limits, stacks
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.config_file import WebConfig

READY: Any = SimpleNamespace(is_ready=True)
LOITER = """
def loiter():
    print("ready", flush=True)
    sys.stdin.read()
loiter()
"""


def client(run_dir: Path) -> TestClient:
    directory = RunDirectory((run_dir,))
    return TestClient(create_app(Scrape([]), READY, stacks_of=directory.scan))


PASSWORD = WebConfig(None, None, {"prometheus": b""}, {})


@pytest.mark.parametrize(
    ("hosts", "config", "warnings"),
    [
        (["::"], None, 1),
        (["127.0.0.1", "10.0.0.7"], None, 1),
        (["fe80::1%eth0"], WebConfig(None, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), {}, {}), 1),
        (["::"], WebConfig(None, ssl.create_default_context(), {}, {}), 0),  # certificates are required
        (["0.0.0.0"], PASSWORD, 0),
        (["127.0.0.1", "::1"], None, 0),
    ],
)
def test_stacks_that_every_client_can_read_are_a_warning(
    caplog: pytest.LogCaptureFixture, hosts: list[str], config: WebConfig | None, warnings: int
) -> None:
    stacks.warn_of_open_stacks(hosts, config)
    assert len(caplog.records) == warnings


@pytest.fixture
def living(run_dir: Path) -> RecordedRank:
    """Return a living rank."""
    with running(*python(WITHOUT_TORCH + LOITER), env=watched()):
        [rank] = all_ranks(run_dir)
    return rank


def test_without_the_flag_no_rank_is_asked(run_dir: Path) -> None:
    answer = TestClient(create_app(Scrape([]), READY)).get("/api/v1/stacks?run=job")
    assert (answer.status_code, answer.json()) == (403, {"error": stacks.NOT_ALLOWED})


def test_the_stacks_of_a_run_are_served_as_json(run_dir: Path) -> None:
    with running(*python(WITHOUT_TORCH + LOITER), env=watched()) as job:
        answer = client(run_dir).get("/api/v1/stacks?run=job")
    [rank] = answer.json()["ranks"]
    assert (rank["run"], rank["rank"], rank["pid"], rank["reason"]) == ("job", 0, job.pid, "")
    assert "in loiter" in rank["text"]


@pytest.mark.parametrize("query", ["", "?run=", "?run=other", "?rank=0"])
def test_a_run_without_a_living_rank_is_not_found(run_dir: Path, query: str) -> None:
    with running(*python(WITHOUT_TORCH + LOITER), env=watched()):
        answer = client(run_dir).get(f"/api/v1/stacks{query}")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])


def test_only_get_asks_ranks(run_dir: Path) -> None:
    for method in ("HEAD", "POST", "OPTIONS"):
        assert client(run_dir).request(method, "/api/v1/stacks?run=job").status_code == 405


def test_a_rank_of_another_user_is_not_asked(living: RecordedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "may_ask", lambda _: False)
    [rank] = stacks.collect([living]).ranks
    assert (rank.text, rank.reason) == ("", stacks.OTHER_USER)


def test_a_large_answer_is_cut_and_says_so(living: RecordedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_stacks, "stacks", lambda *_, **__: "\0" * limits.STACKS_BYTES)
    found = stacks.collect([living] * 8).ranks
    assert max(len(rank.text) for rank in found) == limits.STACKS_OF_RANK
    assert [rank.reason for rank in found] == [""] * 5 + [stacks.TOO_LARGE] * 3


def test_each_user_has_the_same_share_of_the_time(living: RecordedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(rank_stacks, "stacks", lambda *_, within, **__: shares.append(within) or "")
    stacks.collect([living, RecordedRank(living.snapshot, living.owner + 1)])
    assert max(shares) <= limits.STACKS_SECONDS / 2


def test_clients_that_ask_at_the_same_time_share_an_answer_and_runs_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "STACKS_INTERVAL", 0.0)
    made: list[str] = []

    async def ask() -> list[str]:
        pages = stacks.StackPages(lambda run: made.append(run) or f"{run} {len(made)}")
        return await asyncio.gather(*(pages.next(run) for run in ["a"] * 50 + ["b"] * 50))

    answers = asyncio.run(ask())
    assert made == ["a", "b"]
    assert answers == ["a 1"] * 50 + ["b 2"] * 50


def test_after_an_answer_that_fails_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STACKS_INTERVAL", 0.0)
    results: list[Callable[[], str]] = [lambda: str(1 // 0), lambda: "an answer"]

    async def ask() -> str:
        pages = stacks.StackPages(lambda _: results.pop(0)())
        with pytest.raises(ZeroDivisionError):
            await pages.next("a")
        return await pages.next("a")

    assert asyncio.run(ask()) == "an answer"
