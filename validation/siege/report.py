"""The checks of a siege, and the body of its page."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from testing.report import Check, table, text, verdict
from testing.statistics import Interval, percentile
from validation.siege.figures import Blocks, Phase, blocks, difference
from validation.siege.scraper import Scraped
from validation.siege.target import RANKS, RUN, VICTIM

from rankscope_exporter.ledger.owner_files import DIRECTORY_LIMIT

QUIET, SIEGE, ALL_USERS, BURN, AGAIN = "quiet", "siege", "siege of many users", "burn", "quiet again"
PHASES = (QUIET, SIEGE, ALL_USERS, BURN, AGAIN)
LONGEST_SCRAPES = {SIEGE: 50.0, ALL_USERS: 500.0}
"""Milliseconds, for 99 of 100 scrapes. The page has 128 ranks of one user, or 256 of many, the most that it shows."""
MOST_MEMORY = 150e6  # bytes
CONTROL = "quiet again - quiet (A/A)"
SIEGE_TO_QUIET, ALL_USERS_TO_QUIET = "siege - quiet", "siege of many users - quiet"

ABOUT = """\
A real job of two ranks (DDP over gloo; each step sleeps 45 ms in place of a device) trains with a real exporter with a
password and a real Prometheus with the fast rules. On the same machine other users make every attack of `tests/attacks`
that is possible on a node, all at once. Addresses are 192.0.2.0/24 in a separate network namespace, because 127.0.0.0/8
counts as one client. Each attacker has its own address, and so do the scraper and Prometheus. The job, the exporter and
the scraper have their own sessions, as a scheduler's job and a service have their own control groups: the kernel
divides the CPU among sessions (`sched_autogroup_enabled`).

Phases alternate: *quiet*, *siege*, *siege of many users*, *burn*, *quiet again*. In *siege*, one user attacks. In
*siege of many users*, which takes half of the time, these attacks go on, and others begin: 53 other users write costly
records, of whom 48 become other users every five seconds. Each other phase takes a quarter as long as the siege, at
most two minutes. In *burn* the same number of processes use as much CPU time as the attackers did, without touching
Rankscope: any program costs the victim's steps that much. Each scrape of the scraper has a new connection; its latency
is from `connect` to the last byte of the page.

With `--tls` the exporter, the scraper, Prometheus and the attackers use TLS (ECDSA P-256). Without it, a started
handshake is refused as invalid HTTP.

Not included: attacks on one command or one start of a job (`tests/attacks/cli`, `tests/attacks/job`), on Alertmanager
and other nodes, and with reused pids."""


@dataclass
class Observed:
    minutes: float
    rounds: int
    autogroup: str
    """Whether the kernel divides the CPU among sessions (`sched_autogroup_enabled`)."""
    phases: list[Phase] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    """The end of each (unix time), and its seconds."""
    scrapes: list[Scraped] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Alerts that fired: labels, since when, and in which phase."""
    missed: dict[str, int] = field(default_factory=dict)
    """Pages that Prometheus received without this live rank, by rank of the victim."""
    failed: int = 0
    """Scrapes of Prometheus that failed."""
    saved: list[tuple[int, bool]] = field(default_factory=list)
    """The size of the state directory at the end of each phase, and whether it has the victim's state."""
    peak: int = 0
    """The exporter's peak of resident bytes, from the kernel."""
    load: list[float] = field(default_factory=list)
    attackers: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def rounds_of(self, name: str) -> list[Phase]:
        return [phase for phase in self.phases if phase.name == name]

    def scrapes_of(self, name: str) -> list[Scraped]:
        """Return the scrapes in the phases of this name."""
        return [one for one in self.scrapes if any(phase.has(one.at) for phase in self.rounds_of(name))]

    def blocks_of(self, name: str) -> list[Blocks]:
        """Return the blocks of steps in the phases of this name, by round."""
        return [blocks(phase, self.steps) for phase in self.rounds_of(name)]

    @cached_property
    def differences(self) -> dict[str, Interval]:
        """The additional milliseconds of a step in one phase compared with another."""
        quiet, siege, of_all, burn, again = map(self.blocks_of, PHASES)
        both = [early + late for early, late in zip(quiet, again, strict=True)]
        return {
            CONTROL: difference(quiet, again),
            SIEGE_TO_QUIET: difference(both, siege),
            ALL_USERS_TO_QUIET: difference(both, of_all),
            "burn - quiet": difference(both, burn),
            "siege - burn": difference(burn, siege),
        }


def is_about_victim(labels: dict[str, str]) -> bool:
    """Return whether an alert is about the victim's run, or says that the exporter is down; both are false."""
    if labels["alertname"] == "RankscopeExporterDown":
        return True
    return labels.get("owner") == str(VICTIM) if labels.get("owner") else labels.get("run") == RUN


def checks(observed: Observed) -> list[Check]:
    idle = [name for name, report in _attackers(observed).items() if not report["seen"]]
    return [
        *(_scrapes_are_fast(observed, phase) for phase in (SIEGE, ALL_USERS)),
        Check("the exporter within 150 MB", observed.peak <= MOST_MEMORY, f"{observed.peak / 1e6:.1f} MB maximum"),
        _all_ranks_shown(observed),
        _state_kept(observed),
        _no_false_alert(observed),
        *(_steps_are_equal(observed, difference) for difference in (SIEGE_TO_QUIET, ALL_USERS_TO_QUIET)),
        Check("every attack was made", bool(observed.attackers) and not idle, ", ".join(idle) or "yes"),
    ]


