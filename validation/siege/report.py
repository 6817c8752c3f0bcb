"""The figures of a siege, what had to hold, and the page of it, out of what was observed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from validation.siege.figures import Blocks, Phase, blocks, difference, percentile
from validation.siege.scraper import Scraped
from validation.siege.target import RANKS, RUN, VICTIM

QUIET, SIEGE, BURN, AGAIN = "quiet", "siege", "burn", "quiet again"
LONGEST_SCRAPE = 0.050  # seconds, of 99 of 100
MOST_MEMORY = 150e6  # bytes
Figures = dict[str, Any]

HEAD = """# A node under siege

A real job of two ranks (DDP over gloo; each step sleeps 45 ms, as a device would take), a real exporter with a
password and a real Prometheus with the fast rules; and on the same machine another user who makes every attack of
`tests/attacks` that can be made on a node, all at once. Addresses are 192.0.2.0/24 in a network of its own, in which
nothing but this runs: 127.0.0.0/8 counts as one client, and on a node an attacker has another address than Prometheus.
Each attacker has one of its own, the scraper too, and Prometheus the node's. The job, the exporter and the scraper are
sessions of their own, as a scheduler's job and a service are control groups of their own on a node: where the kernel
groups by session (`sched_autogroup_enabled`), it divides the processors among those and not among all threads.

Phases take turns: *quiet*, *siege*, *burn*, *quiet again*. In *burn* as many processes take as much processor time as
the attackers did and touch nothing of Rankscope's: what the victim's steps lose there they lose to any program. Each
scrape of the scraper has a new connection; its latency is from `connect` to the last byte of the page.
"""
LEFT_OUT = """Not in it: attacks on one command or one start of a job (`tests/attacks/cli`, `tests/attacks/job`: a
hostile environment, names that are taken before a rank comes), on TLS, which is off here (a begun handshake is
refused as no HTTP), and those that need more than one uid (a range of subordinate ids).
"""


@dataclass
class Observed:
    """All that was seen."""

    command: str
    minutes: float
    machine: dict[str, Any]
    phases: list[Phase] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    """When each ended (unix time), and its seconds."""
    scrapes: list[Scraped] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Those that fired: labels, and since when."""
    missed: dict[str, int] = field(default_factory=dict)
    """By rank of the victim's: pages that Prometheus has got and that did not show it living."""
    failed: int = 0
    """Scrapes of Prometheus."""
    peak: int = 0
    """Bytes of the exporter, by the kernel."""
    resident: list[int] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    attackers: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def summary(observed: Observed) -> Figures:
    """All that the page says."""
    steps = {name: _steps(observed, name) for name in (QUIET, SIEGE, BURN, AGAIN)}
    figures = {
        "command": observed.command,
        "minutes": observed.minutes,
        **observed.machine,
        "load": [round(value, 2) for value in _range(observed.load)],
        "phases": [_phase(observed, name, steps[name]) for name in steps],
        "differences_ms": {
            "quiet again - quiet (A/A)": _milliseconds(steps[QUIET], steps[AGAIN]),
            "siege - quiet": _milliseconds(_both(steps), steps[SIEGE]),
            "burn - quiet": _milliseconds(_both(steps), steps[BURN]),
            "siege - burn": _milliseconds(steps[BURN], steps[SIEGE]),
        },
        "peak_bytes": observed.peak,
        "resident_bytes": _range(observed.resident),
        "alerts": observed.alerts,
        "attackers": _attackers(observed),
    }
    return figures | {"checks": _checks(observed, figures)}


def is_about_victim(labels: dict[str, str]) -> bool:
    """Whether an alert says something of the victim's run, or that the exporter is down; neither is true."""
    if labels["alertname"] == "RankscopeExporterDown":
        return True
    return labels.get("owner") == str(VICTIM) if labels.get("owner") else labels.get("run") == RUN


def _checks(observed: Observed, figures: Figures) -> list[Figures]:
    (siege,) = (phase for phase in figures["phases"] if phase["phase"] == SIEGE)
    late = siege["p99_ms"]
    found = f"{_late(late)}; of Prometheus's {observed.failed} failed"
    absent = sum(len(one.ranks) < RANKS for one in observed.scrapes if not one.error)
    missed = sum(observed.missed.values())
    false = Counter(
        f"{alert['labels']['alertname']} ({alert['phase']})"
        for alert in observed.alerts
        if is_about_victim(alert["labels"])
    )
    slower, control = figures["differences_ms"]["siege - quiet"], figures["differences_ms"]["quiet again - quiet (A/A)"]
    idle = [one["attack"] for one in figures["attackers"] if not one["seen"]]
    return [
        _check("99 of 100 scrapes within 50 ms", late <= LONGEST_SCRAPE * 1000, found),
        _check("the exporter within 150 MB", observed.peak <= MOST_MEMORY, f"{observed.peak / 1e6:.1f} MB at the most"),
        _check(
            "both ranks of the victim on every page",
            not absent and not missed,
            f"{absent} of the scraper's {len(observed.scrapes)} without one, {missed} of Prometheus's",
        ),
        _check("no false alert", not false, ", ".join(f"{count} x {name}" for name, count in false.items()) or "none"),
        _check(
            "steps no longer than the A/A control's interval explains",
            slower[1] <= max(abs(control[1]), abs(control[2])),
            f"{_words(slower)}, control {_words(control)}",
        ),
        _check("every attack was made", bool(figures["attackers"]) and not idle, ", ".join(idle) or "yes"),
    ]


