"""Capturing: reads every source of a request in a bounded time, and writes the folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankscope.cli.explaining.fetching import within
from rankscope.cli.printable import printable
from rankscope.cli.stack_groups import describe_difference, group_stacks
from rankscope.record.process_stat import exists, is_running
from rankscope_exporter.capture import folder, headline
from rankscope_exporter.capture.disk import describe_disks
from rankscope_exporter.capture.folder import Folder
from rankscope_exporter.capture.kernel_log import read_kernel_log
from rankscope_exporter.capture.machine import describe_machine
from rankscope_exporter.capture.page import Outcome, page, phase
from rankscope_exporter.capture.ports import describe_ports
from rankscope_exporter.capture.ranks import CapturedRank, read_ranks
from rankscope_exporter.capture.ras import read_ras
from rankscope_exporter.capture.request import Request
from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.capture.torch_dumps import Place, copy_dumps, locate_dumps
from rankscope_exporter.hangs.records import GLOO, explain_ranks

VERSION = 1
DUMPS = "dumps"
SOURCE_SECONDS = 25.0
"""The longest time of one source. What hangs for longer, as on a dead mount, is left behind."""
TOTAL_SECONDS = 90.0
"""The longest time of all sources."""
LINE_LIMIT = 4096
Source = tuple[str, str, Callable[[], str]]
"""The name of the file, its title on the page, and the function that returns its text."""


def capture(
    request: Request, directory: int, stacks_by: str, after_stacks: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write the folder into the open directory, and return its figures. Raise FolderError."""
    began, at = time.monotonic(), time.time()
    with Folder(directory, folder.folder_name(request.title, at, request.reason), request.owner) as draft:
        request = request.until(began)
        ranks = read_ranks(request, stacks_by)
        after_stacks()
        sentence = headline.sentence(request, ranks)
        places = _places(request, ranks)
        with draft.files(DUMPS) as dumps:
            outcomes = [*_read(_sources(request, ranks, places, dumps), began + TOTAL_SECONDS)]
        draft.write(folder.REPORT, page(request, sentence, at, ranks, outcomes))
        sources = {}
        for one in outcomes:
            written = draft.write(one.name, one.text) if one.text else 0
            sources[one.name] = {"bytes": written, "seconds": round(one.seconds, 3), "outcome": one.reason or "ok"}
        figures = {
            "version": VERSION,
            "run": request.label,
            "owner": str(request.owner),
            "node": request.node,
            "reason": request.reason,
            "at": at,
            "sentence": sentence,
            "ranks": len(ranks),
            "owner_may_read": draft.is_shared,
            "seconds": round(time.monotonic() - began, 3),
            "cpu_seconds": round(sum(os.times()[:4]), 3),
            "bytes": draft.size,
            "sources": sources,
        }
        draft.write(folder.FIGURES, json.dumps(figures, indent=1) + "\n")
        return {**figures, "name": draft.publish(), "dumps": [place._asdict() for place in places]}


def _places(request: Request, ranks: Sequence[CapturedRank]) -> Sequence[Place]:
    """Return where torch writes dumps: by the processes, and for those that have ended by an earlier capture."""
    living = {
        place.rank: place for place in locate_dumps({one.number: one.process.pid for one in ranks if one.process})
    }
    return [*({one["rank"]: Place(**one) for one in request.dumps} | living).values()]


def _sources(request: Request, ranks: Sequence[CapturedRank], places: Sequence[Place], dumps: Path) -> Iterator[Source]:
    began = min((one.recorded.snapshot["started_unix"] for one in ranks), default=time.time())
    yield "verdict.txt", "Verdict", lambda: _verdict(request)
    yield "ranks.txt", "Ranks", lambda: "".join(map(_rank, ranks))
    yield "collectives.txt", "Collectives", lambda: _collectives(ranks)
    yield "stacks.txt", "Python stacks", lambda: _stacks(ranks)
    yield "processes.txt", "Processes and threads", lambda: _processes(ranks)
    yield "torch_dumps.txt", "Torch's flight recorder", lambda: _of_nccl(ranks, lambda: _dumps(ranks, places, dumps))
    yield "ras.txt", "NCCL's RAS", lambda: _of_nccl(ranks, lambda: _of_processes(ranks, read_ras))
    yield "gpus.txt", "GPUs", lambda: _gpus(request)
    yield "kernel.txt", "Kernel log", lambda: _of_processes(ranks, partial(read_kernel_log, began, owner=request.owner))
    yield "ports.txt", "Network ports", describe_ports
    yield "machine.txt", "Memory, load and limits", lambda: _of_processes(ranks, describe_machine)
    yield "disks.txt", "Disks", lambda: _of_processes(ranks, describe_disks)


