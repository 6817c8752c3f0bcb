"""Check the hook with real W&B, MLflow and TensorBoard: the runs that it finds, their losses and their closing figures.

    python -m validation.trackers

Each case is a training script that logs to a tracker as users do: offline, to a directory, or to a server on this
machine. The record must name the run and have counted the losses, the tracker's own files or server must have the
closing figures, and the script must end as it does without the hook.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from testing import report
from testing.records import record_in

from rankscope.record.text import is_link, without_credentials

PACKAGES = ("wandb", "mlflow-skinny", "tensorboard", "lightning", "torch")
TIMEOUT = 120  # seconds a case
TRAIN = """
import os, sys, time, torch
{setup}
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    {log}
{end}
"""
SUMMARY = re.compile(r"30 steps in [\d.]+ s after [\d.]+ s of startup")


class Case(NamedTuple):
    """A script: code before, in and after its steps, and the expected results. `{server}` is a server's address."""

    name: str
    tracker: str
    setup: str
    log: str
    end: str = ""
    url: str = ""  # of the run, without its id
    closes: Callable[[Path, str], bool] = lambda _directory, _id: True
    hangs: bool = False  # the server does not answer the closing figures


def in_wandb(directory: Path, run_id: str) -> bool:
    """Return whether the offline run's log has the closing line."""
    (log,) = directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    return bool(SUMMARY.search(log.read_bytes().decode(errors="replace")))


def in_mlruns(directory: Path, run_id: str) -> bool:
    """Return whether the run's directory has the closing line."""
    (tag,) = directory.glob(f"mlruns/*/{run_id}/tags/rankscope.summary")
    return bool(SUMMARY.search(tag.read_text()))


def on_server(directory: Path, run_id: str) -> bool:
    """Return whether the server received the closing line."""
    tags = json.loads((directory / "tags.json").read_text())
    return bool(SUMMARY.search(tags[run_id]["rankscope.summary"]))


WANDB = 'import wandb; run = wandb.init(project="p", mode="offline"{more})'
MLFLOW = 'import mlflow; mlflow.set_tracking_uri("{uri}"); mlflow.start_run()'
LOG_WANDB, LOG_MLFLOW = 'run.log({"loss": step})', 'mlflow.log_metric("loss", step)'
NEW_RUN = WANDB.replace("{more}", ', reinit="create_new"')
CASES = (
    Case("W&B, ended by the interpreter", "wandb", WANDB.replace("{more}", ""), LOG_WANDB, closes=in_wandb),
    Case("W&B, ended by finish()", "wandb", WANDB.replace("{more}", ""), LOG_WANDB, "run.finish()", closes=in_wandb),
    Case(
        "W&B, ended by a with block",
        "wandb",
        WANDB.replace("{more}", ""),
        LOG_WANDB,
        "run.__exit__(None, None, None)",
        closes=in_wandb,
    ),
    Case("W&B, ended by a status", "wandb", WANDB.replace("{more}", ""), LOG_WANDB, "sys.exit(3)", closes=in_wandb),
    Case("W&B, not the global run", "wandb", NEW_RUN, LOG_WANDB, closes=in_wandb),
    Case("MLflow, a directory", "mlflow", MLFLOW.replace("{uri}", "file:mlruns"), LOG_MLFLOW, closes=in_mlruns),
    Case(
        "MLflow, ended by end_run()",
        "mlflow",
        MLFLOW.replace("{uri}", "file:mlruns"),
        LOG_MLFLOW,
        "mlflow.end_run()",
        closes=in_mlruns,
    ),
    Case(
        "MLflow, a server with a password",
        "mlflow",
        MLFLOW.replace("{uri}", "http://user:secret@{server}"),
        LOG_MLFLOW,
        url="http://{server}/#/experiments/0/runs/",
        closes=on_server,
    ),
    Case(
        "MLflow, a server that stops answering",
        "mlflow",
        MLFLOW.replace("{uri}", "http://{server}"),
        LOG_MLFLOW,
        "mlflow.end_run()",
        url="http://{server}/#/experiments/0/runs/",
        hangs=True,
    ),
    Case(
        "MLflow, Lightning's logger",
        "mlflow",
        'from lightning.pytorch.loggers import MLFlowLogger; logger = MLFlowLogger(tracking_uri="file:mlruns")',
        'logger.log_metrics({"loss": step}, step)',
        closes=in_mlruns,
    ),
    Case(
        "TensorBoard",
        "tensorboard",
        'from torch.utils.tensorboard import SummaryWriter; writer = SummaryWriter("logs/a")',
        'writer.add_scalar("loss", step, step)',
    ),
)


