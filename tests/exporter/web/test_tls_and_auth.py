"""TLS, client certificates and basic auth on a real server, and their renewal without a restart."""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
from testing.authority import Authority
from tests.exporter.web.conftest import basic

Serve = Callable[[Path | None], int]
Write = Callable[..., Path]

PAGES = ["/", "/metrics", "/-/healthy", "/-/ready", "/nothing-here"]
SERVER = {"cert_file": "server.pem", "key_file": "server.key"}  # next to the configuration file


def hashed(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


def client(authority: Authority, certificate: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.directory / "ca.pem"))
    if certificate:
        context.load_cert_chain(authority.directory / f"{certificate}.pem", authority.directory / f"{certificate}.key")
    return context


def get(
    port: int, path: str = "/-/healthy", context: ssl.SSLContext | None = None, **headers: str
) -> http.client.HTTPResponse:
    host = "localhost" if context else "127.0.0.1"
    if context:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, context=context, timeout=10)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer
    finally:
        connection.close()


def test_without_a_configuration_there_is_no_tls_and_no_password(serve: Serve) -> None:
    assert get(serve(None)).status == 200


def test_pages_are_served_over_tls(serve: Serve, authority: Authority, web_config: Write) -> None:
    port = serve(web_config(tls_server_config=SERVER))
    assert get(port, "/metrics", client(authority)).status == 200
    with pytest.raises((http.client.HTTPException, OSError)):
        get(port)  # without TLS


