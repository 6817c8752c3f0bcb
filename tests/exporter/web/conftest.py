"""A certificate authority, a web configuration file, a real server behind it, and what bcrypt is asked."""

from __future__ import annotations

import base64
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import pytest
import uvicorn
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.types import ASGIApp

from rankscope_exporter.daemon import server_configuration
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.config_file import WebConfigFile

READY: Any = SimpleNamespace(is_ready=True)  # all that is asked of a sampler here
DAY = datetime.timedelta(days=1)


class Authority:
    """Makes certificates, and itself is `ca.pem` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Rankscope test authority")
        certificate = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        (directory / "ca.pem").write_bytes(self._signed(certificate))

    def issue(
        self, name: str, *alternatives: str, encrypted: bool = False, ends_in: datetime.timedelta = DAY
    ) -> tuple[Path, Path]:
        """Write NAME.pem and NAME.key, for the DNS names `alternatives`; replaces those that are there."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(alternative) for alternative in alternatives])
        certificate = self._builder(_name(name), key, ends_in).add_extension(names, False)
        how: Any = serialization.NoEncryption()
        if encrypted:
            how = serialization.BestAvailableEncryption(b"secret")
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        paths = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        paths[0].write_bytes(self._signed(certificate))
        paths[1].write_bytes(key.private_bytes(pem, pkcs8, how))
        return paths

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: datetime.timedelta = DAY
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - DAY).not_valid_after(now + ends_in)

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority that has issued `server` for localhost."""
    made = Authority(tmp_path)
    made.issue("server", "localhost")
    return made


@pytest.fixture
def web_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file from its sections, at once as a deployment does: a reader never sees half of it."""

    def write(**sections: Any) -> Path:
        temporary, path = tmp_path / "web.yml.new", tmp_path / "web.yml"
        temporary.write_text(yaml.safe_dump(sections))
        return temporary.rename(path)

    return write


@contextmanager
def running(app: ASGIApp, web_config: Path | None, *listeners: socket.socket) -> Iterator[None]:
    """Run the exporter's server in a thread."""
    server = uvicorn.Server(server_configuration(app, WebConfigFile(web_config) if web_config else None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [*listeners]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Path | None], int]]:
    """Return a function that starts the exporter's server with a web configuration; it returns the port."""
    with ExitStack() as servers:

        def start(path: Path | None) -> int:
            listener = servers.enter_context(socket.create_server(("127.0.0.1", 0)))
            servers.enter_context(running(create_app(Scrape([]), READY), path, listener))
            return int(listener.getsockname()[1])

        yield start


def basic(user: str, password: str) -> dict[str, str]:
    """Return the header with these credentials."""
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The passwords that bcrypt was asked about."""
    asked: list[bytes] = []
    check = bcrypt.checkpw

    def counting(password: bytes, hashed: bytes) -> bool:
        asked.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counting)
    return asked
