"""The status page's script, in Chromium: refreshes, and what the page looks like when its exporter does not answer."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from testing import browser as chromium
from testing.browser import Browser, Tab
from testing.exporter_process import exporter_process
from testing.http_server import answers, http_server
from testing.page_states import render, state
from testing.waiting import eventually

from rankscope_exporter.web.status_assets import POLICY

pytestmark = pytest.mark.skipif(chromium.program() is None, reason=chromium.MISSING)
LOOK = """({
  stale: document.querySelector("#stale").hidden ? "" : document.querySelector("#stale").textContent,
  title: document.title,
  dimmed: getComputedStyle(document.querySelector("main")).filter != "none",
  before: getComputedStyle(document.querySelector(".verdict"), "::before").content,
  verdict: document.querySelector(".verdict").textContent,
  heard: document.querySelector("#heard").textContent,
})"""


class Exporter:
    """A server whose page and status a test changes."""

    def __init__(self, page: str) -> None:
        self.page, self.status = page, 200

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY}
        answers(self.page.encode(), self.status, **headers)(request)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: render(state(name, tmp_path_factory.mktemp("ranks"))) for name in ("healthy", "straggler", "hang")}


@contextmanager
def shown(browser: Browser, page: str) -> Iterator[tuple[Exporter, Tab]]:
    exporter = Exporter(page)
    with http_server(exporter.answer) as port:
        yield exporter, browser.open(f"http://127.0.0.1:{port}/")


def look(tab: Tab) -> dict[str, Any]:
    """Return what a user sees, after a refresh."""
    tab.run("new Promise(done=>{const wait=()=>busy?setTimeout(wait,20):repeat().then(done);wait()})")
    return dict(tab.run(LOOK))


def test_a_page_whose_exporter_has_ended_is_grey_and_says_since_when(browser: Browser, pages: dict[str, str]) -> None:
    with shown(browser, pages["healthy"]) as (_, tab):
        assert look(tab) == {**look(tab), "stale": "", "dimmed": False, "before": "none"}
    eventually(lambda: look(tab)["stale"])  # a connection that Chromium has opened before may still be answered
    seen = look(tab)
    assert seen["stale"].startswith("Rankscope does not answer. What follows is from ")
    assert seen["title"] == "No answer · No problem · node-a · Rankscope exporter"
    assert seen["dimmed"]
    assert seen["before"] == '"Last known:"'


def test_a_page_whose_exporter_answers_an_error_looks_lost_until_it_answers_again(
    browser: Browser, pages: dict[str, str]
) -> None:
    with shown(browser, pages["healthy"]) as (exporter, tab):
        exporter.status = 503
        seen = look(tab)
        assert seen["stale"].startswith("Rankscope answers 503. ")
        assert seen["dimmed"]
        exporter.status = 200
        seen = look(tab)
        assert (seen["stale"], seen["dimmed"], seen["before"]) == ("", False, "none")
        assert seen["title"] == "No problem · node-a · Rankscope exporter"


def test_another_servers_page_is_not_taken_for_the_exporters(browser: Browser, pages: dict[str, str]) -> None:
    with shown(browser, pages["healthy"]) as (exporter, tab):
        exporter.page = "<h1>Sign in</h1>"
        assert look(tab)["stale"].startswith("Rankscope answers with another page. ")


def test_a_page_whose_exporter_is_stopped_looks_lost(browser: Browser, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with exporter_process(port, "--simulate=1", f"--run-dir={run_dir}", "--node=node-a") as process:
        tab = browser.open(f"http://127.0.0.1:{port}/")
        assert look(tab)["stale"] == ""
        process.send_signal(signal.SIGSTOP)
        try:
            seen = look(tab)
        finally:
            process.send_signal(signal.SIGCONT)
        assert seen["stale"].startswith("Rankscope does not answer. ")
        assert seen["title"].startswith("No answer · ")
        assert seen["dimmed"]


def test_a_refresh_shows_the_new_verdict_and_has_it_read_aloud_once(browser: Browser, pages: dict[str, str]) -> None:
    with shown(browser, pages["healthy"]) as (exporter, tab):
        assert look(tab)["heard"] == ""
        exporter.page = pages["hang"]
        seen = look(tab)
        assert "Run r hangs: Rank 2" in seen["verdict"]
        assert seen["heard"] == "Critical: Run r hangs: Rank 2 (node-a) is stuck in data_wait"
        assert seen["title"] == "1 problem · node-a · Rankscope exporter"
        tab.run("document.querySelector('#heard').textContent=''")
        exporter.page = pages["hang"].replace("for 5.2 min", "for 5.3 min")
        seen = look(tab)
        assert "for 5.3 min" in seen["verdict"]
        assert seen["heard"] == ""


def test_a_refresh_keeps_selection_focus_and_scroll_position(browser: Browser, pages: dict[str, str]) -> None:
    with shown(browser, pages["healthy"]) as (exporter, tab):
        tab.show(700, 300)
        look(tab)
        tab.run("""
          const cell=[...document.querySelectorAll("#gpus td")].find(one=>one.textContent=="run r, rank 2");
          const table=document.querySelector("#gpus .scroll");
          getSelection().selectAllChildren(cell);table.focus();table.scrollLeft=40;scrollTo(0,120);0""")
        exporter.page = pages["straggler"]
        assert "slows down run r" in look(tab)["verdict"]
        assert tab.run("getSelection().toString()") == "run r, rank 2"
        assert tab.run("document.activeElement.className") == "scroll"
        assert tab.run("document.querySelector('#gpus .scroll').scrollLeft") == 40
        assert tab.run("scrollY") >= 120


def test_a_run_that_begins_keeps_the_rows_of_the_others(browser: Browser, pages: dict[str, str]) -> None:
    with shown(browser, pages["healthy"]) as (exporter, tab):
        tab.run("document.querySelector('#run-r-0').dataset.seen=document.querySelector('#run-r-0 td').mark=1;0")
        other = pages["healthy"].partition("<section")[2].partition('<section id="run-r-0">')
        new = '<section id="run-a-0"><h2>a</h2></section><section id="run-r-0">'
        exporter.page = f"{pages['healthy'].partition('<section')[0]}<section{other[0]}{new}{other[2]}"
        look(tab)
        assert tab.run("[...document.querySelectorAll('main>section')].map(one=>one.id)") == [
            "",
            "run-a-0",
            "run-r-0",
            "gpus",
        ]
        assert tab.run("document.querySelector('#run-r-0 td').mark") == 1


@pytest.mark.parametrize("name", ["healthy", "straggler", "hang"])
def test_a_narrow_window_has_no_horizontal_scroll_bar_and_the_policy_blocks_nothing(
    browser: Browser, pages: dict[str, str], name: str
) -> None:
    with shown(browser, pages[name]) as (_, tab):
        tab.run("document.addEventListener('securitypolicyviolation',one=>window.blocked=one.violatedDirective);0")
        tab.show(400)
        assert look(tab)["stale"] == ""
        assert tab.run("document.documentElement.scrollWidth") <= 400
        assert tab.run("window.blocked||''") == ""
        assert tab.run("getComputedStyle(document.querySelector('.p-forward')).fill") != "rgb(0, 0, 0)"
