"""Measure the effect of a blocked GPU, a lost GPU and an unloaded driver on the other GPUs.

    python -m validation.blocking_device --save

On one machine with eight working simulated GPUs and eight training ranks, the exporter is scraped five times a second.
One after another, a call into the driver about GPU 3 does not return for 60 s; GPU 5 is lost for 20 s and comes back;
and the driver is unloaded for 20 s and comes back. Each GPU has its own busy ratio, so the loss of the others is exact:
the counter's increase between two scrapes is compared with the truth between the last samples that it contains, whose
times the exporter publishes. For the failed GPU itself, the samples still in the driver's ring when it answers again
(20 s) are counted. The rest is not: the exporter invents nothing.
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing import report
from testing.processes import MEBIBYTE, resident_bytes, stat
from testing.simulated_node import HEADERS, Exporter, running
from testing.statistics import percentile

from rankscope_exporter.simulation.scenario import Scenario
from rankscope_exporter.simulation.timeline import State, Timeline

GPUS = 8
START = 15.0  # seconds until the first fault: the exporter starts, and is observed while all GPUs are healthy
EVERY = 0.2  # seconds between the starts of scrapes
BLOCKED, LOST = 3, 5  # GPUs
SHARES = [round(0.3 + 0.1 * gpu, 1) for gpu in range(GPUS)]  # busy ratios in whole percents, as in the driver's ring
LINE = re.compile(r'^(rankscope_gpu_\w+)\{gpu="(\d+)",[^}]*\} (\S+)$', re.M)
UP, BUSY, LAST = "rankscope_gpu_up", "rankscope_gpu_busy_seconds_total", "rankscope_gpu_last_busy_timestamp_seconds"
STAY = re.compile("rankscope_gpu_(up|xid_.*)")  # series of a GPU that is down


@dataclass(frozen=True)
class Fault:
    """A fault of some GPUs, in seconds from the scenario's start."""

    name: str
    gpus: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Seen:
    """The result of one scrape; `at` is its start in seconds from the scenario's start."""

    at: float
    seconds: float
    values: Mapping[str, Mapping[int, float]]
    """UP, BUSY and LAST, by GPU."""
    others: Mapping[int, int]
    """The number of other series by GPU, without those that stay when it is down."""
    has_nan: bool
    threads: int
    resident_bytes: int


def faults(start: float, seconds: float, rest: float) -> list[Fault]:
    """Return three faults in a row with `rest` seconds between them; the last two take a third of `seconds`."""
    blocked = Fault("blocked", (BLOCKED,), start, start + seconds)
    lost = Fault("lost", (LOST,), blocked.end + rest, blocked.end + rest + seconds / 3)
    return [blocked, lost, Fault("unloaded", (*range(GPUS),), lost.end + rest, lost.end + rest + seconds / 3)]


def scenario(planned: Sequence[Fault]) -> Scenario:
    blocked, lost, unloaded = planned
    length = blocked.end - blocked.start
    busy = [State(busy=share) for share in SHARES]
    states = [[(0.0, state)] for state in busy]
    # One call blocks: a reading starts within the first second, and later ones go through.
    blocking = State(busy=SHARES[BLOCKED], blocks={"nvmlDeviceGetTemperature": length})
    states[BLOCKED] += [(blocked.start, blocking), (blocked.start + 2, busy[BLOCKED])]
    states[LOST] += [(lost.start, State(lost=True)), (lost.end, busy[LOST])]
    loads = ((0.0, True), (unloaded.start, False), (unloaded.end, True))
    return Scenario(tuple(Timeline(each) for each in states), follow_ranks=False, driver=loads)


def observe(exporter: Exporter, start_unix: float, until: float) -> Iterator[Seen]:
    """Scrape at a steady interval, as Prometheus does, until `until` seconds after the scenario's start."""
    due = time.time()
    while (began := time.time()) - start_unix < until:
        clock = time.perf_counter()
        body = exporter.scrape(HEADERS)
        seconds = time.perf_counter() - clock
        yield parse(gzip.decompress(body).decode(), began - start_unix, seconds, exporter.pid)
        due += EVERY
        time.sleep(max(0.0, due - time.time()))