def _scrapes_are_fast(observed: Observed, phase: str) -> Check:
    limit, latency = LONGEST_SCRAPES[phase], percentile(_latencies(observed.scrapes_of(phase)), 0.99)
    shown = f"{latency:.1f} ms" if math.isfinite(latency) else "no page"
    return Check(
        f"{phase}: 99 of 100 scrapes within {limit:.0f} ms",
        latency <= limit,
        f"{shown}; {observed.failed} scrapes of Prometheus failed in all phases",
    )


def _steps_are_equal(observed: Observed, compared: str) -> Check:
    slower, control = observed.differences[compared], observed.differences[CONTROL]
    holds = slower.low <= max(abs(control.low), abs(control.high))
    found = f"{text(slower, 2)} ms, control {text(control, 2)} ms"
    return Check(f"{compared}: steps no longer than the A/A control's interval explains", holds, found)


def _all_ranks_shown(observed: Observed) -> Check:
    absent = sum(len(one.ranks) < RANKS for one in observed.scrapes if not one.error)
    missed = sum(observed.missed.values())
    found = f"{absent} of the scraper's {len(observed.scrapes)} without one, {missed} of Prometheus's"
    return Check("both ranks of the victim on every page", not absent and not missed, found)


def _state_kept(observed: Observed) -> Check:
    largest, kept = max(size for size, _ in observed.saved), all(has_victims for _, has_victims in observed.saved)
    found = f"{largest / 1e6:.1f} MB maximum, the victim's {'always' if kept else 'not always'} there"
    limit = f"the state within {DIRECTORY_LIMIT / 2**20:.0f} MiB, with the victim's at the end of each phase"
    return Check(limit, kept and largest <= DIRECTORY_LIMIT, found)


def _no_false_alert(observed: Observed) -> Check:
    false = Counter(
        f"{alert['labels']['alertname']} ({alert['phase']})"
        for alert in observed.alerts
        if is_about_victim(alert["labels"])
    )
    return Check("no false alert", not false, _counts(false) or "none")


def body(observed: Observed) -> list[str]:
    """Return the paragraphs and tables of the page."""
    attackers = _attackers(observed)
    burned = sum(one["cpu"] for one in attackers.values())
    burned /= max(1.0, *(one["seconds"] for one in attackers.values()))
    load = f"load {min(observed.load):.1f} to {max(observed.load):.1f}, median {statistics.median(observed.load):.1f}"
    alerts = Counter(
        alert["labels"]["alertname"] + (" of the victim" if is_about_victim(alert["labels"]) else "")
        for alert in observed.alerts
    )
    phase_head = ["phase", "s", "scrapes", "failed", "P50", "P99", "max (ms)", "page (kB)", "CPU", "step (ms)"]
    return [
        f"{observed.minutes:g} minutes of siege in {observed.rounds} rounds, {load}, "
        f"`sched_autogroup_enabled` {observed.autogroup}. The attackers took {burned:.2f} "
        "CPUs in total; *CPU* is the exporter's share of one.",
        verdict(checks(observed)),
        table(phase_head, [_phase_row(observed, name) for name in PHASES]),
        "How much longer the victim's median step is, with its 95% interval (a bootstrap of blocks of 5 s):",
        table(["", "ms a step"], [(name, text(value, 2)) for name, value in observed.differences.items()]),
        table(["attack", "CPU", "result"], [_attack_row(name, one) for name, one in attackers.items()]),
        f"Alerts that fired, including those about the attacker's own forgeries: {_counts(alerts) or 'none'}.",
    ]


def _phase_row(observed: Observed, name: str) -> list[str]:
    phases, scrapes = observed.rounds_of(name), observed.scrapes_of(name)
    seconds = sum(phase.ended - phase.began for phase in phases)
    latencies = _latencies(scrapes)
    times = [percentile(latencies, 0.5), percentile(latencies, 0.99), max(latencies, default=math.nan)]
    size = max((one.size for one in scrapes), default=0) / 1000
    cpu = sum(phase.cpu for phase in phases) / max(seconds, 1.0)
    medians = [block for of_round in observed.blocks_of(name) for block in of_round]
    step = statistics.median(medians) * 1000 if medians else math.nan
    failed = _counts(Counter(one.error for one in scrapes if one.error)) or "0"
    counts = [name, f"{seconds:.0f}", str(len(scrapes)), failed]
    return [*counts, *(f"{value:.1f}" for value in times), f"{size:.0f}", f"{cpu:.0%}", f"{step:.2f}"]


def _latencies(scrapes: Sequence[Scraped]) -> list[float]:
    """Return milliseconds; infinity for a scrape without a page."""
    return [math.inf if one.error else one.seconds * 1000 for one in scrapes]


def _attackers(observed: Observed) -> dict[str, dict[str, Any]]:
    """Return the sums of all rounds' reports, by attack."""
    found: dict[str, dict[str, Any]] = {}
    for name, report in observed.attackers:
        one = found.setdefault(name, {"cpu": 0.0, "seconds": 0.0, "seen": Counter()})
        one["cpu"] += report["cpu"]
        one["seconds"] += report["seconds"]
        one["seen"].update(report["seen"])
    return found


def _attack_row(name: str, report: dict[str, Any]) -> list[str]:
    seen = ", ".join(f"{count} {what}" for what, count in sorted(report["seen"].items()))
    return [name, f"{report['cpu'] / max(report['seconds'], 1.0):.0%}", seen]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counter.items()))