def _read(sources: Iterator[Source], deadline: float) -> Iterator[Outcome]:
    """Read the sources one after the other, each on a thread, which does not delay the next one if it hangs."""
    for name, title, read in sources:
        began, found, reason = time.monotonic(), "", "empty"
        try:
            found = within(max(0.0, min(SOURCE_SECONDS, deadline - began)), read).rstrip("\n")
        except UnavailableError as error:
            reason = str(error)
        except TimeoutError:
            reason = "no answer in time"
        except Exception as error:  # a source of hostile content must not cost the others
            reason = f"failed: {error!r}"
        text = "".join(f"{printable(line, LINE_LIMIT)}\n" for line in found.split("\n")) if found else ""
        yield Outcome(name, title, text, "" if text else reason, time.monotonic() - began)


def _dumps(ranks: Sequence[CapturedRank], places: Sequence[Place], folder: Path) -> str:
    if not places and not any(one.process or one.recorded.snapshot.alive for one in ranks):
        raise UnavailableError("no process is left, and no earlier capture has found where torch writes dumps")
    return copy_dumps(places, folder)


def _of_processes(ranks: Sequence[CapturedRank], read: Callable[[Collection[int]], str]) -> str:
    """Return what a source reads of the run's processes. Raise UnavailableError if an ID is another's by now."""
    processes = [one.process for one in ranks if one.process]
    text = read([one.pid for one in processes])
    if any(is_running(one.pid, one.start) is False and exists(one.pid) for one in processes):
        raise UnavailableError("a process of the run ended, and another one has its ID")
    return text


def _of_nccl(ranks: Sequence[CapturedRank], read: Callable[[], str]) -> str:
    """Return what a source reads of NCCL. Raise UnavailableError if the run uses gloo."""
    if ranks and all(one.recorded.snapshot.info.get("backend") == GLOO for one in ranks):
        raise UnavailableError("the run uses gloo, and not NCCL")
    return read()


def _gpus(request: Request) -> str:
    if not request.gpus:
        raise UnavailableError(request.no_gpus)
    return request.gpus


def _verdict(request: Request) -> str:
    found = request.found
    lines = [f"{found.sentence}.", found.evidence, found.advice] if found else []
    if found and not found.is_alert:
        lines.append("Not yet an alert: it has not lasted long enough.")
    lines += [one for one in request.others if not found or one != found.sentence]
    if not lines:
        raise UnavailableError("no diagnosis of this run is known here")
    return "\n".join(filter(None, lines))


def _rank(one: CapturedRank) -> str:
    snapshot = one.recorded.snapshot
    issued = ", ".join(f"{number:.0f} of ranks {group}" for group, number in snapshot.issued.items())
    operation = f", in {snapshot.open_operation} of ranks {snapshot.open_group}" if snapshot.open_operation else ""
    saved = snapshot.unix_field("checkpoint_last_unix") if snapshot["checkpoints"] else None
    checkpoint = "none" if saved is None else f"{snapshot.unix(snapshot.read_monotonic) - saved:.0f} s ago"
    return (
        f"{one.wanted.place}, pid {snapshot.lock_pid or 'unknown'}: {phase(one)}{operation}\n"
        f"  steps {snapshot['steps']:.0f}, backward passes {snapshot['micro_steps']:.0f}, "
        f"last progress {snapshot.read_monotonic - snapshot.last_progress:.1f} s ago, last checkpoint {checkpoint}\n"
        f"  issued collectives: {issued or 'none'}\n"
    )


def _collectives(ranks: Sequence[CapturedRank]) -> str:
    living = [one.recorded for one in ranks if one.recorded.snapshot.alive]
    if not living:
        raise UnavailableError("no rank is alive")
    ended = {
        one.number: one.recorded.snapshot.exit_reason or "unknown" for one in ranks if not one.recorded.snapshot.alive
    }
    return "\n".join(explain_ranks(living, ended, "The captures on their nodes show them."))


def _stacks(ranks: Sequence[CapturedRank]) -> str:
    texts = {one.number: one.stacks for one in ranks if one.stacks}
    absent = {one.number: one.no_stacks for one in ranks if not one.stacks}
    operations = {one.number: one.recorded.snapshot.open_operation for one in ranks}
    if not texts:
        raise UnavailableError("; ".join(dict.fromkeys(one.no_stacks for one in ranks)) or "no rank is left")
    groups = group_stacks(texts, absent, {rank: name for rank, name in operations.items() if name})
    parts = [describe_difference(groups), ""]
    for group in groups:
        parts += [group.title, *group.lines, ""]
    for one in ranks:
        parts += [f"=== {one.wanted.place}", one.stacks or f"no stacks: {one.no_stacks}", ""]
    return "\n".join(parts)


def _processes(ranks: Sequence[CapturedRank]) -> str:
    parts = []
    for one in ranks:
        parts.append(f"=== {one.wanted.place}, pid {one.process.pid if one.process else 'unknown'}")
        parts += one.process.lines() if one.process else [one.hidden]
        parts += [f"threads that wait for the GIL: {sorted(one.gil_waiters)}"] if one.gil_waiters else []
        parts.append("")
    if not parts:
        raise UnavailableError("no rank is left")
    return "\n".join(parts)
