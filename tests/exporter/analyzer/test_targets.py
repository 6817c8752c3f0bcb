"""Targets: addresses, file_sd files, DNS names and those of a Prometheus; only configured names get credentials."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from testing.http_server import http_server
from testing.servers import free_port
from testing.waiting import eventually

from rankscope_exporter.analyzer import puller, request
from rankscope_exporter.analyzer.puller import Puller
from rankscope_exporter.analyzer.request import RequestError, Target, get, unpack
from rankscope_exporter.analyzer.running import AnalyzerError, running
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.analyzer.settings import AnalyzerFlags
from rankscope_exporter.analyzer.targets import Targets, parse_source, parse_target
from rankscope_exporter.node_facts.wire import read_runs
from rankscope_exporter.ranks.diagnosis_service import FindingFlags


def find(*texts: str) -> Sequence[Target]:
    return asyncio.run(Targets(map(parse_source, texts)).find())


def test_an_address_may_be_a_host_a_host_and_a_port_or_a_url() -> None:
    found = [one.name for one in find("node-a", "node-b:9000", "https://node-c/prefix/", "[::1]:80")]
    assert found == ["http://node-a:10417", "http://node-b:9000", "https://node-c:10417/prefix", "http://[::1]:80"]


def test_an_address_may_be_the_one_that_prometheus_scrapes() -> None:
    assert [one.name for one in find("http://node-a:10417/metrics")] == ["http://node-a:10417"]


INVALID_ADDRESSES = (
    *("a:b", "a:99999", "ftp://a", "prometheus://a:9090", "user:secret@a", "a?x=1", "", "a b", "a;b", "a\r\nX: y", "ä"),
    *("./a.ini", "conf/a.txt", "/etc/hosts", "[::1"),
)


@pytest.mark.parametrize("text", INVALID_ADDRESSES)
def test_other_texts_are_no_address_and_the_error_quotes_them(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not HOST:PORT")):
        parse_target(text)


def test_a_file_of_another_kind_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes.txt").write_text("node-a\n")
    with pytest.raises(ValueError, match=r"nodes\.txt is a file; .* \.json, \.yml, \.yaml"):
        parse_source("nodes.txt")


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
    assert asyncio.run(targets.find()) == asyncio.run(targets.find()) == []
    assert caplog.text.count("no targets source=") == 1


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


def test_the_request_names_the_runs_of_the_target_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Analyzer, "hanging", lambda _, target: [(f"run at {target}", "1000")])
    with (
        answering(b"{}") as (address, asked),
        Puller(Targets([parse_source(address)]), Analyzer(), address="monitor:1"),
    ):
        eventually(lambda: asked)
    assert read_runs(asked[0]["X-Rankscope-Hanging"]) == {(f"run at {address}", "1000")}


def ask(address: str) -> bytes:
    return asyncio.run(get(parse_target(address), "/x", {}, 2.0))


def test_a_redirect_is_not_followed() -> None:
    with answering(b"{}") as (other, asked), answering(b"", 302, Location=other) as (address, _):
        with pytest.raises(RequestError, match="status 302"):
            ask(address)
        assert not asked


def test_the_reason_has_the_page_that_is_missing() -> None:
    with answering(b"", 404) as (address, _), pytest.raises(RequestError, match=r"status 404 Not Found at /x$"):
        ask(address)


def test_the_reason_of_a_refused_connection_is_the_one_of_the_system() -> None:
    with pytest.raises(RequestError, match=r"^Connection refused$"):
        ask(f"127.0.0.1:{free_port()}")


def test_a_connection_that_is_closed_without_an_answer_may_need_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closing = threading.Thread(target=_read_and_close, args=(server,))
        closing.start()
        with pytest.raises(RequestError, match=r"without an answer.*https://"):
            ask(f"127.0.0.1:{server.getsockname()[1]}")
        closing.join()


def _read_and_close(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"analyze": [" , "]}, "--analyze: names no target"),
        ({"analyze": ["node-a", "node-b:http"]}, "--analyze: 'node-b:http' is not HOST:PORT (see"),
        ({"analyze": ["missing.yml"]}, "--analyze: missing.yml: No such file"),
        ({"analyze_ca": Path("missing.pem")}, "--analyze.ca-file: missing.pem: No such file"),
        ({"analyze_credentials": Path("/dev/null")}, "--analyze.basic-auth-file: /dev/null is not one line"),
    ],
)
def test_a_wrong_flag_is_an_error_at_the_start_that_names_it(flags: dict[str, Any], text: str) -> None:
    flags = {"analyze": ["node-a"], **flags}
    with pytest.raises(AnalyzerError, match=re.escape(text)), running(AnalyzerFlags(**flags), FindingFlags(), ""):
        pass


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with answering(b"x" * 200_000) as (address, _), pytest.raises(RequestError, match="too large"):
        asyncio.run(get(parse_target(address), "/x", {}, 2.0, limit=100_000))


def test_an_answer_that_unpacks_to_too_much_is_not_unpacked() -> None:
    bomb = gzip.compress(b"0" * (request.LIMIT + 1))
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
    with pytest.raises(RequestError, match="not a name"):
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
        eventually(lambda: any(puller.answers().values()))
    assert len(asked) == 1
    assert caplog.text.count("target does not answer") == 1
    assert "invalid answer" in caplog.text


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
