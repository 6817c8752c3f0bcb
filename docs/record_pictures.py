"""Record the README's pictures from a real job with a slow rank: `python -m docs.record_pictures`.

A job of four ranks trains on simulated GPUs, and one GPU is throttled. The pictures show `rankscope top` on that node
and the notification from Alertmanager. At the end, `rankscope explain` prints its text for docs/lost-time.md.

A command for pictures of the dashboards may follow. It finds the URL of the job's Prometheus in `PROMETHEUS_URL`, the
name of the run in `RUN`, and writes a PNG file for each dashboard, named for its uid, to the directory `PICTURES`.
"""

from __future__ import annotations

import io
import os
import pwd
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text
from testing.job.launch import RANKS
from testing.stack import Stack
from testing.webhook import Notification
from validation.gauntlet import arena
from validation.gauntlet.case import Target
from validation.gauntlet.cases import all_cases

from rankscope.cli import launch
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.simulation.machine import simulated

PICTURES = Path(__file__).parent / "pictures"
NODE, USER, RUN, SLOW_RANK = "node3", "alice", "mine", 2
WIDTH = 110
HEALTHY_FOR, SLOW_FOR = 60.0, 20.0
NOTIFIED_WITHIN = 60.0
# The picture must not load a font from the network.
SVG = re.sub(r"@font-face \{\{.*?\n    \}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


class Node(arena.Arena):
    """A node with a GPU for each rank, and the servers that watch it."""

    def __init__(self, directory: Path, memory: Path) -> None:
        super().__init__(directory, memory, run=RUN)
        self.scenario, self.run_dir = directory / f"{self.exporter.name}.yml", self._run_dir
        self.stack = Stack(directory, [self.exporter])

    def _start(self, started: ExitStack) -> None:
        started.enter_context(self.stack)
        super()._start(started)


def save(name: str, title: str, content: RenderableType) -> None:
    """Write a picture of a terminal with this content."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(content, Text())  # the last line would be cut off
    svg = console.export_svg(title=title, code_format=SVG, unique_id=name)
    text = "\n".join(line.strip() for line in svg.splitlines() if line.strip())
    (PICTURES / f"{name}.svg").write_text(text + "\n", encoding="utf-8")


def save_top(node: Node) -> None:
    """Save the output of `rankscope top`."""
    output = io.StringIO()
    with (
        simulated(str(node.scenario), RunDirectory([node.run_dir])),
        redirect_stdout(output),
        suppress(SystemExit),
    ):
        launch.main(["top", "--once", "--run-dir", str(node.run_dir)])
    save("top", "rankscope top", Text.from_ansi(output.getvalue()))


def save_notification(notification: Notification) -> None:
    """Save the texts of the notification, like those for Slack of deploy/alertmanager/rankscope.tmpl."""
    texts, since = notification.annotations, notification.starts_at[:16].replace("T", " ")
    title = f"[{notification.labels['severity'].upper()}] {texts['summary']}"
    body = f"Since {since} UTC. {texts['description']}"
    links = "Runbook  Prometheus  Silence", "blue underline"
    save("notification", "#gpu-alerts", Padding(Text.assemble((title, "bold"), "\n", body, "\n", links), (0, 1)))


def save_dashboards(command: Sequence[str], prometheus: str) -> None:
    """Run the command that takes pictures of the dashboards."""
    environment = os.environ | {"PROMETHEUS_URL": prometheus, "RUN": RUN, "PICTURES": str(PICTURES)}
    subprocess.run(command, check=True, env=environment)  # noqa: S603 - the caller's command


def main(dashboards: Sequence[str]) -> None:
    """Record all; `dashboards` is the command for pictures of these, or empty."""
    arena.GPUS = RANKS
    os.environ["RANKSCOPE_NODE"] = NODE
    # `rankscope top` shows these names instead of this machine's.
    socket.gethostname = lambda: NODE
    pwd.getpwuid = lambda uid: pwd.struct_passwd((USER, "x", uid, uid, "", "/", "/bin/sh"))
    os.environ |= {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    PICTURES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-pictures-") as directory,
        tempfile.TemporaryDirectory(prefix="rankscope-pictures-", dir="/dev/shm") as memory,
        Node(Path(directory), Path(memory)) as node,
    ):
        time.sleep(HEALTHY_FOR)
        all_cases()["f10_throttling"].inject(node, Target(rank=SLOW_RANK))
        notification = node.stack.notified("RankscopeRankLagging", NOTIFIED_WITHIN, since=node.onset)
        if notification is None:
            sys.exit("no notification arrived")
        save_notification(notification)
        time.sleep(SLOW_FOR)
        save_top(node)
        if dashboards:
            save_dashboards(dashboards, node.stack.prometheus.url)
        explain = ["-m", "rankscope.cli.launch", "explain", f"--url={node.stack.prometheus.url}", f"--run={RUN}"]
        subprocess.run([sys.executable, *explain], check=True)  # noqa: S603 - our own command


if __name__ == "__main__":
    main(sys.argv[1:])
