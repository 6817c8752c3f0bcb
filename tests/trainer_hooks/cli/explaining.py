"""`rankscope explain`, run in this process, on the series of exporters with a job of four ranks."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from testing.http_server import answers, http_server

from rankscope.cli import launch

OF_RANK_2 = "GPU-51300000-0000-4000-8000-000000000002"


def series(name: str, value: object, **labels: object) -> str:
    """Return a line with a sample of the run `train`. A time such as `@-60` is 60 seconds before the moment."""
    named = {"run": "train", "job": "rankscope", "instance": "vm:10417", **labels}
    return f"{name}{{{','.join(f'{label}={json.dumps(str(text))}' for label, text in named.items())}}} {value}\n"


def ranks(node: str = "vm", first: int = 0, up: int = 1) -> str:
    """Return four ranks of a node."""
    here = {"instance": f"{node}:10417"}
    return "".join(
        series("rankscope_rank_info", 1, rank=rank, node=node, uuid=f"{OF_RANK_2[:-1]}{rank}", **here)
        + series("rankscope_rank_up", up, rank=rank, **here)
        for rank in range(first, first + 4)
    )


def losses(**ratios: float) -> str:
    """Return the account of a run of 2 hours that is diagnosed, in which the rest of the time is useful."""
    ratios["none"] = 1.0 - sum(ratios.values())
    judged = series("rankscope_run_judged_info", 1, by="vm")
    return judged + "".join(
        series("rankscope_run_lost_ratio", ratio, cause=cause)
        + series("rankscope_run_lost_gpu_seconds_total", 4 * 7200 * ratio, cause=cause) * (cause != "none")
        for cause, ratio in ratios.items()
    )


def finding(summary: str, ratio: float, since: str = "@-720", **labels: str) -> str:
    """Return an open finding, which is that of a throttled rank but for `labels`."""
    place = {"rank": "2", "group": "0-3", "node": "vm", "gpu": "2", "uuid": OF_RANK_2}
    named = {"kind": "straggler", "cause": "throttled", "severity": "warning", **place, **labels}
    texts = {"summary": summary, "evidence": EVIDENCE, "advice": "Check its cooling and power."}
    return (
        series("rankscope_finding_ratio", ratio, **named)
        + series("rankscope_finding_since_timestamp_seconds", since, **named)
        + series("rankscope_finding_info", 1, **named, **texts)
    )


def alert(name: str, **labels: str) -> str:
    """Return a firing alert that is not about a run."""
    return series("ALERTS", 1, alertname=name, alertstate="firing", **{"run": "", **labels})


EVIDENCE = "Its GPU is throttled 98% of the time."
THROTTLED = "Rank 2 (vm, GPU 2) slows down run train by 28%: its GPU is throttled"
LAGS = "".join(series("rankscope_rank_lag_ratio", lag, rank=n) for n, lag in enumerate((0.002, -0.01, 0.012, 0.0)))
HEALTHY = ranks() + losses(transfer=0.06, other=0.03, data_io=0.02, copies=0.01) + LAGS
LAGGING = ranks() + losses(straggler=0.21, transfer=0.1, throttling=0.076, other=0.05) + finding(THROTTLED, 0.28)
STUCK = {"kind": "hang", "cause": "data_wait", "severity": "critical", "rank": "1", "gpu": "1"}
HANGING = LAGGING + finding("Run train hangs: Rank 1 (vm, GPU 1) is stuck in data_wait", 1.0, "@-90", **STUCK)
XID = alert("RankscopeGpuXid", severity="critical", gpu="2", uuid=OF_RANK_2, xid="79")
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
