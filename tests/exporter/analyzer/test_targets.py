"""Targets: addresses, file_sd files, DNS names and those of a Prometheus; only configured names get credentials."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from testing.http_server import answers, http_server
from testing.waiting import eventually

from rankscope_exporter.analyzer import puller, request
from rankscope_exporter.analyzer.puller import IN_A_ROW, Puller
from rankscope_exporter.analyzer.request import RequestError, Target, get, unpack
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.analyzer.targets import Targets, parse_source, parse_target
from rankscope_exporter.node_facts.wire import MOMENTS_LIMIT


def find(*texts: str) -> Sequence[Target]:
    return asyncio.run(Targets(map(parse_source, texts)).find())


def test_an_address_may_be_a_host_a_host_and_a_port_or_a_url() -> None:
    found = [one.name for one in find("node-a", "node-b:9000", "https://node-c/prefix/", "[::1]:80")]
    assert found == ["http://node-a:10417", "http://node-b:9000", "https://node-c:10417/prefix", "http://[::1]:80"]


@pytest.mark.parametrize("text", ["a:b", "ftp://a", "user:secret@a", "a?x=1", "", "a b", "a\r\nX: y", "ä"])
def test_other_texts_are_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_target(text)


def test_a_file_is_read_again_and_a_damaged_one_keeps_the_last_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes.yml"
    path.write_text("- targets: [node-a, 'node-b:1']\n  labels: {__scheme__: https}\n")
    targets = Targets([parse_source(str(path))])
    assert [one.name for one in asyncio.run(targets.find())] == ["https://node-a:10417", "https://node-b:1"]
    path.write_text("- targets: [")
    assert len(asyncio.run(targets.find())) == len(asyncio.run(targets.find())) == 2
    assert caplog.text.count("cannot find targets") == 1
    path.write_text("[]")
    assert asyncio.run(targets.find()) == []


@pytest.mark.parametrize("content", ["[1]", '{"targets": []}', '[{"targets": "a"}]', '[{"targets": ["a:b"]}]', "["])
def test_a_damaged_file_is_an_error_at_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"nodes\.json"):
        parse_source(str(path))


def test_a_name_has_a_target_for_each_of_its_addresses_with_the_name_for_its_certificate() -> None:
    found = find("dns+https:localhost:9000")
    assert {(one.port, one.server_name, one.is_configured) for one in found} == {(9000, "localhost", True)}
    assert {one.host for one in found} <= {"127.0.0.1", "::1"}
    assert found


@contextmanager
def answering(body: bytes, status: int = 200, **headers: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve the same answer to all requests. Yield the address and the headers of all requests so far."""
    received: list[dict[str, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        received.append({"path": handler.path, **dict(handler.headers)})
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    with http_server(answer) as port:
        yield f"http://127.0.0.1:{port}", received


def test_only_a_configured_target_gets_credentials_and_not_one_that_a_prometheus_lists() -> None:
    with answering(b"{}") as (listed, of_listed), answering(b"{}") as (named, of_named):
        active = [
            {"scrapeUrl": f"{listed}/metrics", "labels": {"job": "rankscope"}},
            {"scrapeUrl": "http://192.0.2.1/metrics", "labels": {"job": "node"}},
            {"scrapeUrl": "http://192.0.2.2/metrics", "labels": {"job": "rankscope-analyzer"}},
            {"scrapeUrl": "nonsense", "labels": {"job": "rankscope"}},
        ]
        with answering(json.dumps({"data": {"activeTargets": active}}).encode()) as (prometheus, asked):
            targets = Targets(map(parse_source, (f"prometheus+{prometheus}", named)))
            assert not [one for one in asyncio.run(targets.find()) if one.host.startswith("192.0.2.")]
            with Puller(targets, Analyzer(), credentials="Basic secret", address="monitor:1"):
                eventually(lambda: of_listed and of_named)
    assert of_named[0]["Authorization"] == "Basic secret"
    assert "Authorization" not in {**of_listed[0], **asked[0]}
    assert of_listed[0]["path"] == of_named[0]["path"] == "/api/v1/facts"
    assert of_listed[0]["X-Rankscope-Analyzer"] == of_named[0]["X-Rankscope-Analyzer"] == "monitor:1"
    assert asked[0]["path"] == "/api/v1/targets?state=active"


def ask(address: str) -> bytes:
    return asyncio.run(get(parse_target(address), "/x", {}, 2.0))


def test_a_redirect_is_not_followed() -> None:
    with answering(b"{}") as (other, asked), answering(b"", 302, Location=other) as (address, _):
        with pytest.raises(RequestError, match="status 302"):
            ask(address)
        assert not asked


def test_an_answer_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PACKED_LIMIT", 100_000)
    with answering(b"x" * 200_000) as (address, _), pytest.raises(RequestError, match="too large"):
        ask(address)


def test_an_answer_that_unpacks_to_too_much_is_not_unpacked() -> None:
    bomb = gzip.compress(b"0" * (request.PLAIN_LIMIT + 1))
    with pytest.raises(RequestError, match="too large"):
        unpack(bomb)


@pytest.mark.parametrize("packed", [b"no gzip", gzip.compress(b"content")[:-10]], ids=["other", "truncated"])
def test_a_damaged_answer_is_an_error(packed: bytes) -> None:
    with pytest.raises(RequestError, match="damaged gzip"):
        unpack(packed)


def test_a_target_that_does_not_answer_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = Target(*server.getsockname())
        with pytest.raises(RequestError, match="timeout"):
            asyncio.run(get(target, "/", {}, 0.05))


def test_an_answer_that_changes_the_protocol_is_an_error() -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
    with answering(b"", 101, **upgrade) as (address, _), pytest.raises(RequestError, match="not HTTP"):
        ask(address)


def test_a_text_that_is_no_host_name_is_an_error() -> None:
    with pytest.raises(RequestError, match="not a host name"):
        ask("a..b")


def test_a_source_with_a_text_that_is_no_host_name_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [one.name for one in find("dns:a..b:1", "node-a:1")] == ["http://node-a:1"]
    assert caplog.text.count("cannot find targets") == 1


INVALID = {
    "empty": b"{}",
    "deep": b"[" * 100_000,
    "of another version": b'{"version":2,"node":"a","boot":"b","now":1,"moments":[]}',
    "no number": b'{"version":1,"node":"a","boot":"b","now":NaN,"moments":[]}',
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_answer_is_logged_once_and_counts_as_failing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with answering(INVALID[name]) as (address, asked), Puller(Targets([parse_source(address)]), Analyzer()) as puller:
        eventually(lambda: puller.counts() == {"up": 0, "failing": 1})
    assert len(asked) == 1
    assert caplog.text.count("target does not answer") == 1
    assert "invalid answer" in caplog.text


def test_a_target_that_always_has_more_is_asked_a_few_times_in_a_row() -> None:
    asked = 0

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonlocal asked
        moments = [{"at": asked + number / MOMENTS_LIMIT} for number in range(MOMENTS_LIMIT)]
        asked += 1
        answers(json.dumps({"version": 1, "node": "a", "boot": "b", "now": 1e9, "moments": moments}).encode())(handler)

    with http_server(answer) as port, Puller(Targets([parse_source(f"127.0.0.1:{port}")]), Analyzer()):
        eventually(lambda: asked >= IN_A_ROW)
        time.sleep(0.5)
    assert asked == IN_A_ROW


def test_a_target_whose_ranks_a_run_misses_does_not_wait_for_those_that_never_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puller, "CONCURRENT_FAILING", 1)
    monkeypatch.setattr(puller, "TIMEOUT", 3600.0)
    monkeypatch.setattr(Analyzer, "has_ranks", lambda _self, target: target == missed)
    with socket.create_server(("127.0.0.1", 0)) as silent, answering(b"", 503) as (missed, asked):
        sources = [parse_source(f"127.0.0.1:{silent.getsockname()[1]}"), parse_source(missed)]
        with Puller(Targets(sources), Analyzer()):
            eventually(lambda: asked)
