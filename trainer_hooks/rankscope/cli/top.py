"""Commands of the exporter's package, imported on demand. If a package that they need is missing, they say which."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rankscope.record.writer import default_run_dirs

REQUIRED = ("pynvml", "prometheus_client", "pydantic", "rich")
"""Import names of the packages that `rankscope[top]` installs."""
SOURCE = "rankscope[top] @ git+https://github.com/rankscope/rankscope"


def show(
    run_dirs: Sequence[Path], urls: Sequence[str] = (), headers: Sequence[str] = (), *, once: bool, is_json: bool
) -> int:
    """Show this node, or the nodes of the exporters and analyzers at these URLs. Returns the exit status.

    It is 2 if a package is missing, or if nothing answers at the URLs.
    """
    if not _has_packages("top", REQUIRED):
        return 2
    from rankscope_exporter.top.command import show as follow
    from rankscope_exporter.top.command import show_remote

    if urls:
        return show_remote(urls, headers, once=once, is_json=is_json)
    return follow(run_dirs or default_run_dirs(), once=once, is_json=is_json)


def stacks(urls: Sequence[str], headers: Sequence[str], run: str | None, rank: str | None) -> int:
    """Show where the ranks of a run stand on all nodes. Returns the exit status, 2 if a package is missing."""
    if not _has_packages("stacks --all-nodes", REQUIRED):
        return 2
    from rankscope_exporter.top.stacks import show as show_stacks

    return show_stacks(urls, headers, run, rank)


def explain(run: str | None, owner: str | None, *, with_explained: bool = False) -> bool:
    """Print what is wrong with the runs on this node. Returns False if there is no run or a package is missing."""
    if missing(REQUIRED):
        return False
    from rankscope_exporter.top.explained import explain as explain_runs

    return explain_runs(default_run_dirs(), run, owner, with_explained=with_explained)


def hang(dumps: Path | None, run: str | None, run_dirs: Sequence[Path]) -> int:
    """Print which ranks block a run that hangs. Returns the exit status; needs no other package."""
    from rankscope_exporter.hangs.command import show as show_hang

    return show_hang(dumps, run, run_dirs or default_run_dirs())


def capture(options: argparse.Namespace) -> int:
    """Capture a run on this node into a folder. Returns the exit status; needs no other package."""
    from rankscope_exporter.capture.command import show as show_capture

    return show_capture(options.run, options.directory, options.run_dir or default_run_dirs(), options.stacks)


def report(options: argparse.Namespace) -> int:
    """Print where a job's GPU time went. Returns the exit status; needs no other package."""
    from rankscope.cli.explaining.prometheus import connector
    from rankscope_exporter.job_report.command import ReportRequest
    from rankscope_exporter.job_report.command import show as show_report
    from rankscope_exporter.job_report.page import Prices
    from rankscope_exporter.ledger.state_file import STATE_DIR

    url = options.url or (None if options.run_dir or options.state_dir else os.environ.get("PROMETHEUS_URL"))
    return show_report(
        ReportRequest(
            run=options.run,
            job_id=options.slurm_job,
            owner=options.owner,
            run_dir=options.run_dir,
            state_dir=options.state_dir or (None if url else STATE_DIR),
            url=url,
            by=options.by,
            days=options.days,
            prices=Prices(options.price, options.kwh_price),
            is_json=options.json,
        ),
        connector(options.header),
    )


def check_node(options: argparse.Namespace) -> int:
    """Check the node's GPUs and limits, and print what is wrong. Returns the exit status."""
    if not _has_packages("check-node", ("pynvml", "yaml") if options.simulate else ("pynvml",)):
        return 2
    from rankscope_exporter.node_check.command import CheckRequest
    from rankscope_exporter.node_check.command import show as show_check

    return show_check(
        CheckRequest(
            gpus=options.gpus,
            python=options.python,
            workers=options.workers,
            simulate=options.simulate,
            is_strict=options.strict,
            is_json=options.json,
        )
    )


def history(options: argparse.Namespace) -> int:
    """Print what has happened to this node's GPUs. Returns the exit status; needs no other package."""
    from rankscope_exporter.job_report.node_history import show as show_history
    from rankscope_exporter.ledger.state_file import STATE_DIR

    return show_history(options.state_dir or STATE_DIR, options.days, is_json=options.json)


def _has_packages(command: str, names: Sequence[str]) -> bool:
    if absent := missing(names):
        text = f"rankscope {command}: {', '.join(absent)} missing; install with: pip install '{SOURCE}'"
        print(text, file=sys.stderr)  # noqa: T201 - a command
    return not absent


def missing(names: Sequence[str], find: Callable[[str], object] = importlib.util.find_spec) -> Sequence[str]:
    """Return the packages that cannot be imported."""
    return [name for name in names if find(name) is None]
