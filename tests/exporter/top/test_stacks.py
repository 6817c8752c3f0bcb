"""`rankscope stacks --all-nodes`: the ranks of a run on all nodes, and which nodes and ranks do not answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from tests.trainer_hooks.cli.test_stack_groups import FILTER, WAIT, by_faulthandler

from rankscope.cli.explaining.fetching import Answer
from rankscope.cli.rank_stacks import RankStacks, StacksReport
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.top.stacks import show

A, B, C, ANALYZER = "http://node-a:10417", "http://node-b:10417", "http://node-c:10417", "http://analyzer:10418"
RANK = RankStacks("r", 1000, 0, "node-a", 4, 7, "collective_wait", 60.0, 20, 60.0, text=by_faulthandler(WAIT))
RUN = {
    **dict.fromkeys(("not_judged", "not_judged_reason", "user"), ""),
    **dict.fromkeys(("judged_by", "useful_ratio", "window_seconds", "steps_per_second", "step_seconds")),
    **dict.fromkeys(("nodes", "missing_nodes", "findings", "pending", "ranks"), ()),
    "run": "r",
    "owner": "1000",
    "is_judged": False,
    "world_size": 4,
    "living": 2,
    "ended": 0,
    "lost": {},
}


class Nodes:
    """Exporters of two nodes with two ranks each, and an analyzer that names them. Tests change what they answer."""

    def __init__(self) -> None:
        self.ranks = {
            url: [replace(RANK, rank=2 * n + m, node=f"node-{name}", pid=n * 10 + m + 1) for m in (0, 1)]
            for n, (url, name) in enumerate(((A, "a"), (B, "b")))
        }
        self.ranks[B][1] = replace(self.ranks[B][1], text=by_faulthandler(FILTER), phase="other")
        self.runs: dict[str, list[Any]] = {A: [RUN], B: [RUN], C: [], ANALYZER: [RUN]}
        self.instead: dict[str, Answer] = {}
        self.credentials: dict[str, set[str]] = {}

    def answer(self, url: str, headers: Mapping[str, str]) -> Answer:
        server, _, page = url.partition("/api/v1/")
        self.credentials.setdefault(server, set()).add(headers.get("Authorization", ""))
        if page == "runs":
            targets = {"targets": {"up": 2}, "exporters": [A, B]} if server == ANALYZER else {}
            return Answer(HTTPStatus.OK, "", json.dumps({"at": 0.0, "runs": self.runs[server], **targets}).encode())
        if server in self.instead:
            return self.instead[server]
        found = [one for one in self.ranks.get(server, ()) if page == f"stacks?run={one.run}"]
        if not found:
            return Answer(HTTPStatus.NOT_FOUND, "", b'{"error": "no rank"}')
        return Answer(HTTPStatus.OK, "", as_json(StacksReport(0.0, found)).encode())

    def show(self, *urls: str, run: str | None = None, rank: str | None = None) -> int:
        return show(urls, (), run, rank, self.answer)


@pytest.mark.parametrize("urls", [(A, B), (A, B, C, f"{A}/"), (ANALYZER,), (ANALYZER, A)])
def test_the_rank_that_differs_is_named_with_its_node(
    urls: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Nodes().show(*urls) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Rank 3 (node-b) stands in dataset.py:31 in filter; 3 others wait in all_reduce")
    assert lines[1] == "=== run r: 4 ranks on 2 nodes"
    assert "Ranks 0-2 (3 ranks) (node-a, node-b): pids 1, 2, 11, collective_wait for 60.0 s, step 20" in lines


def test_a_password_is_only_for_the_named_servers() -> None:
    nodes = Nodes()
    assert nodes.show(ANALYZER.replace("//", "//u:secret@")) == 0
    assert nodes.credentials[A] == nodes.credentials[B] == {""}
    assert nodes.credentials[ANALYZER] != {""}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(HTTPStatus.FORBIDDEN, "", b"{}"), "runs without --web.enable-stacks"),
        (Answer(HTTPStatus.NOT_FOUND, "", b'{"detail": "Not Found"}'), "too old"),
        (Answer(HTTPStatus.UNAUTHORIZED, "no", b""), "401"),
        (Answer(HTTPStatus.OK, "", b"[]"), "not a Rankscope exporter"),
        (Answer(HTTPStatus.OK, "", as_json(StacksReport(0.0, [replace(RANK, step=10**400)])).encode()), "a number"),
        (
            Answer(HTTPStatus.OK, "", as_json(StacksReport(0.0, [replace(RANK, seconds=float("nan"))])).encode()),
            "not a",
        ),
    ],
)
def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown(
    answer: Answer, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes()
    nodes.instead[A] = answer
    assert nodes.show(A, B) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("rankscope stacks: node-a: ")
    assert reason in printed.err
    assert "=== run r: 2 of 4 ranks\n" in printed.out


def test_texts_of_hostile_nodes_are_escaped_and_two_users_are_two_trainings(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes()
    evil = "\x1b[2J\n=== run r: 4 ranks"
    names = ("node", "phase", "operation", "group", "state", "text")
    nodes.ranks[B] = [replace(RANK, owner=1, **dict.fromkeys(names, evil)), replace(RANK, owner=1, rank=1, reason=evil)]
    assert nodes.show(A, B) == 1
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n"))
    assert [line for line in printed.splitlines() if line.startswith("=== ")] == [
        "=== run r, of user 1: 2 of 4 ranks on 2 nodes",
        "=== run r, of user 1000: 2 of 4 ranks",
    ]


def test_a_run_is_chosen_only_if_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes()
    nodes.runs[A] = [RUN, {**RUN, "run": "other"}]
    assert nodes.show(A, B) == 2
    assert "several runs found; choose one with --run: other, r" in capsys.readouterr().err
    assert nodes.show(A, B, run="r", rank="3") == 0
    assert capsys.readouterr().out.startswith("Rank 3 stands in")
    assert nodes.show(C) == 2
    assert nodes.show(A, run="r", rank="9") == 2