def _check(what: str, holds: bool, found: str) -> Figures:
    return {"check": what, "holds": holds, "found": found}


def _late(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if math.isfinite(milliseconds) else "no page"


def _phase(observed: Observed, name: str, steps: Sequence[Blocks]) -> Figures:
    phases = [phase for phase in observed.phases if phase.name == name]
    seconds = sum(phase.ended - phase.began for phase in phases)
    scrapes = [one for one in observed.scrapes if any(phase.has(one.at) for phase in phases)]
    times = [math.inf if one.error else one.seconds * 1000 for one in scrapes]  # no page: as late as can be
    medians = [block for of_round in steps for block in of_round]
    return {
        "phase": name,
        "seconds": round(seconds),
        "scrapes": len(scrapes),
        "failed": Counter(one.error for one in scrapes if one.error),
        **{f"p{share}_ms": percentile(times, share / 100) for share in (50, 99)},
        "max_ms": max(times, default=math.nan),
        "connect_max_ms": max((one.connected * 1000 for one in scrapes), default=math.nan),
        "page_bytes": max((one.size for one in scrapes), default=0),
        "exporter_processor": round(sum(phase.processor for phase in phases) / seconds, 3) if seconds else math.nan,
        "step_ms": statistics.median(medians) * 1000 if medians else math.nan,
    }


def _steps(observed: Observed, name: str) -> list[Blocks]:
    return [blocks(phase, observed.steps) for phase in observed.phases if phase.name == name]


def _both(steps: dict[str, list[Blocks]]) -> list[Blocks]:
    return [early + late for early, late in zip(steps[QUIET], steps[AGAIN], strict=True)]


def _milliseconds(before: Sequence[Blocks], after: Sequence[Blocks]) -> list[float]:
    return [round(value * 1000, 3) for value in difference(before, after)]


def _attackers(observed: Observed) -> list[Figures]:
    found: dict[str, Figures] = {}
    for name, report in observed.attackers:
        one = found.setdefault(name, {"attack": name, "processor": 0.0, "seconds": 0.0, "seen": Counter()})
        one["processor"] += report["processor"]
        one["seconds"] += report["seconds"]
        one["seen"].update(report["seen"])
    return [*found.values()]


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)] if values else []


def _words(value: Sequence[float]) -> str:
    return "{:+.2f} ms [{:+.2f}, {:+.2f}]".format(*value)


def page(figures: Figures) -> str:
    low, middle, high = figures["load"]
    burned = sum(one["processor"] for one in figures["attackers"]) / max(
        1.0, *(one["seconds"] for one in figures["attackers"])
    )
    return "\n".join(
        [
            HEAD,
            f"{figures['minutes']:g} minutes of siege in {figures['rounds']} rounds, on {figures['cores']} cores, "
            f"Python {figures['python']}, `sched_autogroup_enabled` {figures['groups']}, "
            f"load {low:.1f} to {high:.1f}, median {middle:.1f}.",
            f"The attackers took {burned:.2f} processors in all; *CPU* is what the exporter took of one.",
            "",
            *_table(["check", "holds", "found"], [_verdict(check) for check in figures["checks"]]),
            "",
            *_table(
                [
                    "phase",
                    "s",
                    "scrapes",
                    "failed",
                    "P50",
                    "P99",
                    "max (ms)",
                    "page (kB)",
                    "CPU",
                    "step (ms)",
                ],
                [_row(phase) for phase in figures["phases"]],
            ),
            "",
            "How much longer the victim's median step is, with its 95 % interval (a bootstrap of blocks of 5 s):",
            "",
            *_table(["", "a step"], [[name, _words(value)] for name, value in figures["differences_ms"].items()]),
            "",
            *_table(["attack", "CPU", "what became of it"], [_attacker(one) for one in figures["attackers"]]),
            "",
            "Alerts that fired, those of the attacker's own forgeries and of simulated GPUs included: "
            + (", ".join(_told(figures)) or "none")
            + ".",
            "",
            LEFT_OUT,
            f"Made by `{figures['command']}`.",
            "",
        ]
    )


def _verdict(check: Figures) -> list[str]:
    return [check["check"], "yes" if check["holds"] else "NO", check["found"]]


def _row(phase: Figures) -> list[str]:
    failed = ", ".join(f"{count} x {error}" for error, count in phase["failed"].items()) or "0"
    times = [f"{phase[name]:.1f}" for name in ("p50_ms", "p99_ms", "max_ms")]
    size, processor = f"{phase['page_bytes'] / 1000:.0f}", f"{phase['exporter_processor']:.0%}"
    counts = [phase["phase"], str(phase["seconds"]), str(phase["scrapes"]), failed]
    return [*counts, *times, size, processor, f"{phase['step_ms']:.2f}"]


def _attacker(one: Figures) -> list[str]:
    seen = ", ".join(f"{count} {what}" for what, count in sorted(one["seen"].items()))
    return [one["attack"], f"{one['processor'] / max(one['seconds'], 1.0):.0%}", seen]


def _told(figures: Figures) -> list[str]:
    names = Counter(
        alert["labels"]["alertname"] + (" of the victim" if is_about_victim(alert["labels"]) else "")
        for alert in figures["alerts"]
    )
    return [f"{count} x {name}" for name, count in sorted(names.items())]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
