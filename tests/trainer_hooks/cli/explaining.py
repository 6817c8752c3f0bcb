"""`rankscope explain`, run in this process, on recorded faults of a job with four ranks.

`explained/` has the fast rules' series at one moment each (Prometheus' /federate), and the alerts of /api/v1/rules.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from testing.http_server import answers, http_server

from rankscope.cli import launch

RECORDED = Path(__file__).parent / "explained"
HEALTHY, LAGGING, HANGING = (
    (RECORDED / f"{name}.txt").read_text() for name in ("healthy", "rank_zero_lags", "rank_hangs")
)
RAW = "\n".join(line for line in HEALTHY.splitlines() if line.startswith(("rankscope_rank_info", "up")))
WITHOUT_ALERTS = "\n".join(line for line in LAGGING.splitlines() if not line.startswith("ALERTS")) + "\n"
OF_RANK_2 = "GPU-51300000-0000-4000-8000-000000000002"
XID = 'ALERTS{alertname="RankscopeGpuXid",alertstate="firing",severity="critical",gpu="%s",uuid="%s",xid="79"} 1\n'
APART = 1200  # seconds between moments; Prometheus looks back for 300
NOTHING = b'{"status":"success","data":{"resultType":"vector","result":[]}}'


class Server:
    """A server with the same answer to everything, which keeps the requests' paths and headers."""

    def __init__(self) -> None:
        self.answer = answers(NOTHING)
        self.asked: list[tuple[str, Message]] = []
        self.address = ""

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((request.path.partition("?")[0], request.headers))
        self.answer(request)


@contextmanager
def served(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Yield a running server."""
    server = Server()
    with http_server(server, context) as port:
        server.address = f"127.0.0.1:{port}"
        yield server


def explain(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        launch.main(["explain", *flags])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def complaint(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the line of the error, without the command's name."""
    code, out, err = explain(capsys, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable()
    return err.removeprefix("rankscope explain: ").rstrip()


@dataclass(frozen=True)
class Explain:
    """Run `rankscope explain` for one of a test file's MOMENTS."""

    run: Callable[..., tuple[int, str, str]]

    def lines(self, moment: str, *flags: str) -> list[str]:
        """Return the output's lines."""
        status, out, _ = self.run(moment, *flags)
        assert status == 0
        return out.splitlines()

    def text(self, moment: str, *flags: str) -> str:
        """Return the output without line breaks."""
        return " ".join(" ".join(self.lines(moment, *flags)).split())

    def answer(self, moment: str, *flags: str) -> dict[str, Any]:
        """Return the answer of --json, which is one line."""
        (line,) = self.lines(moment, "--json", *flags)
        found: dict[str, Any] = json.loads(line)
        return found

    def error(self, moment: str, *flags: str) -> str:
        """Return the line of the error."""
        status, out, err = self.run(moment, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err.rstrip()