def parse(body: str, at: float, seconds: float, pid: int) -> Seen:
    """Return the result of a scrape with this body, with threads and memory of the process."""
    values: dict[str, dict[int, float]] = {UP: {}, BUSY: {}, LAST: {}}
    others: Counter[int] = Counter()
    for name, gpu, value in LINE.findall(body):
        if name in values:
            values[name][int(gpu)] = float(value)
        others[int(gpu)] += not STAY.fullmatch(name)
    has_nan = any(line.endswith(" NaN") for line in body.splitlines())
    threads = sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    return Seen(at, seconds, values, others, has_nan, threads, resident_bytes(pid))


def phases(planned: Sequence[Fault], seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """Return the scrapes before, during and after each fault, by name."""
    marks = [("before", 0.0)]
    for fault in planned:
        marks += [(fault.name, fault.start), (f"after {fault.name}", fault.end)]
    spans = itertools.pairwise([*marks, ("", math.inf)])
    return {name: [s for s in seen if start <= s.at < end] for (name, start), (_, end) in spans}


def phase_row(scrapes: Sequence[Seen]) -> dict[str, Any]:
    """Return the exporter's figures in these scrapes."""
    durations = [scrape.seconds for scrape in scrapes]
    return {
        "scrapes": len(scrapes),
        "scrape_p50_ms": round(1000 * percentile(durations, 0.5), 1),
        "scrape_longest_ms": round(1000 * max(durations), 1),
        "threads": max(scrape.threads for scrape in scrapes),
        "resident_mib": round(max(scrape.resident_bytes for scrape in scrapes) / MEBIBYTE, 1),
    }


def fault_row(fault: Fault, seen: Sequence[Seen], timelines: Sequence[Timeline], start_unix: float) -> dict[str, Any]:
    """Return the figures of a fault, from the scrape before it to the next fault."""
    down = [scrape for scrape in seen if down_in(fault, scrape)]
    back = [scrape for scrape in seen if down and scrape.at > down[-1].at]
    others = [gpu for gpu in range(GPUS) if gpu not in fault.gpus]
    return {
        "gpus": list(fault.gpus),
        "seconds": fault.end - fault.start,
        "down_after_seconds": round(down[0].at - fault.start, 1) if down else None,
        "back_after_seconds": round(back[0].at - fault.end, 1) if back else None,
        "scrapes_while_down": len(down),
        "series_while_down": sum(scrape.others.get(gpu, 0) for scrape in down for gpu in down_in(fault, scrape)),
        "lost_busy_seconds": lost(fault.gpus, seen, timelines, start_unix),
        "others_lost_busy_seconds": lost(others, seen, timelines, start_unix),
        "others_down": sum(scrape.values[UP].get(gpu) != 1 for scrape in seen for gpu in others),
        "decreases": sum(decreases([scrape.values[BUSY].get(gpu) for scrape in seen]) for gpu in range(GPUS)),
    }


def down_in(fault: Fault, scrape: Seen) -> list[int]:
    """Return the fault's GPUs that are down in the scrape."""
    return [gpu for gpu in fault.gpus if scrape.values[UP].get(gpu) == 0]


def lost(gpus: Sequence[int], seen: Sequence[Seen], timelines: Sequence[Timeline], start_unix: float) -> float | None:
    """Return the most busy seconds of one of these GPUs that its counter missed, from the first scrape to the last.

    Negative seconds were invented. Exact to one sampling period: the exporter publishes when a sample came.
    """
    missing = []
    for gpu in gpus:
        known = [(scrape.values[BUSY][gpu], scrape.values[LAST][gpu]) for scrape in seen if gpu in scrape.values[BUSY]]
        if not known:
            continue
        (low, since), (high, until) = known[0], known[-1]
        done = timelines[gpu].seconds(until - start_unix) - timelines[gpu].seconds(since - start_unix)
        missing.append(done.utilized - (high - low))
    return round(max(missing, key=abs), 3) + 0.0 if missing else None  # + 0.0 avoids -0.0


def decreases(values: Sequence[float | None]) -> int:
    """Return how often a counter decreased, without absent values."""
    known = [value for value in values if value is not None]
    return sum(later < earlier for earlier, later in itertools.pairwise(known))


def started(pid: int) -> str:
    """Return the process's start time in the kernel's ticks: another process with the same id has another one."""
    return stat(pid)[19]


def measure(planned: Sequence[Fault], rest: float) -> dict[str, Any]:
    """Run the scenario, and return all figures."""
    simulated = scenario(planned)
    with running(lambda _: simulated, ranks=GPUS, alone=True) as (node, (exporter,)):
        if (late := time.time() - node.start_unix) > planned[0].start - 2:
            raise TimeoutError(f"the exporter took {late:.0f} s to start")
        before = started(exporter.pid)
        seen = list(observe(exporter, node.start_unix, planned[-1].end + rest))
        is_same = started(exporter.pid) == before
    return {
        "restarted": not is_same,
        "scrapes_with_nan": sum(scrape.has_nan for scrape in seen),
        **rows(planned, seen, simulated.timelines, node.start_unix),
    }


def rows(
    planned: Sequence[Fault], seen: Sequence[Seen], timelines: Sequence[Timeline], start_unix: float
) -> dict[str, Any]:
    """Return the figures of each phase and of each fault."""
    found = phases(planned, seen)
    names = list(found)
    around = {
        f: found[names[2 * n]][-1:] + found[names[2 * n + 1]] + found[names[2 * n + 2]] for n, f in enumerate(planned)
    }
    return {
        "phases": {name: phase_row(scrapes) for name, scrapes in found.items()},
        "faults": {fault.name: fault_row(fault, scrapes, timelines, start_unix) for fault, scrapes in around.items()},
    }


def tables(figures: dict[str, Any]) -> list[str]:
    """Return tables of the phases and the faults, and a sentence about the process."""
    head = ("", "scrapes", "scrape P50 (ms)", "longest (ms)", "threads", "resident memory (MiB)")
    phase_rows = [(name, *row.values()) for name, row in figures["phases"].items()]
    shown = {
        "`rankscope_gpu_up` 0, after the start (s)": "down_after_seconds",
        "`rankscope_gpu_up` 1, after the end (s)": "back_after_seconds",
        "scrapes while it was 0": "scrapes_while_down",
        "other series of the GPUs that were down, in all of these scrapes": "series_while_down",
        "busy time of these GPUs not counted (s)": "lost_busy_seconds",
        "busy time of the other GPUs not counted (s)": "others_lost_busy_seconds",
        "scrapes with another GPU down": "others_down",
        "busy counters that decreased": "decreases",
    }
    faults = figures["faults"]
    fault_rows = [
        (text, *("" if row[key] is None else row[key] for row in faults.values())) for text, key in shown.items()
    ]
    fault_head = ("", *(f"{name} {row['seconds']:g} s" for name, row in faults.items()))
    process = "restarted" if figures["restarted"] else "ran all the time"
    remark = f"The exporter {process}; scrapes with a NaN: {figures['scrapes_with_nan']}."
    return [report.table(head, phase_rows), report.table(fault_head, fault_rows), remark]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60, help="seconds of the blocked GPU; other faults take a third"
    )
    parser.add_argument("--rest", type=float, default=15, help="seconds after each fault")
    options = parser.parse_args()
    figures = measure(faults(START, options.seconds, options.rest), options.rest)
    title, bound = "Blocked and lost GPUs", "the other GPUs lose no busy time and are never down"
    packages = ["prometheus-client", "uvicorn"]
    report.Report("blocking_device", title, __doc__, bound, tables(figures), figures, packages).publish(options.save)


if __name__ == "__main__":
    main()
