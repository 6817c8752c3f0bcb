"""The attack: `rankscope explain` asks another server, or a Prometheus with hostile names and texts."""

from __future__ import annotations

import gzip
import json
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from testing.authority import Authority
from testing.http_server import answers, http_server
from tests.trainer_hooks.cli.explaining import complaint, explain
from validation.fuzz.explain_answers import Scene, answer

from rankscope.cli.explaining import command
from rankscope.cli.explaining.fetching import BODY_LIMIT

MIB = 1024**2
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function that starts a server and returns its address."""
    with ExitStack() as servers:
        yield lambda *how: f"localhost:{servers.enter_context(http_server(*how))}"


class Endless:
    """An endless body, and how much of it was read. It stops at 100 MiB."""

    def __init__(self, status: int = 200, begin: bytes = b'{"data":{"result":[', **headers: str) -> None:
        self.begun, self.taken, self.is_over = answers(begin, status, **headers), 0, threading.Event()

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        try:
            self.begun(request)
            while self.taken < 100 * MIB:
                request.wfile.write(b"[]," * 100_000)
                self.taken += 300_000
        except OSError:
            pass
        finally:
            self.is_over.set()


VECTOR = b'{"data":{"result":[%s]}}'


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"data":' * 100_000,
        b"9" * 10_000,
        b"null",
        b'{"data":{"result":[null]}}',
        VECTOR % b"{}",
        VECTOR % b'{"metric":{},"value":[0,"1"]}',
        VECTOR % b'{"metric":{"run":"a"}}',
        VECTOR % b'{"metric":{"run":"a"},"value":[0]}',
        VECTOR % b'{"metric":{"run":"a"},"value":[0,null]}',
        VECTOR % b'{"metric":{"run":"a"},"value":[0,"a number"]}',
        VECTOR % b'{"metric":{"run":["a"]},"value":[0,"1"]}',
        VECTOR % b'{"metric":["run"],"value":[0,"1"]}',
        VECTOR % (b'{"metric":{"run":"%s"},"value":[0,"1"]}' % (b"x" * 5000)),
        VECTOR % (b'{"metric":{"run":"a"},"value":[0,%s]}' % (b"9" * 4000)),
    ],
)
def test_an_answer_that_is_not_prometheus_is_one_line(
    capsys: pytest.CaptureFixture[str], serve: Serve, body: bytes
) -> None:
    address = serve(answers(body))
    assert "is not a Prometheus: unexpected answer" in complaint(capsys, "--url", f"http://{address}")


@pytest.mark.parametrize("value", [b'"NaN"', b'"1e400"', b'"1e308"', b'"-Inf"', b"NaN"])
def test_an_invalid_number_is_no_series(capsys: pytest.CaptureFixture[str], serve: Serve, value: bytes) -> None:
    address = serve(answers(VECTOR % (b'{"metric":{"run":"a"},"value":[0,%s]}' % value)))
    assert "has no run" in complaint(capsys, "--url", f"http://{address}")


@pytest.mark.parametrize("status", [200, 302, 500])
def test_an_endless_body_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str], serve: Serve, status: int) -> None:
    endless = Endless(status, **({"Location": "/elsewhere"} if status == 302 else {}))
    complaint(capsys, "--url", f"http://{serve(endless)}")
    assert endless.is_over.wait(30)
    assert endless.taken < 6 * (BODY_LIMIT + 8 * MIB)  # six requests; the sockets' buffers hold up to 8 MiB


def test_a_compressed_body_is_not_expanded_without_limit(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    bomb = gzip.compress(b'{"data":{"result":[' + b"[]," * (100 * MIB // 3))
    address = serve(answers(bomb, 200, **{"Content-Encoding": "gzip"}))
    tracemalloc.start()
    try:
        assert f"its answer has more than {BODY_LIMIT // MIB} MiB" in complaint(capsys, "--url", f"http://{address}")
        assert tracemalloc.get_traced_memory()[1] < 4 * BODY_LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b"", b"{}", gzip.compress(b"{}", mtime=0)[:-9], b"\x1f\x8b" + b"\xff" * 99])
def test_a_damaged_compressed_body_is_one_line(capsys: pytest.CaptureFixture[str], serve: Serve, body: bytes) -> None:
    error = complaint(capsys, "--url", f"http://{serve(answers(body, 200, **{'Content-Encoding': 'gzip'}))}")
    assert "unexpected answer" in error or "its answer is not gzip" in error


@pytest.mark.parametrize("phase", ["head", "body"])
def test_an_answer_that_never_ends_times_out(
    capsys: pytest.CaptureFixture[str], serve: Serve, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(command, "EXPLAINED_WITHIN", 1.0, raising=False)
    over = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n" if phase == "head" else b"HTTP/1.1 200 OK\r\n\r\n")
        until = time.monotonic() + 15
        while not over.wait(0.05) and time.monotonic() < until:
            request.wfile.write(b"X: y\r\n" if phase == "head" else b" ")

    try:
        assert "no answer within 1 s" in complaint(capsys, "--url", f"http://{serve(drip)}")
    finally:
        over.set()


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1/a", "file:///etc/passwd", "data:,x", "http://u:p@127.0.0.1:1/"])
def test_a_redirect_leads_only_to_http(capsys: pytest.CaptureFixture[str], serve: Serve, target: str) -> None:
    error = complaint(capsys, "--url", f"http://{serve(answers(b'', 302, Location=target))}")
    assert f"it redirects from http to '{target}" in error


def test_a_redirect_to_itself_ends(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    asked: list[str] = []

    def again(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        answers(b"", 307, Location=f"/{len(asked)}")(request)

    assert "redirects more than" in complaint(capsys, "--url", f"http://{serve(again)}")
    assert len(asked) <= 10


def test_https_is_not_redirected_to_http(
    capsys: pytest.CaptureFixture[str], serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = Authority(tmp_path).issue("server", "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    asked: list[str] = []

    def in_the_clear(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        answers(VECTOR % b"")(request)

    clear = serve(in_the_clear)
    secret = serve(answers(b"", 302, Location=f"http://{clear}/api/v1/query"), context)
    assert "it redirects from https to 'http://" in complaint(capsys, "--url", f"https://{secret}")
    assert asked == []


def scene(found: dict[str, dict[str, Any]], *runs: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answer like a Prometheus, except for the requests in `found`."""

    def answer_it(request: BaseHTTPRequestHandler) -> None:
        body = answer(request.path, Scene(runs or ("train",)))
        for part, other in found.items():
            body = other if part in request.path else body
        answers(json.dumps(body).encode())(request)

    return answer_it


