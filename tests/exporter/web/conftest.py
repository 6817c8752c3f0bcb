"""Fixtures: a certificate authority, a web configuration file, a real server, and the passwords checked by bcrypt."""

from __future__ import annotations

import base64
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
from starlette.types import ASGIApp
from testing.authority import Authority

from rankscope_exporter.daemon import server_configuration
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.config_file import WebConfigFile

READY: Any = SimpleNamespace(is_ready=True)  # the part of the sampler that the pages use


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that has issued the certificate `server` for localhost."""
    authority = Authority(tmp_path)
    authority.issue("server", "localhost")
    return authority


@pytest.fixture
def web_config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the file from its sections, atomically as a deployment does."""

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
    """Return the Authorization header with these credentials."""
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list of passwords that bcrypt has checked."""
    passwords: list[bytes] = []
    check = bcrypt.checkpw

    def record(password: bytes, hashed: bytes) -> bool:
        passwords.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", record)
    return passwords
