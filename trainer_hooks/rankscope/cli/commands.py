"""The commands of `rankscope` except `run`, with what argparse has read. Most are in the exporter's package.

What they need is imported when they run. If a package is missing, they say which. Each returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from rankscope.record.writer import default_run_dirs

REQUIRED = ("pynvml", "prometheus_client", "pydantic", "rich")
"""Import names of the packages that `rankscope[top]` installs."""
SOURCE = "rankscope[top] @ git+https://github.com/rankscope/rankscope"


def top(options: argparse.Namespace) -> int:
    """Show this node, or the nodes of the exporters and analyzers at these URLs."""
    if not _has_packages("top", REQUIRED):
        return 2
    from rankscope_exporter.top.command import show, show_remote

    if options.url:
        return show_remote(options.url, options.header, once=options.once, is_json=options.json)
    return show(options.run_dir or default_run_dirs(), once=options.once, is_json=options.json)


def stacks(options: argparse.Namespace) -> int:
    """Show where the ranks on this machine stand, or with URLs the ranks of a run on all nodes."""
    if not options.url:
        from rankscope.cli.show_stacks import show

        return show(options.run, options.rank, options.run_dir)
    if not _has_packages("stacks --all-nodes", REQUIRED):
        return 2
    from rankscope_exporter.top.stacks import show as show_remote

    return show_remote(options.url, options.header, options.run, options.rank)


def explain(options: argparse.Namespace) -> int:
    """Explain why a run is slow. Unless a Prometheus was named, this node's runs are explained if none answers."""
    from rankscope.cli.explaining.command import show
    from rankscope.cli.explaining.prometheus import connector

    url = options.url or os.environ.get("PROMETHEUS_URL")
    return show(
        *(url or "http://localhost:9090", options.run, options.cluster, options.owner, options.at, options.json),
        connect=connector(options.header),
        explain_node=lambda: not (url or options.cluster) and _explain_node(options),
    )


def _explain_node(options: argparse.Namespace) -> bool:
    """Print what is wrong with the runs on this node. Returns False if there is no run or a package is missing."""
    if missing(REQUIRED):
        return False
    from rankscope_exporter.top.explained import explain as explain_runs

    return explain_runs(default_run_dirs(), options.run, options.owner, with_explained=options.all)


def hang(options: argparse.Namespace) -> int:
    """Print which ranks block a run that hangs."""
    from rankscope_exporter.hangs.command import show

    return show(options.dumps, options.run, options.run_dir or default_run_dirs())


def capture(options: argparse.Namespace) -> int:
    """Capture a run on this node into a folder."""
    from rankscope_exporter.capture.command import show

    return show(options.run, options.directory, options.run_dir or default_run_dirs(), options.stacks)


def report(options: argparse.Namespace) -> int:
    """Print where a job's GPU time went."""
    from rankscope.cli.explaining.prometheus import connector
    from rankscope_exporter.job_report.command import ReportRequest, show
    from rankscope_exporter.job_report.page import Prices
    from rankscope_exporter.ledger.state_file import STATE_DIR

    url = options.url or (None if options.run_dir or options.state_dir else os.environ.get("PROMETHEUS_URL"))
    return show(
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
    """Check the node's GPUs and limits, and print what is wrong."""
    if not _has_packages("check-node", ("pynvml", "yaml") if options.simulate else ("pynvml",)):
        return 2
    from rankscope_exporter.node_check.command import CheckRequest, show

    return show(
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
    """Print what has happened to this node's GPUs."""
    from rankscope_exporter.job_report.node_history import show
    from rankscope_exporter.ledger.state_file import STATE_DIR

    return show(options.state_dir or STATE_DIR, options.days, is_json=options.json)


def _has_packages(command: str, names: Sequence[str]) -> bool:
    if absent := missing(names):
        text = f"rankscope {command}: {', '.join(absent)} missing; install with: pip install '{SOURCE}'"
        print(text, file=sys.stderr)  # noqa: T201 - a command
    return not absent


def missing(names: Sequence[str], find: Callable[[str], object] = importlib.util.find_spec) -> Sequence[str]:
    """Return the packages that cannot be imported."""
    return [name for name in names if find(name) is None]
