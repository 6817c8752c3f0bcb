"""Attack: the status page and other pages, requested in a loop from several addresses, to keep the CPU busy."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket

import bcrypt
import pytest
from tests.attacks.http.clients import Large, read_all, request, scrape, server, status

from rankscope_exporter.web import limits

HOSTS = ("127.0.0.1", "::1")
EACH = 10  # connections of each address


@contextmanager
def waiting(ports: Sequence[int], path: str) -> Iterator[list[socket]]:
    """Request a page on many connections of two addresses."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(request(port, path, host=host, Connection="close"))
            for _ in range(EACH)
            for port, host in zip(ports, HOSTS, strict=True)
        ]


def test_the_status_page_is_rendered_once_for_clients_that_request_it_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SLOW_PAGE_INTERVAL", 3600.0)
    collector = Large()
    with server(collector) as ports:
        assert scrape(ports[0], "/") == 200
        with waiting(ports, "/") as connections:
            assert [scrape(ports[0]) for _ in range(5)] == [200] * 5
            assert select.select(connections, [], [], 0.5)[0] == []
        assert collector.reads == 6


@pytest.mark.parametrize("path", ["/", "/-/healthy", "/-/ready", "/none", "/api/v1/facts", "/api/v1/facts?after=0"])
def test_other_pages_are_answered_one_after_another_and_scrapes_at_once(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(limits, "REQUEST_INTERVAL", 3600.0)
    with server(Large()) as ports:
        assert scrape(ports[0], "/-/healthy") == 200
        with waiting(ports, path) as connections:
            assert [scrape(ports[0]) for _ in range(5)] == [200] * 5
            assert select.select(connections, [], [], 0.5)[0] == []


def test_requests_without_a_password_are_refused_one_after_another(
    monkeypatch: pytest.MonkeyPatch, web_config: Callable[..., Path]
) -> None:
    monkeypatch.setattr(limits, "REQUEST_INTERVAL", 3600.0)
    users = {"prometheus": bcrypt.hashpw(b"a password", bcrypt.gensalt(4)).decode()}
    with server(Large(), web_config=web_config(basic_auth_users=users)) as ports:
        assert scrape(ports[0], "/") == 401
        with waiting(ports, "/") as connections:
            assert scrape(ports[0]) == 401
            assert select.select(connections, [], [], 0.5)[0] == []


@pytest.mark.parametrize("path", ["/", "/-/healthy", "/-/ready", "/api/v1/facts?after=-inf"])
def test_all_clients_get_the_page(path: str) -> None:
    with server(Large()) as ports:
        assert scrape(ports[0], path) == 200
        with waiting(ports, path) as connections:
            assert [status(read_all(connection)) for connection in connections] == [200] * 2 * EACH