def test_a_client_below_the_minimum_version_is_rejected(serve: Serve, authority: Authority, web_config: Write) -> None:
    port = serve(web_config(tls_server_config={**SERVER, "min_version": "TLS13"}))
    old = client(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        get(port, context=old)
    assert get(port, context=client(authority)).status == 200


def test_only_listed_cipher_suites_are_accepted(serve: Serve, authority: Authority, web_config: Write) -> None:
    suites = ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"]
    port = serve(web_config(tls_server_config={**SERVER, "max_version": "TLS12", "cipher_suites": suites}))
    other = client(authority)
    other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    with pytest.raises(ssl.SSLError):
        get(port, context=other)
    assert get(port, context=client(authority)).status == 200


def test_simultaneous_clients_of_one_address_are_all_answered(
    serve: Serve, authority: Authority, web_config: Write
) -> None:
    # A request may wait for its turn while its handshake ends.
    port, context = serve(web_config(tls_server_config=SERVER)), client(authority)
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(lambda _: get(port, context=context).status, range(400))
        assert set(answers) == {200}


def test_only_a_client_certificate_of_the_authority_is_accepted(
    serve: Serve, authority: Authority, web_config: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**SERVER, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    port = serve(web_config(tls_server_config=settings))
    authority.issue("prometheus", "prometheus")
    other_authority = Authority(tmp_path_factory.mktemp("other"))
    forged = client(authority)
    forged.load_cert_chain(*other_authority.issue("prometheus", "prometheus"))
    for rejected in (client(authority), forged):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(port, context=rejected)
    assert get(port, context=client(authority, "prometheus")).status == 200


@pytest.mark.parametrize(
    "name", ["prometheus", "10.0.0.7", "2001:db8::7", "::1", "spiffe://cluster.local/ns/m/sa/p", "p@example.net"]
)
def test_only_clients_in_client_allowed_sans_are_accepted(
    serve: Serve, authority: Authority, web_config: Write, name: str
) -> None:
    settings = {**SERVER, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    port = serve(web_config(tls_server_config={**settings, "client_allowed_sans": [name]}))
    authority.issue("prometheus", name, "prometheus.monitoring")
    authority.issue("intern", "intern", "2001:db8::8", "10.0.0.8")
    assert get(port, context=client(authority, "prometheus")).status == 200
    with pytest.raises((http.client.HTTPException, OSError)):
        get(port, context=client(authority, "intern"))


def test_a_renewed_certificate_is_used_without_a_restart(serve: Serve, authority: Authority, web_config: Write) -> None:
    port = serve(web_config(tls_server_config=SERVER))
    before = ssl.get_server_certificate(("127.0.0.1", port))
    authority.issue("server", "localhost")
    after = ssl.get_server_certificate(("127.0.0.1", port))
    assert before != after
    assert after.split() == (authority.directory / "server.pem").read_text().split()


def test_an_invalid_renewal_keeps_the_old_certificate(
    serve: Serve, authority: Authority, web_config: Write, caplog: pytest.LogCaptureFixture
) -> None:
    port = serve(web_config(tls_server_config=SERVER))
    (authority.directory / "server.key").write_text("half a key")
    assert get(port, context=client(authority)).status == 200
    assert get(port, context=client(authority)).status == 200
    assert [record.levelname for record in caplog.records if "keeping" in record.message] == ["ERROR"]
    authority.issue("server", "localhost")
    assert get(port, context=client(authority)).status == 200


def test_tls_settings_that_need_a_restart_are_not_applied(
    serve: Serve, authority: Authority, web_config: Write, caplog: pytest.LogCaptureFixture
) -> None:
    port = serve(web_config(tls_server_config=SERVER))
    web_config(tls_server_config={**SERVER, "min_version": "TLS13"})
    assert get(port, context=client(authority)).status == 200
    assert "changed settings need a restart" in caplog.text
    web_config(basic_auth_users={"alice": hashed("right")})  # without TLS
    assert get(port, context=client(authority)).status == 200


def test_a_renewed_client_authority_is_used_without_a_restart(
    serve: Serve, authority: Authority, web_config: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**SERVER, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    successor_client = client(authority)
    port = serve(web_config(tls_server_config=settings))
    successor = Authority(tmp_path_factory.mktemp("successor"))
    successor_client.load_cert_chain(*successor.issue("prometheus", "prometheus"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        get(port, context=successor_client)
    (successor.directory / "ca.pem").rename(authority.directory / "ca.pem")
    assert get(port, context=successor_client).status == 200


@pytest.mark.parametrize("path", PAGES)
def test_every_page_requires_the_password(serve: Serve, web_config: Write, path: str) -> None:
    port = serve(web_config(basic_auth_users={"alice": hashed("right")}))
    answer = get(port, path)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic")
    assert get(port, path, **basic("alice", "right")).status == (404 if path == "/nothing-here" else 200)


@pytest.mark.parametrize(
    "header",
    [
        basic("alice", "wrong")["Authorization"],
        basic("alice", "")["Authorization"],
        basic("mallory", "right")["Authorization"],
        basic("", "right")["Authorization"],
        basic("alice", "right\0")["Authorization"],
        basic("alice", "right")["Authorization"].replace("Basic", "Bearer"),
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"alice").decode(),
        "Basic " + base64.b64encode(b"\xff\xfe:right").decode(),
    ],
)
def test_invalid_credentials_are_rejected(serve: Serve, web_config: Write, header: str) -> None:
    port = serve(web_config(basic_auth_users={"alice": hashed("right")}))
    assert get(port, **basic("alice", "right")).status == 200  # now remembered for alice and this password
    assert get(port, Authorization=header).status == 401


def test_changed_users_take_effect_at_once(serve: Serve, web_config: Write) -> None:
    port = serve(web_config(basic_auth_users={"alice": hashed("one")}))
    assert get(port, **basic("alice", "one")).status == 200
    web_config(basic_auth_users={"alice": hashed("two"), "bob": hashed("three")})
    assert get(port, **basic("alice", "one")).status == 401
    assert get(port, **basic("alice", "two")).status == 200
    assert get(port, **basic("bob", "three")).status == 200
    web_config(basic_auth_users={"bob": hashed("three")})
    assert get(port, **basic("alice", "two")).status == 401


def test_configured_headers_are_in_every_response(serve: Serve, web_config: Write) -> None:
    headers = {"X-Frame-Options": "deny", "Strict-Transport-Security": "max-age=60"}
    port = serve(web_config(http_server_config={"headers": headers}, basic_auth_users={"alice": hashed("right")}))
    for answer in (get(port), get(port, **basic("alice", "right"))):
        assert answer.headers["X-Frame-Options"] == "deny"
        assert answer.headers["Strict-Transport-Security"] == "max-age=60"
