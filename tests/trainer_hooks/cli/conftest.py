"""A Prometheus with the series of a test file's MOMENTS, and servers that stand in for one."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from deploy.prometheus.fast import prometheus_config
from testing import servers
from tests.trainer_hooks.cli.explaining import APART, Explain, Server, explain, served


@pytest.fixture(scope="module")
def moments(request: pytest.FixtureRequest) -> dict[str, int]:
    """Return the time of each moment in unix seconds."""
    names = request.module.MOMENTS
    first = int(time.time()) - len(names) * APART
    return {name: first + n * APART for n, name in enumerate(names)}


def since(text: str, moment: int) -> str:
    """Return the series with the times such as `@-60` before the moment in unix seconds."""
    return re.sub(r"@-(\d+)", lambda ago: str(moment - int(ago[1])), text)


@pytest.fixture(scope="module")
def prometheus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, moments: dict[str, int]
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("prometheus")
    series = request.module.MOMENTS.items()
    lines = [f"{line} {moments[name]}\n" for name, text in series for line in since(text, moments[name]).splitlines()]
    (directory / "series.txt").write_text("".join(lines) + "# EOF\n")
    backfill = [servers.program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*backfill, directory / "series.txt", directory / "prometheus-data"], check=True)
    with servers.prometheus(directory, prometheus_config([])) as server:
        yield server.url


@pytest.fixture
def explain_at(
    prometheus: str, moments: dict[str, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Explain:
    """Explain one of MOMENTS."""
    monkeypatch.setenv("COLUMNS", "100")  # lines are wrapped at the terminal's width
    return Explain(lambda moment, *flags: explain(capsys, "--url", prometheus, "--at", str(moments[moment]), *flags))


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
