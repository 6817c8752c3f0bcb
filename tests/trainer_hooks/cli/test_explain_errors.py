"""Errors of `rankscope explain`: Prometheus does not answer, or another server does."""

from __future__ import annotations

import base64
import gzip
import socket
import ssl
from pathlib import Path

import pytest
from testing.authority import Authority
from testing.http_server import answers
from tests.trainer_hooks.cli.explaining import NOTHING, Server, complaint, served

from rankscope.cli.explaining.fetching import proxy_of

LOGIN = "(log in with --url http://USER:PASSWORD@HOST:PORT or --header 'Authorization: Bearer TOKEN')"


def test_a_missing_server_cannot_be_reached(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert complaint(capsys, "--url", url) == f"cannot reach {url}: Connection refused (set --url)"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>Log in, please</html>", f"is not a Prometheus: it answers with a web page {LOGIN}"),
        (200, b'{"status":"success","data":{"result":3}}', "is not a Prometheus: unexpected answer"),
        (200, b"[]", "is not a Prometheus: unexpected answer"),
        (404, b"404 page not found", "is not a Prometheus: it has no /api/v1"),
        (401, b"", f"answers 401: Unauthorized {LOGIN}"),
        (401, b"no org id\n", "answers 401: no org id (name the tenant with --header 'X-Scope-OrgID: TENANT')"),
        (403, b'{"message":"token expired"}', "answers 403: token expired"),
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
    assert {headers["Authorization"] for _, headers in server.asked} == {
        f"Basic {base64.b64encode(b'alice:p@ss').decode()}"
    }


def test_a_redirect_does_not_get_the_password(
    capsys: pytest.CaptureFixture[str], server: Server, another_server: Server
) -> None:
    server.answer = answers(NOTHING, 302, Location=f"http://{another_server.address}/api/v1/query")
    complaint(capsys, "--url", f"http://alice:secret@{server.address}")
    assert {headers["Authorization"] for _, headers in another_server.asked} == {None}


def test_an_environment_variable_may_name_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("PROMETHEUS_URL", f"http://{server.address}")
    assert complaint(capsys).startswith(f"http://{server.address} has no run")


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost", "rankscope.localhost", "localhost.", "localhost.localdomain", "ip6-localhost"),
        *("127.0.0.1", "127.9.8.7", "127.1", "0x7f.1", "2130706433", "0.0.0.0"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]", "[::]", "%6cocalhost"),
    ],
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
    "host",
    [
        *("prometheus.example", "localhost.example", "mylocalhost", "10.0.0.1", "10.1", "127.example"),
        *("[2001:db8::1]", "[::ffff:10.0.0.1]"),
    ],
)
def test_another_machine_is_asked_through_the_proxy(
    capsys: pytest.CaptureFixture[str], proxy: Server, host: str
) -> None:
    assert complaint(capsys, "--url", f"http://{host}:9090").startswith(f"http://{host}:9090 has no run")
    assert proxy.asked


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("*", "http://prometheus.example:9090"),
        ("db, prometheus.example", "http://prometheus.example:9090"),
        ("db  prometheus.example", "http://Prometheus.Example.:9090"),
        (".example", "http://prometheus.example:9090"),
        ("*.example", "http://prometheus.example:9090"),
        ("example", "http://prometheus.example:9090"),
        ("prometheus.example:9090", "http://prometheus.example:9090"),
        ("prometheus.example:80", "http://prometheus.example"),
        ("10.0.0.0/8", "http://10.1.2.3:9090"),
        ("10.1.2.3:9090", "http://10.1.2.3:9090"),
        ("fd00::/8", "http://[fd12::7]:9090"),
        ("FD12:0::7", "http://[fd12::7]:9090"),
        ("[fd12::7]", "http://[fd12::7]:9090"),
        ("[fd12::7]:9090", "http://[fd12::7]:9090"),
    ],
)
def test_no_proxy_has_the_forms_of_go_and_curl(
    proxy: Server, monkeypatch: pytest.MonkeyPatch, listed: str, url: str
) -> None:
    assert proxy_of(url).endswith(f"{proxy.address}/")
    monkeypatch.setenv("NO_PROXY", listed)
    assert proxy_of(url) == ""


