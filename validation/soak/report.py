"""The results of a soak, and the body of its page."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from testing.report import Check, table, verdict
from testing.report import Line as Observation
from validation.soak import checks, plan

Observed = Mapping[str, Sequence[Observation]]
WORDS = {plan.SLOW: "scrapes are slow", plan.FULL: "the run directory is full", plan.CLOCK: "the clock jumps"}

ABOUT = """\
Two real jobs of four ranks, one over gloo and one on the asynchronous device, each train on a node with its own
exporter. One Prometheus with the rules for a scrape interval of 15 s and one Alertmanager monitor them, both configured
as shipped. Each job gets one fault after the other, while exporters, Prometheus and Alertmanager are killed, restarted,
stopped and given slow scrapes, a full directory and a wrong clock. Jobs, exporters, servers and signals are real; the
GPUs are simulated, the full run directory is a small tmpfs, and only the exporter process sees the wrong clock."""


def by_kind(lines: Iterable[Observation]) -> Observed:
    """Return the observations by kind, in their order."""
    found: dict[str, list[Observation]] = defaultdict(list)
    for line in lines:
        found[line["kind"]].append(line)
    return found


def judge(observed: Observed) -> tuple[list[checks.InjectedFault], list[Check]]:
    """Return the faults with the messages about them, and the checks."""
    (begun,), (history,) = observed["begin"], observed["history"]
    chaos = observed["chaos"]
    faults = checks.injected_faults(observed["fault"], observed["healed"], observed["end"][0]["time"])
    unexplained = checks.assign(faults, observed["notification"])
    return faults, [
        checks.none_lost(faults),
        checks.none_notified_twice(faults),
        checks.none_resolved_early(faults),
        checks.no_false_alarms(unexplained, chaos),
        checks.alerts_survive(history, chaos, faults),
        checks.counters_only_grow(history, chaos, begun["instances"]),
        checks.a_full_directory_stops_no_job(observed["full at start"]),
        checks.memory_is_flat(observed["memory"]),
        checks.nothing_failed(observed["error"]),
    ]


def body(observed: Observed, faults: Sequence[checks.InjectedFault], found: Sequence[Check]) -> list[str]:
    """Return the paragraphs and tables of the page."""
    (planned,), (begun,) = observed["plan"], observed["begin"]
    messages = len(checks.messages(observed["notification"]))
    counts = f"{len(faults)} faults, {len(observed['chaos'])} disturbances, {messages}"
    load = _range(one["load"][0] for one in observed["load"])
    pressure = _range(one["pressure"] for one in observed["load"] if one["pressure"] is not None)
    left_out = "; ".join(sorted({f"{one['what']}: {one['reason']}" for one in observed["left out"]}))
    return [
        f"{planned['seconds'] / 60:g} minutes, seed {planned['seed']}, {counts} messages. Load {load}; part of the "
        f"time in which a process waited for CPU time {pressure}. Left out: {left_out or 'nothing'}.",
        verdict(found),
        "Seconds are from the onset to the receiver, including Alertmanager's wait.",
        table(
            ["minute", "run", "fault", "alert", "detected after", "messages"],
            [_row(fault, begun["time"]) for fault in faults],
        ),
        table(["disturbed", "how often", "while an alert fired"], _disturbed(observed["chaos"])),
    ]


def _row(fault: checks.InjectedFault, began: float) -> tuple[object, ...]:
    first = fault.messages[0].alerts[0] if fault.messages else {"alertname": "**NONE**"}
    where = "".join(f", {name} {value}" for name, value in fault.place.items())
    alert = f"{first['alertname']} {first.get('cause', '')}".strip()
    minute = f"{(fault.onset - began) / 60:.0f}"
    return minute, fault.run, f"{fault.title}{where}", alert, f"{fault.seconds} s", len(fault.messages)


def _disturbed(chaos: Iterable[Observation]) -> list[tuple[object, ...]]:
    counts: Counter[str] = Counter()
    firing: Counter[str] = Counter()
    for one in chaos:
        name = WORDS.get(one["act"], f"{one['target']}: {one['act']}")
        counts[name] += 1
        firing[name] += bool(one["firing"])
    return [(name, counts[name], firing[name]) for name in sorted(counts)]


def _range(values: Iterable[float]) -> str:
    found = list(values)
    if not found:
        return "unknown"
    return f"{min(found):.2f} to {max(found):.2f}, median {statistics.median(found):.2f}"
