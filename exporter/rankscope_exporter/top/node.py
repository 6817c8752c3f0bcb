"""The state of this node, read by the same threads as in an exporter, but without its pages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rankscope_exporter.config import parse
from rankscope_exporter.gpu.collector import SampledCollector
from rankscope_exporter.ledger import journal
from rankscope_exporter.ledger.parts import WEEK, Part, culprit_runs, read
from rankscope_exporter.ledger.state_file import STATE_DIR
from rankscope_exporter.node import Node, build_node
from rankscope_exporter.registry import HELP
from rankscope_exporter.report.gpus import GpuReport, report_gpus
from rankscope_exporter.report.runs import CaptureReport, Captures
from rankscope_exporter.report.values import Values

GPU_COLLECTORS = (
    "gpu",
    "load",
    "memory",
    "power",
    "temperature",
    "clocks",
    "pcie",
    "nvlink",
    "processes",
    "allocation",
)
RANK_COLLECTORS = ("alignment", "rank_processes", "network", "findings")


@contextmanager
def watch_node(run_dirs: Sequence[Path]) -> Iterator[Node]:
    """Read the ranks in these directories and the GPUs once a second, until the context ends."""
    settings = replace(parse(HELP, [], {}), run_dirs=tuple(run_dirs), collectors=GPU_COLLECTORS + RANK_COLLECTORS)
    with build_node(settings) as node:
        node.reporter.captures = lambda: captures_of(node)
        yield node


def captures_of(node: Node) -> Captures:
    """Return the captures by this node's exporter, from its journal; none if this user may not read it."""
    scan = node.ranks.scan()
    began: dict[tuple[str, str], tuple[float, str]] = {}
    for rank in scan.ranks if scan else ():
        run = rank.run[0], rank.run[1]
        starts = rank.snapshot.unix(rank.snapshot["started_monotonic"]), str(rank.snapshot.info["node"])
        began[run] = min(starts, began.get(run, starts))
    found: dict[tuple[str, str], list[CaptureReport]] = {}
    with suppress(OSError):
        for entry in journal.read(STATE_DIR):
            run = str(entry.get("run")), str(entry.get("owner"))
            if entry.get("entry") != journal.CAPTURED or entry.get("training") or run not in began:
                continue
            (since, name), path, at = began[run], str(entry["path"]), float(entry["at"])
            if at >= since and Path(path).exists():  # else it is of an earlier run of this name, or removed
                found[run] = [CaptureReport(name, path, at)]
    return found


def gpus_of(node: Node) -> Sequence[GpuReport]:
    """Return the reports of the GPUs."""
    node.sampler.take_snapshot()
    families = [family for one in node.gpus for family in SampledCollector(one, node.sampler.texts).collect()]
    now = time.time()
    gpus, parts = report_gpus(Values(families), node.reporter.look(), now), _history()
    runs = {part.uuid: culprit_runs(part, parts, now - WEEK) for part in parts}
    return [replace(gpu, culprit_runs=runs.get(gpu.uuid, 0)) for gpu in gpus]


def _history() -> Sequence[Part]:
    """Return the history that this node's exporter keeps; none if this user may not read it."""
    with suppress(OSError):
        return [*read(STATE_DIR)]
    return []
