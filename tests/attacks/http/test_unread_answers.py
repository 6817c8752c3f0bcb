"""Attack: clients that request a large page and do not read it, or all request it at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from tests.attacks.http.clients import Large, find_reset, read_all, request, scrape, server, status

from rankscope_exporter.web import limits, protocol

LARGE = 16 * 1024 * 1024
"""Bytes of a page: more than the kernel buffers."""
CLIENTS = 30


@pytest.fixture(autouse=True)
def page_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_BYTES", 4 * LARGE)


def test_unread_pages_are_limited_and_a_scrape_gets_its_page() -> None:
    with server(Large(LARGE)) as (port, _), ExitStack() as opened:
        silent = []
        for _ in range(CLIENTS):
            silent.append(opened.enter_context(request(port)))
            silent[-1].recv(1)  # its page was rendered
        assert scrape(port) == 200
        with request(port, Connection="close") as reader:
            assert len(read_all(reader)) > LARGE
        assert len(find_reset(silent)) >= CLIENTS - 5  # four such pages are 64 MiB


def test_unread_pages_of_one_address_do_not_affect_another() -> None:
    with server(Large(LARGE)) as (port, other), ExitStack() as opened:
        slow = opened.enter_context(request(other, host="::1", Connection="close"))
        slow.recv(1)
        for _ in range(CLIENTS):
            opened.enter_context(silent := request(port))
            silent.recv(1)
        assert len(read_all(slow)) > LARGE


def test_a_client_that_does_not_read_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol.SECONDS, protocol.RESPONDING, 2.0)
    with server(Large(LARGE)) as (port, _), request(port) as silent:
        assert find_reset([silent], seconds=60)


def test_simultaneous_requests_share_one_page() -> None:
    begun, may_finish = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_finish.wait(60)

    page = Large(before=wait)
    with server(page) as (port, _), ExitStack() as stack:
        clients = [stack.enter_context(request(port, "/-/healthy")) for _ in range(40)]
        for client in clients:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        first = stack.enter_context(request(port, Connection="close"))
        assert begun.wait(60)  # the server is busy and will find the following requests together
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        may_finish.set()
        responses = [read_all(client) for client in (first, *clients)]
    assert {status(response) for response in responses} == {200}
    assert page.reads <= 3