@pytest.mark.parametrize(
    "listed",
    [*("", ",", ".", "[]", "xample", "db.prometheus.example", "prometheus.example:91", "10.0.0.0/8", "fd00::/8", "**")],
)
def test_what_no_proxy_does_not_list_is_asked_through_the_proxy(
    proxy: Server, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("NO_PROXY", listed)
    for url in ("http://prometheus.example:9090", "https://prometheus.example:9090", "http://11.0.0.1:9090"):
        assert proxy_of(url).endswith(f"{proxy.address}/")


@pytest.mark.parametrize("url", ["http://prometheus.example:9090", "https://prometheus.example:9090"])
@pytest.mark.parametrize("status", [403, 407, 502])
def test_an_error_of_a_proxy_names_it_without_its_password(
    capsys: pytest.CaptureFixture[str], proxy: Server, url: str, status: int
) -> None:
    proxy.answer = answers(b"refused by the proxy", status)
    error = complaint(capsys, "--url", url)
    assert f"{url} through the proxy {proxy.address}" in error
    assert f"answers {status}: refused by the proxy" in error or f"Tunnel connection failed: {status}" in error
    assert "secret" not in error


@pytest.mark.parametrize("url", ["http://prometheus.example:9090", "https://prometheus.example:9090"])
@pytest.mark.parametrize("scheme", ["http://", "socks5://", ""])
def test_a_proxy_that_cannot_be_asked_is_named(
    capsys: pytest.CaptureFixture[str],
    proxy: Server,
    monkeypatch: pytest.MonkeyPatch,
    free_port: int,
    url: str,
    scheme: str,
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"{scheme}127.0.0.1:{free_port}")
    error = complaint(capsys, "--url", url)
    assert error.startswith(f"cannot reach {url} through the proxy 127.0.0.1:{free_port}: ")
    assert error.endswith("(set --url or NO_PROXY)")
    assert proxy.asked == []


@pytest.mark.usefixtures("proxy")
def test_an_error_of_this_machine_names_no_proxy(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    server.answer = answers(b"", 403)
    assert complaint(capsys, "--url", f"http://{server.address}") == f"http://{server.address} answers 403: Forbidden"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<!doctype html><title>Log in</title>", f"is not a Prometheus: it answers with a web page {LOGIN}"),
        (200, b"{}", "is not a Prometheus: unexpected answer"),
        (401, b"<html>", f"answers 401: Unauthorized {LOGIN}"),
    ],
)
def test_a_redirect_to_a_login_is_named_without_its_query(
    capsys: pytest.CaptureFixture[str], server: Server, another_server: Server, status: int, body: bytes, why: str
) -> None:
    login = f"http://{another_server.address}/login"
    server.answer = answers(b"", 302, Location=f"{login}?state=secret")
    another_server.answer = answers(body, status)
    error = complaint(capsys, "--url", f"http://{server.address}")
    assert error == f"http://{server.address} redirects to {login}, which {why}"


def test_a_redirect_to_a_server_that_does_not_answer_names_that_server(
    capsys: pytest.CaptureFixture[str], server: Server, free_port: int
) -> None:
    server.answer = answers(b"", 302, Location=f"http://127.0.0.1:{free_port}/login?state=secret")
    error = complaint(capsys, "--url", f"http://{server.address}")
    assert error == f"http://{server.address}: it redirects to http://127.0.0.1:{free_port}/login: Connection refused"


COMPRESSED = gzip.compress(NOTHING, mtime=0)


def chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:], b""))


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (COMPRESSED, {"Content-Encoding": "gzip"}),
        (COMPRESSED, {"Content-Encoding": "GZIP"}),
        (chunked(NOTHING), {"Transfer-Encoding": "chunked"}),
        (chunked(COMPRESSED), {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip"}),
    ],
    ids=["compressed", "in capitals", "chunked", "both"],
)
def test_an_answer_may_be_compressed_or_chunked(
    capsys: pytest.CaptureFixture[str], server: Server, body: bytes, headers: dict[str, str]
) -> None:
    server.answer = answers(body, 200, **headers)
    assert complaint(capsys, "--url", f"http://{server.address}").startswith(f"http://{server.address} has no run")


def test_an_unknown_authority_of_a_certificate_names_the_variable_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = Authority(tmp_path).issue("server", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with served(context) as server:
        url = f"https://{server.address}"
        error = complaint(capsys, "--url", url)
        assert error.startswith(f"cannot reach {url}: ")
        assert error.endswith("(set SSL_CERT_FILE to the certificate of its authority)")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert complaint(capsys, "--url", url).startswith(f"{url} has no run")
