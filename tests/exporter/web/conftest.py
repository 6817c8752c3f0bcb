"""A certificate authority, a web configuration file, a real server behind it, and what bcrypt is asked."""

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

READY: Any = SimpleNamespace(is_ready=True)  # all that is asked of a sampler here


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
