"""A Prometheus with the series of a test file's MOMENTS, and servers that stand in for one."""

from __future__ import annotations

import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from deploy.prometheus.fast import prometheus_config
from testing import servers
from testing.http_server import answers, http_server
from tests.trainer_hooks.cli.explaining import APART, RECORDED, Explain, Server, explain, served


@pytest.fixture(scope="module")
def moments(request: pytest.FixtureRequest) -> dict[str, int]:
    """Return the time of each moment in unix seconds."""
    names = request.module.MOMENTS
    first = int(time.time()) - len(names) * APART
    return {name: first + n * APART for n, name in enumerate(names)}


@pytest.fixture(scope="module")
def prometheus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, moments: dict[str, int]
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("prometheus")
    series = request.module.MOMENTS.items()
    lines = [f"{line} {moments[name]}\n" for name, text in series for line in text.splitlines() if line]
    (directory / "series.txt").write_text("".join(lines) + "# EOF\n")
    backfill = [servers.program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*backfill, directory / "series.txt", directory / "prometheus-data"], check=True)
    server = servers.prometheus(directory, prometheus_config([]))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def explain_at(
    prometheus: str, moments: dict[str, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Explain:
    """Explain one of MOMENTS."""
    monkeypatch.setenv("COLUMNS", "100")  # lines are wrapped at the terminal's width
    return Explain(lambda moment, *flags: explain(capsys, "--url", prometheus, "--at", str(moments[moment]), *flags))


@pytest.fixture
def explain_now(
    prometheus: str, moments: dict[str, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Explain]:
    """Explain it as if the moment were now: only then Prometheus has the texts of the alerts."""
    monkeypatch.setenv("COLUMNS", "100")
    moment = ""

    def then(request: BaseHTTPRequestHandler) -> None:
        path, _, question = request.path.partition("?")
        if path == "/api/v1/rules":
            body = (RECORDED / "rules.json").read_bytes()
        else:
            time = urllib.parse.urlencode({"time": moments[moment]})
            with urllib.request.urlopen(f"{prometheus}{path}?{question}&{time}", timeout=10) as answer:
                body = answer.read()
        answers(body)(request)

    def explain_at(then: str, *flags: str) -> tuple[int, str, str]:
        nonlocal moment
        moment = then
        return explain(capsys, "--url", f"http://127.0.0.1:{port}", *flags)

    with http_server(then) as port:
        yield Explain(explain_at)


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture
def another_server() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture
def proxy(another_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the server to which the environment sends requests."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://user:secret@{another_server.address}/")
    return another_server
