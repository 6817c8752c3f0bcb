"""A certificate that expires while the server uses it."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from testing.authority import Authority
from tests.attacks.http.clients import connect

from rankscope_exporter.web.config_file import WebConfigFile

SERVER = {"cert_file": "server.pem", "key_file": "server.key"}
HOUR = datetime.timedelta(hours=1)


def handshake(port: int, authority: Authority) -> str:
    """Return a client's error about the server's certificate; empty if it is valid."""
    context = ssl.create_default_context(cafile=str(authority.directory / "ca.pem"))
    try:
        with connect(port) as raw, context.wrap_socket(raw, server_hostname="localhost"):
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_an_expired_certificate_is_logged_once_and_a_renewed_one_is_used(
    serve: Callable[[Path], int],
    authority: Authority,
    web_config: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority.issue("server", "localhost", ends_in=-HOUR)
    port = serve(web_config(tls_server_config=SERVER))
    assert {handshake(port, authority) for _ in range(5)} == {"certificate has expired"}
    (line,) = errors(caplog)
    assert "server.pem expired at " in line
    authority.issue("server", "localhost")
    assert handshake(port, authority) == ""
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("version", ["TLS12", "TLS13"])
def test_a_certificate_that_expires_while_in_use_is_logged(
    authority: Authority, web_config: Callable[..., Path], caplog: pytest.LogCaptureFixture, version: str
) -> None:
    clients = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem", "max_version": version}
    now = [datetime.datetime.now().timestamp()]
    file = WebConfigFile(web_config(tls_server_config={**SERVER, **clients}), clock=lambda: now[0])
    file.current()
    assert errors(caplog) == []
    now[0] += 2 * 86_400
    for _ in range(3):
        file.current()
    assert len(errors(caplog)) == 1
