"""Errors of `rankscope explain`: Prometheus does not answer, or another server does."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from testing.http_server import answers, http_server
from tests.trainer_hooks.cli.explaining import complaint

NOTHING = b'{"status":"success","data":{"resultType":"vector","result":[]}}'


class Server:
    """A server with the same answer to everything, which keeps the requests' paths and credentials."""

    def __init__(self) -> None:
        self.answer = answers(NOTHING)
        self.asked: list[tuple[str, str | None]] = []
        self.address = ""

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((request.path.partition("?")[0], request.headers["Authorization"]))
        self.answer(request)


def served() -> Iterator[Server]:
    server = Server()
    with http_server(server) as port:
        server.address = f"127.0.0.1:{port}"
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    yield from served()


@pytest.fixture
def another_server() -> Iterator[Server]:
    yield from served()


def test_a_missing_server_cannot_be_reached(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert complaint(capsys, "--url", url) == f"cannot reach {url}: Connection refused (set --url)"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>Log in, please</html>", "is not a Prometheus: unexpected answer"),
        (200, b'{"status":"success","data":{"result":3}}', "is not a Prometheus: unexpected answer"),
        (200, b"[]", "is not a Prometheus: unexpected answer"),
        (404, b"404 page not found", "is not a Prometheus: it has no /api/v1"),
        (401, b"", "needs a user and a password: --url http://USER:PASSWORD@HOST:PORT"),
        (503, b'{"status":"error","error":"not ready yet"}', "answers 503: not ready yet"),
        (502, b"<html>", "answers 502: Bad Gateway"),
    ],
)
def test_an_error_names_what_is_wrong_with_the_answer_in_one_line(
    capsys: pytest.CaptureFixture[str], server: Server, status: int, body: bytes, why: str
) -> None:
    server.answer = answers(body, status)
    assert complaint(capsys, "--url", f"http://{server.address}") == f"http://{server.address} {why}"


@pytest.mark.parametrize("url", ["localhost:9090", "file:///etc/passwd", "http://", "http://[::1", "http://host:port"])
def test_an_invalid_url_is_named(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert complaint(capsys, "--url", url) == f"{url} is not a URL such as http://localhost:9090"


def test_an_invalid_time_is_named(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    error = complaint(capsys, "--url", f"http://{server.address}", "--at", "teatime")
    assert error == "--at teatime is not a time such as 30m (ago), 2026-11-21T02:40 or 1795228800"
    assert server.asked == []


def test_the_user_and_password_of_the_url_are_sent_and_not_shown(
    capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    error = complaint(capsys, "--url", f"http://alice:p%40ss@{server.address}/prometheus/")
    assert error.startswith(f"http://{server.address}/prometheus has no run")
    assert {path for path, _ in server.asked} == {"/prometheus/api/v1/query"}
    assert {credentials for _, credentials in server.asked} == {f"Basic {base64.b64encode(b'alice:p@ss').decode()}"}


def test_a_redirect_does_not_get_the_password(
    capsys: pytest.CaptureFixture[str], server: Server, another_server: Server
) -> None:
    server.answer = answers(NOTHING, 302, Location=f"http://{another_server.address}/api/v1/query")
    complaint(capsys, "--url", f"http://alice:secret@{server.address}")
    assert {credentials for _, credentials in another_server.asked} == {None}


def test_an_environment_variable_may_name_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("PROMETHEUS_URL", f"http://{server.address}")
    assert complaint(capsys).startswith(f"http://{server.address} has no run")


@pytest.fixture
def proxy(another_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the server to which the environment sends requests."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://{another_server.address}")
    return another_server


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost", "rankscope.localhost", "localhost.", "127.0.0.1", "127.9.8.7"]
)
def test_this_machine_is_not_asked_through_a_proxy(
    capsys: pytest.CaptureFixture[str], server: Server, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection
    address = ("127.0.0.1", int(server.address.rpartition(":")[2]))
    monkeypatch.setattr(socket, "create_connection", lambda _, *options, **more: connect(address, *options, **more))
    complaint(capsys, "--url", f"http://{host}:{address[1]}")
    assert {path for path, _ in server.asked} == {"/api/v1/query"}  # a proxy is asked for a whole URL


def test_the_ipv6_loopback_is_not_asked_through_a_proxy(
    capsys: pytest.CaptureFixture[str], proxy: Server, free_port: int
) -> None:
    assert complaint(capsys, "--url", f"http://[::1]:{free_port}").startswith("cannot reach http://[::1]")
    assert proxy.asked == []


def test_a_redirect_to_this_machine_does_not_go_through_a_proxy(
    capsys: pytest.CaptureFixture[str], server: Server, proxy: Server
) -> None:
    proxy.answer = answers(b"", 302, Location=f"http://{server.address}/api/v1/query")
    assert complaint(capsys, "--url", "http://prometheus.example").startswith("http://prometheus.example has no run")
    assert server.asked


@pytest.mark.parametrize(
    "host", ["prometheus.example", "localhost.example", "10.0.0.1", "127.example", "[2001:db8::1]"]
)
def test_another_machine_is_asked_through_the_proxy(
    capsys: pytest.CaptureFixture[str], proxy: Server, host: str
) -> None:
    assert complaint(capsys, "--url", f"http://{host}:9090").startswith(f"http://{host}:9090 has no run")
    assert proxy.asked
