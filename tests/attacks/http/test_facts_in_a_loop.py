"""Attack: a client asks for the facts of a node with any cursor, does not read them, or claims to be an analyzer."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from testing.analyzed_job import AnalyzedJob
from tests.attacks.http.clients import Large, find_reset, read_all, request, scrape, server, status
from tests.exporter.web.conftest import web_config

from rankscope_exporter.node_facts import recorder
from rankscope_exporter.node_facts.recorder import KEPT_MOMENTS, NodeFacts, Part, checksum_of
from rankscope_exporter.node_facts.wire import ANALYZER, MOMENTS_LIMIT
from rankscope_exporter.web import limits

__all__ = ["web_config"]
FACTS = "/api/v1/facts"
CLIENTS = 60
MOMENT = 256 * 1024
"""Bytes of a large moment: an answer has 4 MiB, more than the kernel buffers."""


def large_facts() -> NodeFacts:
    """Return facts of which each answer has 4 MiB."""
    facts = NodeFacts("node-a", "boot")
    for second in range(MOMENTS_LIMIT + 1):
        text = json.dumps({"at": float(second), "more": "x" * MOMENT}).encode()
        facts._kept.append((float(second), Part(text, b"")))
    return facts


def body(response: bytes) -> Any:
    """Return the content of a response with facts."""
    head, _, content = response.partition(b"\r\n\r\n")
    return json.loads(gzip.decompress(content) if b"content-encoding: gzip" in head.lower() else content)


def test_unread_answers_share_their_content_and_a_scrape_gets_its_page() -> None:
    with server(Large(), facts=large_facts()) as (port, other), ExitStack() as opened:
        tracemalloc.start()
        try:
            for number in range(CLIENTS):
                opened.enter_context(silent := request(port, f"{FACTS}?after={number / CLIENTS}"))
                silent.recv(1)
            assert scrape(port) == 200
            with request(other, f"{FACTS}?after=0", host="::1", Connection="close") as reader:
                assert len(body(read_all(reader))["moments"]) == MOMENTS_LIMIT
            assert tracemalloc.get_traced_memory()[1] < CLIENTS * MOMENTS_LIMIT * MOMENT / 4
        finally:
            tracemalloc.stop()


def test_connections_beyond_the_limit_that_wait_for_facts_are_closed() -> None:
    with server(Large(), facts=large_facts()) as (port, _), ExitStack() as opened:
        silent = [opened.enter_context(request(port, f"{FACTS}?after=0")) for _ in range(limits.CONNECTIONS + 20)]
        assert scrape(port) == 200
        assert len(find_reset(silent, seconds=10)) > 0


def test_an_answer_is_summed_once_a_second_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, sums = AnalyzedJob(tmp_path).train(KEPT_MOMENTS // 2).facts[0], []

    def counted(parts: Any) -> Any:
        sums.append(parts)
        return checksum_of(parts)

    monkeypatch.setattr(recorder, "checksum_of", counted)
    with server(facts=facts) as (port, _):
        for cursor in ("0", "0", "-inf", "-1e999", "1e-300", "00.0", "inf", "nan", "1e999", "9" * 5000):
            with request(port, f"{FACTS}?after={cursor}", Connection="close", **{"Accept-Encoding": "gzip"}) as one:
                found = body(read_all(one))["moments"]
            assert len(found) == (0 if cursor in ("inf", "nan", "1e999", "9" * 5000) else MOMENTS_LIMIT)
    assert len(sums) == 2


@pytest.mark.parametrize("cursor", ["x", "1;1", "0x10", "%00", "1e", "%F0%9F%92%A9", "9" * 5000 + "x"])
def test_a_cursor_that_is_no_number_costs_nothing(cursor: str) -> None:
    with server(facts=large_facts()) as (port, _):
        assert scrape(port, f"{FACTS}?after={cursor}") == 400
        assert scrape(port) == 200


def test_forged_analyzers_are_not_shown_while_the_first_one_asks(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(3)
    reporter = job.nodes[0].reporter()
    with server(facts=job.facts[0], reporter=reporter) as (port, _):
        assert scrape(port, FACTS, **{ANALYZER: "monitor:10418"}) == 200
        for number in range(200):
            forged = f"evil-{number}:1" if number % 2 else "<script>" * number
            assert scrape(port, FACTS, **{ANALYZER: forged}) == 200
        assert reporter.analyzer.address == "monitor:10418"


@pytest.mark.parametrize("forged", ["<script>alert(1)</script>", "a b", "http://evil/", "a\x80", "x" * 300, "a:1\t"])
def test_an_analyzer_has_no_name_that_is_not_an_address(tmp_path: Path, forged: str) -> None:
    job = AnalyzedJob(tmp_path).train(3)
    reporter = job.nodes[0].reporter()
    with server(facts=job.facts[0], reporter=reporter) as (port, _):
        assert scrape(port, FACTS, **{ANALYZER: forged}) in (200, 400)
        assert reporter.analyzer.address in (None, "a:1")


def test_facts_need_the_password(web_config: Any) -> None:
    users = {"prometheus": bcrypt.hashpw(b"a password", bcrypt.gensalt(4)).decode()}
    protected = server(facts=large_facts(), web_config=web_config(basic_auth_users=users))
    with protected as (port, _), request(port, FACTS, Connection="close") as client:
        answer = read_all(client)
    assert status(answer) == 401
    assert b"moments" not in answer