@contextmanager
def mlflow_server(directory: Path, hangs: bool) -> Iterator[str]:
    """Answer MLflow's client, and write the tags to `tags.json`. If it hangs, do not answer about the hook's tags."""
    tags: dict[str, dict[str, str]] = {}
    ended = Event()

    def answer(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if path.endswith("/set-tag"):
            if hangs and body["key"].startswith("rankscope."):
                ended.wait()
            tags.setdefault(body["run_id"], {})[body["key"]] = body["value"]
            (directory / "tags.json").write_text(json.dumps(tags))
        info = {"run_id": "7f", "run_uuid": "7f", "experiment_id": "0", "status": "RUNNING"}
        return {"run": {"info": info, "data": {}}, "run_info": info}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            text = json.dumps(answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PATCH = do_POST  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Log no requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        ended.set()
        server.shutdown()


def run(case: Case, directory: Path, server: str, with_hook: bool) -> subprocess.CompletedProcess[str]:
    code = TRAIN.format(setup=case.setup, log=case.log, end=case.end).replace("{server}", server)
    hook = {"RANKSCOPE": "1", "RANKSCOPE_RUN_DIR": str(directory / "run"), "RANKSCOPE_TRACKER_SUMMARY": "1"}
    trackers = {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet"}
    environment = {**os.environ, **trackers, **(hook if with_hook else {"RANKSCOPE": "0"})}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )


def judge(case: Case) -> list[report.Check]:
    """Run the script with and without the hook, and return the checks."""
    with tempfile.TemporaryDirectory() as without, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with mlflow_server(Path(without), hangs=False) as server:
            plain = run(case, Path(without), server, with_hook=False)
        with mlflow_server(directory, case.hangs) as server:
            hooked = run(case, directory, server, with_hook=True)
        record = record_in(directory / "run")
        info, values = record.info, record["logged_values"]
        identifier, url = (info[f"tracker_{what}"].get(case.tracker, "") for what in ("ids", "urls"))
        expected = case.url.replace("{server}", server) + identifier if case.url else ""
        ends = f"exit status {hooked.returncode}, {plain.returncode} without the hook"
        return [
            report.Check(f"{case.name}: the run", bool(identifier) and url == expected, f"`{identifier}` {url}"),
            report.Check(f"{case.name}: its end", hooked.returncode == plain.returncode, ends),
            report.Check(f"{case.name}: the loss", values > 20.0, f"seen in {values:.0f} of 30 steps"),
            report.Check(f"{case.name}: the closing figures", case.closes(directory, identifier), case.tracker),
            report.Check(f"{case.name}: the hook", info["probes_disabled"] == [], str(info["probes_disabled"])),
        ]


def online_run() -> report.Check:
    """Check that the page of an online run is a link: W&B's settings make its URL."""
    import wandb

    settings = wandb.Settings(entity="a team", project="my project (2)", run_id="5sdy7lvo")
    url = without_credentials(settings.run_url)
    return report.Check("W&B, online: the page", is_link(url), url)


def main() -> int:
    """Print a table of the checks. Return 1 if one does not hold."""
    checks = [online_run()] + [check for case in CASES for check in judge(case)]
    print(", ".join(map(report.installed, PACKAGES)) + "\n\n" + report.verdict(checks))
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
