"""Attack: an exporter whose answers are endless, slow, large, packed or deep, to keep the analyzer busy or full."""

from __future__ import annotations

import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from testing.waiting import eventually
from tests.attacks.analyzer.answers import MIB, answer, answers, asked, document, rank, reasons

from rankscope_exporter.analyzer import nodes, puller
from rankscope_exporter.analyzer.nodes import Node
from rankscope_exporter.node_facts.wire import MOMENTS_LIMIT, Answer

STOPS_AT = 100 * MIB
BUFFERS = 8 * MIB
"""The bytes that the kernel holds of a connection."""
OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    "body": (OK + b"\r\n", b"0" * 65536),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n" * 10_000),
    "one header": (OK + b"X: ", b"a" * 65536),
    "headers": (OK, b"a: b\r\n" * 10_000),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10_000),
    "interim answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 2_000),
    "status": (b"HTTP/1.1 200 ", b"O" * 65536),
}


class Flood:
    """A server's endless answer, and how much of it was read. It stops at STOPS_AT."""

    def __init__(self, begin: bytes, part: bytes) -> None:
        self.begin, self.part, self.taken, self.is_over = begin, part, 0, threading.Event()

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        try:
            request.wfile.write(self.begin)
            while self.taken < STOPS_AT:
                request.wfile.write(self.part)
                self.taken += len(self.part)
        except OSError:
            pass
        finally:
            self.is_over.set()


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that has the peak of the block's memory after it."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_answer_is_not_read_to_its_end(what: str) -> None:
    flood = Flood(*ENDLESS[what])
    with asked(flood) as (asking, _):
        eventually(lambda: reasons(asking))
        assert flood.is_over.wait(30)
    assert flood.taken < 2 * puller.FACTS_LIMIT + BUFFERS


@pytest.mark.parametrize("what", ["head", "body", "packed body"])
def test_an_answer_that_drips_is_given_up_and_does_not_delay_others(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(puller, "TIMEOUT", 0.5)
    begin = {"head": b"", "body": b"\r\n", "packed body": b"Content-Encoding: gzip\r\n\r\n"}[what]
    over = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(OK + begin)
        until = time.monotonic() + 30
        while not over.wait(0.05) and time.monotonic() < until:
            request.wfile.write(b"X: y\r\n" if what == "head" else b" ")

    with asked(drip) as (asking, _):
        eventually(lambda: reasons(asking) == ["timeout"])
        over.set()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_packed_answer_is_not_expanded_without_limit(layers: int) -> None:
    bomb = gzip.compress(b"[" * STOPS_AT)
    bomb = bomb if layers == 1 else gzip.compress(bomb)
    with peak_memory() as peak, asked(answers(bomb, 200, **{"Content-Encoding": "gzip"})) as (asking, _):
        eventually(lambda: reasons(asking))
    assert peak[0] < 4 * puller.FACTS_LIMIT


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 5 * MIB,
        b'{"moments":' * 400_000,
        b'{"version":1,"node":"a","boot":"b","now":1,"moments":[' + b"{}," * 1_000_000,
        b'{"version":1,"node":"a","boot":"b","now":1,"moments":[],"more":' + b"[" * MIB,
        b'{"version":1,"node":"a","boot":"b","now":' + b"9" * 5 * MIB,
        b'{"version":1,"node":"' + b"\\u0000" * 500_000 + b'"',
        b"\xff" * 5 * MIB,
    ],
    ids=["brackets", "objects", "moments", "unknown field", "digits", "escapes", "no text"],
)
def test_a_large_and_odd_document_is_refused_in_one_line(caplog: pytest.LogCaptureFixture, body: bytes) -> None:
    with peak_memory() as peak, asked(answers(body)) as (asking, _):
        eventually(lambda: reasons(asking))
    assert "invalid answer" in caplog.text
    assert max(map(len, caplog.text.splitlines())) < 500
    assert peak[0] < 8 * puller.FACTS_LIMIT


def test_an_exporter_that_always_has_more_is_not_asked_without_a_pause() -> None:
    requests: list[str] = []

    def more(request: BaseHTTPRequestHandler) -> None:
        requests.append(request.path)
        begin = 10.0 * len(requests)
        moments = [{"at": begin + number} for number in range(MOMENTS_LIMIT)]
        answers(json.dumps(document(begin + MOMENTS_LIMIT, moments=moments)).encode())(request)

    with asked(more):
        eventually(lambda: len(requests) >= puller.CATCH_UP)
        time.sleep(0.5)
        assert len(requests) == puller.CATCH_UP


@pytest.mark.parametrize("at", [[5.0] * MOMENTS_LIMIT, [9.0 - number for number in range(MOMENTS_LIMIT)]])
def test_moments_that_repeat_or_go_back_are_not_more(at: list[float]) -> None:
    requests: list[str] = []

    def again(request: BaseHTTPRequestHandler) -> None:
        requests.append(request.path)
        answers(json.dumps(document(9.0, moments=[{"at": one} for one in at])).encode())(request)

    with asked(again) as (asking, _):
        eventually(lambda: len(requests) >= 2)
        time.sleep(0.5)
        assert len(requests) == 2
        assert [*asking.answers().values()] == [""]


def test_moments_that_wait_to_be_judged_are_limited_by_their_bytes_and_the_newest_stay() -> None:
    node = Node("evil", "boot")
    for second in range(100):
        body = json.dumps(document(float(second), [rank(0, float(second))]))
        node.take(Answer.model_validate_json(body), second, second, nodes.KEPT_BYTES // 4)
    kept = [moment.at for moment in node._moments]
    assert kept == [96.0, 97.0, 98.0, 99.0]
    node.take(answer(100.0), 100.0, 100.0, 2 * nodes.KEPT_BYTES)
    assert not node._moments
    node.take(answer(101.0), 101.0, 101.0, 1)
    assert len(node._moments) == len(node._sizes) == 1
