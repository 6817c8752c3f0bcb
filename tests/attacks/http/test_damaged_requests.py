"""Attack: invalid requests, to fill the log with tracebacks or to crash the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.attacks.http.clients import connect, read_all, scrape, server
from validation.fuzz.fuzzing import FuzzError
from validation.fuzz.requests import run

ACCEPT = "application/openmetrics-text;version="


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_no_damaged_request_stops_the_server_or_logs_an_error(tmp_path: Path) -> None:
    outcome = run(tmp_path, seed=2, first=0, requests=1000)
    assert {"200", "400", "401", "404", "405", "without an answer"} <= outcome.keys()  # the requests cover each kind


@pytest.mark.parametrize("version", ["1.0.0a", "x", "9" * 5000, "", "1..0", "1.0.0\xa0"])
def test_an_invalid_version_is_answered_and_logs_no_error(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with server() as (port, _), connect(port) as client:
        client.sendall(
            f"GET /metrics HTTP/1.1\r\nConnection: close\r\nAccept: {ACCEPT}{version}\r\n\r\n".encode("latin-1")
        )
        assert read_all(client).startswith(b"HTTP/1.1 200")
    assert errors(caplog) == []


def test_unread_responses_to_pipelined_requests_log_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with server() as (port, _):
        for _ in range(20):
            with connect(port) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        assert scrape(port) == 200
    assert errors(caplog) == []


def test_invalid_requests_log_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with server() as (port, _):
        for _ in range(50):
            with connect(port) as client:
                client.sendall(b"no request\r\n\r\n")
                assert read_all(client).startswith(b"HTTP/1.1 400")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 2


def test_the_fuzzer_detects_an_error_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("rankscope_exporter.web.app.render_status", fail)
    with pytest.raises(FuzzError, match=r"seed 2, request \d+: "):
        run(tmp_path, seed=2, first=0, requests=200)
