"""Attack: clients that ask for a large page and do not read it, or ask for it all at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from tests.attacks.http.clients import Large, ask, everything, reset, scrape, server, status

LARGE = 16 * 1024 * 1024
CLIENTS = 30


def test_pages_that_nobody_reads_are_bounded_and_a_scrape_gets_its_own() -> None:
    with server(Large(LARGE)) as (port, _), ExitStack() as held:
        silent = []
        for _ in range(CLIENTS):
            silent.append(held.enter_context(ask(port)))
            silent[-1].recv(1)  # its page has been made
        assert scrape(port) == 200
        with ask(port, Connection="close") as reader:
            assert len(everything(reader)) > LARGE
        assert len(reset(silent)) >= CLIENTS - 5  # four such pages are 64 MiB


def test_a_client_that_does_not_read_never_costs_another_address_its_page() -> None:
    with server(Large(LARGE)) as (port, other), ExitStack() as held, ask(other, host="::1", Connection="close") as slow:
        slow.recv(1)
        for _ in range(CLIENTS):
            held.enter_context(silent := ask(port))
            silent.recv(1)
        assert len(everything(slow)) > LARGE


def test_a_client_that_does_not_read_is_cut_off_in_the_end() -> None:
    with server(Large(LARGE)) as (port, _), ask(port) as silent:
        assert reset([silent], seconds=60)


def test_clients_that_ask_together_get_one_page() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(60)

    page = Large(before=wait)
    with server(page) as (port, _), ExitStack() as stack:
        crowd = [stack.enter_context(ask(port, "/-/healthy")) for _ in range(40)]
        for client in crowd:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        first = stack.enter_context(ask(port, Connection="close"))
        assert begun.wait(60)  # the server is busy with it; what the others send now it finds together
        for client in crowd:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        go_on.set()
        answers = [everything(client) for client in (first, *crowd)]
    assert {status(answer) for answer in answers} == {200}
    assert page.looks <= 3