def vector(*series: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return {"data": {"result": [{"metric": metric, "value": [0, value]} for metric, value in series]}}


EVIL = "\x1b]0;owned\x07\x9b2J\u202e\nCRITICAL: a line of its own"
HOSTILE = {
    "an alert without a name": {"query=ALERTS": vector(({"alertstate": "firing"}, "1"))},
    "a loss without a cause": {"query=max+by+%28cause": vector(({}, "1"))},
    "a lag without a rank": {"query=max+by+%28rank": vector(({}, "1"))},
    "a reason without a name": {"query=group+by+%28reason": vector(({}, "1"))},
    "a finding without a run": {"rankscope_finding": vector(({"kind": "straggler"}, "1"))},
    "text that is too long": {"rankscope_finding": vector(({"summary": "x" * 5000}, "1"))},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_incomplete_answer_is_one_line(capsys: pytest.CaptureFixture[str], serve: Serve, what: str) -> None:
    address = serve(scene(HOSTILE[what]))
    assert "unexpected answer" in complaint(capsys, "--url", f"http://{address}")


def finding(since: str, **texts: str) -> dict[str, Any]:
    """Return an answer with a finding."""
    labels = {"run": "train", "kind": "straggler", "severity": EVIL, **texts}
    values = {"ratio": "0.3", "since_timestamp_seconds": since, "info": "1"}
    return vector(*(({"__name__": f"rankscope_finding_{name}", **labels}, value) for name, value in values.items()))


def test_names_and_texts_with_escapes_are_printable(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    found = {
        "query=ALERTS": vector(({"alertname": "RankscopeGpuXid", "uuid": "GPU-2", "severity": EVIL, "gpu": EVIL}, "1")),
        "rankscope_finding": finding("1", rank=EVIL, summary=EVIL, advice=EVIL),
        "query=max+by+%28cause": vector(({"cause": EVIL}, "0.5")),
        "query=group+by+%28reason": vector(({"reason": EVIL, "node": EVIL}, "1")),
    }
    code, out, err = explain(capsys, "--url", f"http://{serve(scene(found))}")
    assert (code, err) == (0, "")
    assert out.count("owned") >= 4
    assert all(line.isprintable() for line in out.split("\n"))
    assert not any(line.startswith("CRITICAL: a line") for line in out.split("\n"))


@pytest.mark.parametrize("time", ["-1e18", "1e18", "253402300800", "NaN"])
def test_a_run_outside_the_calendar_is_shown(capsys: pytest.CaptureFixture[str], serve: Serve, time: str) -> None:
    address = serve(scene({"rankscope_finding": finding(time)}))
    assert explain(capsys, "--url", f"http://{address}")[0] == 0
    _, out, _ = explain(capsys, "--url", f"http://{address}", "--json")
    assert json.loads(out, parse_constant=pytest.fail)["run"] == "train"
    address = serve(scene({"rank_start": vector(({"run": "train"}, time))}, "train", "two"))
    assert "choose one with --run" in complaint(capsys, "--url", f"http://{address}", "--json")
    assert explain(capsys, "--url", f"http://{address}")[0] == 0


@pytest.mark.parametrize(
    "at",
    [
        *("9" * 400, "9" * 5000, "9" * 400 + "d", "9" * 5000 + "d", "999999d", "-1"),
        *("0001-01-01", "0001-01-01T00:00+14:00", "\udcff"),
    ],
)
def test_a_time_outside_the_calendar_is_one_line(capsys: pytest.CaptureFixture[str], serve: Serve, at: str) -> None:
    error = complaint(capsys, "--url", f"http://{serve(scene({}))}", f"--at={at}")
    assert "is not a time such as" in error or "is in the future" in error


@pytest.mark.parametrize(
    "url",
    [
        *("http://a b/", "http://127.0.0.1:1/\x1b[2J", "http://127.0.0.1:1/\u202e", "http://127.0.0.1:99999"),
        *("http://\udcff@127.0.0.1:1", "http://127.0.0.1:1/\udcff", "http://xn--\u0301/", "http://[::1]:1:2"),
        *("http://%zz:1", "http://" + "a" * 300),
    ],
)
def test_a_hostile_address_in_the_environment_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PROMETHEUS_URL", url)
    complaint(capsys)
