"""The proxy delays scrapes as configured, and is down when the exporter is."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest
from testing.http_server import answers, http_server
from validation.soak.proxy import Proxy


def exporter(request):
    answers(b"up 1\n", 200 if request.path == "/metrics" else 404, **{"Content-Type": "text/plain"})(request)


@pytest.fixture
def proxy():
    with http_server(exporter) as port, Proxy(f"http://127.0.0.1:{port}") as proxy:
        yield proxy


def scraped(proxy, path="/metrics"):
    with urllib.request.urlopen(f"http://{proxy.address}{path}", timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_a_scrape_is_delayed_as_configured(proxy):
    proxy.delay = 0.3
    began = time.monotonic()
    assert scraped(proxy) == ("text/plain", b"up 1\n")
    assert time.monotonic() - began >= 0.3


def test_an_error_of_the_exporter_is_passed_on(proxy):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scraped(proxy, "/nothing")


def test_an_exporter_that_is_down_does_not_answer():
    with Proxy("http://127.0.0.1:9") as proxy, pytest.raises(OSError, match=r"Remote end closed|reset"):
        scraped(proxy)
