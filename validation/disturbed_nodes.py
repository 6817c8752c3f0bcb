"""Disturb the analyzer and the exporters that it asks while a rank is slow or a run hangs (part of `make nodes`).

    python -m validation.disturbed_nodes --save
    python -m validation.disturbed_nodes --only stopped

A simulated run of four ranks on two nodes, in real time, is read by two exporters and judged by an analyzer, each a
process. Between them, a proxy delays, drops or changes answers and gives a node another clock. Each case trains
healthily, injects a fault, disturbs, and looks at the analyzer's metrics twice a second. It checks that the finding is
the same one with the same begin, that no other one arises, and how long the finding takes. With two analyzers, a
Prometheus with the shipped rules, at 1 s intervals, and an Alertmanager notify a receiver. Records, clocks and delays
are simulated; processes, signals and requests are real.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from testing import report
from testing.live_nodes import RANKS, LiveNodes
from testing.servers import directories
from testing.simulated_job import even, lagging
from testing.stack import Stack, wait_for

SLOW = lagging("forward", laggard=3)
HANG = {0: "collective_wait", 1: "collective_wait", 2: "data_wait", 3: "collective_wait"}
HEALTHY = 40.0  # seconds: the run must be known before its first fault
FOUND_WITHIN, HANG_WITHIN = 40.0, 150.0
STOP, GONE = 30.0, 30.0
SAVED = 15.0  # seconds after which a finding is in the state
CALM = 25.0  # seconds for which the analyzer is watched after a disturbance
BEGIN, TOLERANCE = 5.0, 1.0  # seconds by which the begin of a finding may differ from the onset, and may change
DAYS, HOUR = 10 * 86_400.0, "+3600"
AT_ONCE = 3
LOST = 0.15, 0.45
"""The least and the largest ratio of lost time that may be counted while rank 3 is slow: about 0.3 is right, and less
after a start, because the first seconds are not counted."""
STRAGGLER, HUNG, LAGGING = "straggler", "hang", "RankscopeRankLagging"


class Result(NamedTuple):
    """One line of the page."""

    case: str
    found: str
    holds: bool


Steps = Iterator[tuple[str, bool]]
"""What was found, and whether it is right."""


class Trial:
    """One disturbance of a run, and the checks of what the analyzer shows."""

    def __init__(self, nodes: LiveNodes) -> None:
        self.nodes, self.watch = nodes, nodes.watches[0]
        self.onset = 0.0

    def slow_down(self) -> None:
        """Let rank 3 be slow from now on."""
        self.onset = time.time()
        self.nodes.training.plan = SLOW

    def hang(self) -> None:
        """Let the run wait for rank 2 from now on."""
        self.onset = time.time()
        self.nodes.training.hang(HANG)

    def finds(
        self,
        kind: str = STRAGGLER,
        within: float = FOUND_WITHIN,
        since: float = 0.0,
        *,
        is_begin_known: bool = True,
    ) -> Steps:
        """Check that the finding is shown, with its begin, and say how long that took, from the onset or `since`."""
        began = since or self.onset
        found = self.watch.found(kind, within, since)
        if found is None:
            yield f"no {kind} within {within:.0f} s", False
            return
        begins = [at for look in self.watch.since(found - 0.1)[:1] for at in look.since.values()]
        off = begins[0] - self.onset
        is_right = abs(off) <= BEGIN or not is_begin_known
        yield f"{kind} found after {found - began:.1f} s, its begin {off:+.1f} s from the onset", is_right

    def keeps(self, at: float, *, is_always_shown: bool = True) -> Steps:
        """Check that after a time the finding that was open then goes on with the same begin, and no other arises."""
        before = [look for look in self.watch.looks if look.at <= at][-1]
        looks = self.watch.since(at)
        others = {labels for look in looks for labels in look.since} - before.since.keys()
        yield _words("no other finding", "other findings", others), not others
        moved = [
            abs(look.since[one] - since) for look in looks for one, since in before.since.items() if one in look.since
        ]
        yield f"begin moves by at most {max(moved, default=0.0):.1f} s", max(moved, default=99.0) <= TOLERANCE
        hidden = [look for look in looks if not before.since.keys() <= look.since.keys()]
        if is_always_shown:
            yield f"hidden in {len(hidden)} of {len(looks)} looks", not hidden

    def is_calm(self, at: float) -> Steps:
        """Check that no finding was shown after a time."""
        found = {labels for look in self.watch.since(at) for labels in look.since}
        yield _words("no finding", "findings", found), not found

    def is_in_time(self, at: float, limit: float) -> Steps:
        """Check the age of the last judged second after a time."""
        lag = max((look.lag for look in self.watch.since(at)), default=99.0)
        yield f"at most {lag:.1f} s late", lag <= limit

    def counts_on(self, at: float) -> Steps:
        """Check that after a look no counter of lost time decreased, and that each second counted once."""
        looks = [*[look for look in self.watch.looks if look.at <= at][-1:], *self.watch.since(at)]
        falls = [
            name
            for before, after in pairwise(looks)
            for name, value in after.lost.items()
            if value < before.lost.get(name, 0.0)
        ]
        yield f"{len(falls)} counters decrease", not falls
        first, last = looks[0], looks[-1]
        lost = sum(last.lost.values()) - sum(first.lost.values())
        ratio = lost / RANKS / (last.at - first.at)
        yield f"counts {ratio:.0%} of the time as lost", LOST[0] <= ratio <= LOST[1]


def _words(none: str, some: str, found: Any) -> str:
    names = sorted({f"{dict(one)['kind']} {dict(one)['cause']} {dict(one)['rank']}".strip() for one in found})
    return f"{some}: {', '.join(names)}" if names else none


def nothing(trial: Trial) -> Steps:
    """Disturb nothing: how long a slow rank takes here."""
    yield from trial.is_calm(0.0)
    trial.slow_down()
    yield from trial.finds()


def killed(trial: Trial) -> Steps:
    """Kill the analyzer while a finding is open, and start it again with its state."""
    trial.slow_down()
    yield from trial.finds()
    time.sleep(SAVED)
    yield from _restarted(trial, is_same=True)


def killed_without_state(trial: Trial) -> Steps:
    """Kill the analyzer while a finding is open, and start it again without a state."""
    trial.slow_down()
    yield from trial.finds()
    yield from _restarted(trial, is_same=False)


def _restarted(trial: Trial, *, is_same: bool) -> Steps:
    (analyzer,) = trial.nodes.analyzers
    analyzer.kill()
    at = time.time()
    time.sleep(3.0)
    analyzer.start()
    started = time.time()
    yield from trial.finds(since=started, is_begin_known=is_same)
    time.sleep(CALM)
    if is_same:
        yield from trial.keeps(at, is_always_shown=False)
    yield from trial.counts_on(trial.watch.since(started)[0].at)


def stopped(trial: Trial) -> Steps:
    """Stop the analyzer for 30 s while a finding is open."""
    trial.slow_down()
    yield from trial.finds()
    at = _stop(trial)
    time.sleep(CALM)
    yield from trial.keeps(at)
    yield from trial.counts_on(at)
    yield from trial.is_in_time(at + STOP + 15.0, 8.0)


def slow_in_stop(trial: Trial) -> Steps:
    """Stop the analyzer for 30 s, in which a rank becomes slow."""
    _stop(trial, trial.slow_down)
    yield from trial.finds()


def hang_in_stop(trial: Trial) -> Steps:
    """Stop the analyzer for 30 s, in which the run begins to hang."""
    _stop(trial, trial.hang)
    yield from trial.finds(HUNG, HANG_WITHIN)
    time.sleep(CALM)
    yield from trial.keeps(time.time() - CALM + 1.0)


def _stop(trial: Trial, do: Callable[[], None] = lambda: None) -> float:
    (analyzer,) = trial.nodes.analyzers
    at = time.time()
    analyzer.signal(signal.SIGSTOP)
    time.sleep(5.0)
    do()
    time.sleep(STOP - 5.0)
    analyzer.signal(signal.SIGCONT)
    return at


def slow_exporter(trial: Trial) -> Steps:
    """Let each answer of one exporter take 4 s."""
    trial.nodes.disturbers[1].delay = 4.0
    yield from _disturbed(trial)


def too_slow_exporter(trial: Trial) -> Steps:
    """Let each answer of one exporter take 8 s for a while: longer than the analyzer waits."""
    trial.slow_down()
    yield from trial.finds()
    at = time.time()
    trial.nodes.disturbers[1].delay = 8.0
    time.sleep(GONE)
    yield from _says(trial, at, "node-1")
    trial.nodes.disturbers[1].delay = 0.0
    time.sleep(CALM)
    yield from trial.keeps(at)


def gone_exporter(trial: Trial) -> Steps:
    """Let one exporter be gone for 30 s while a finding is open."""
    trial.slow_down()
    yield from trial.finds()
    at = time.time()
    trial.nodes.disturbers[1].is_gone = True
    time.sleep(GONE)
    yield from _says(trial, at, "node-1")
    trial.nodes.disturbers[1].is_gone = False
    time.sleep(CALM)
    yield from trial.keeps(at)
    yield f"missing at the end: {sorted(trial.watch.looks[-1].missing) or 'none'}", not trial.watch.looks[-1].missing


def restarted_exporter(trial: Trial) -> Steps:
    """Kill one exporter while a finding is open, and start it again."""
    trial.slow_down()
    yield from trial.finds()
    at = time.time()
    trial.nodes.exporters[1].kill()
    time.sleep(3.0)
    trial.nodes.exporters[1].start()
    time.sleep(CALM)
    yield from trial.keeps(at)
    yield from trial.counts_on(at)


def other_version(trial: Trial) -> Steps:
    """Let one exporter answer in another version for a while."""
    at = time.time()
    trial.nodes.disturbers[1].change = lambda document: document.update(version=2)
    time.sleep(GONE)
    yield from _says(trial, at, "node-1")
    yield from trial.is_calm(at)
    trial.nodes.disturbers[1].change = None
    time.sleep(CALM)
    yield from _disturbed(trial)


def lying_exporter(trial: Trial) -> Steps:
    """Let one exporter send values that make no sense for a while."""
    at = time.time()
    lies = _Lies()
    trial.nodes.disturbers[1].change = lies.send
    time.sleep(GONE)
    trial.nodes.disturbers[1].change = None
    time.sleep(CALM)
    yield f"{lies.sent} answers with lies", lies.sent > 0
    yield from trial.is_calm(at)
    yield from _disturbed(trial)


class _Lies:
    """Values that no exporter sends, another one in each answer."""

    VALUES = (-1.0, 1e300, -1e300, 1e9, 0.0)
    FIELDS = ("at", "began", "last_progress", "phase_since", "rank", "world_size", "now")

    def __init__(self) -> None:
        self.sent = 0

    def send(self, document: dict[str, Any]) -> None:
        """Change one field of each reading, or the answer's time."""
        value: float = self.VALUES[self.sent % len(self.VALUES)]
        field = self.FIELDS[self.sent % len(self.FIELDS)]
        self.sent += 1
        if field in ("rank", "world_size"):
            value = int(max(-1.0, min(value, 1e9)))
        readings = (sent["reading"] for moment in document["moments"] for sent in moment.get("ranks", ()))
        for changed in [document] if field == "now" else readings:
            changed[field] = value


def clocks(trial: Trial) -> Steps:
    """Give one node a monotonic clock ten days ahead that gains 200 ppm, and a wall clock an hour ahead."""
    began = time.monotonic()
    trial.nodes.disturbers[1].clock = lambda at: at + DAYS + 200e-6 * (at - began)
    (analyzer,) = trial.nodes.analyzers
    analyzer.stop()
    analyzer.start()
    time.sleep(HEALTHY)
    yield from trial.is_calm(0.0)
    yield from _disturbed(trial)


def suspended(trial: Trial) -> Steps:
    """Suspend one node for 20 s: its monotonic clock stops, and the other ranks wait."""
    node, training = trial.nodes.disturbers[1], trial.nodes.training
    at, began, ended = time.time(), time.monotonic(), time.monotonic() + 20.0
    training.pause(20.0)
    node.is_gone = True
    time.sleep(20.0)
    node.clock = lambda true: true if true < began else max(began, true - (ended - began))
    node.is_gone = False
    time.sleep(CALM)
    yield from trial.is_calm(at)
    yield from _disturbed(trial)


def _disturbed(trial: Trial) -> Steps:
    """Yield the checks of a slow rank that is found although something is disturbed."""
    at = time.time()
    trial.slow_down()
    yield from trial.finds()
    time.sleep(CALM)
    yield from trial.keeps(time.time() - CALM + 1.0)
    yield from trial.is_in_time(at, 12.0)


def _says(trial: Trial, at: float, node: str) -> Steps:
    yield f"{node} is said to be missing", any(node in look.missing for look in trial.watch.since(at))


def two_analyzers(trial: Trial) -> Steps:
    """Run two analyzers side by side, with Prometheus and Alertmanager."""
    servers = [*trial.nodes.exporters, *trial.nodes.analyzers]
    with (
        tempfile.TemporaryDirectory() as name,
        Stack(Path(name), (), targets=[one.address for one in servers]) as stack,
    ):
        time.sleep(10.0)
        trial.slow_down()
        yield from trial.finds()
        other = trial.nodes.watches[1]
        other.found(STRAGGLER, FOUND_WITHIN)
        time.sleep(10.0)
        looks = [watch.looks[-1] for watch in trial.nodes.watches]
        are_same = looks[0].since.keys() == looks[1].since.keys()
        yield f"{'the same' if are_same else 'other'} labels", are_same and bool(looks[0].since)
        begins = [next(iter(look.since.values()), 0.0) for look in looks]
        yield f"begins {abs(begins[0] - begins[1]):.1f} s apart", abs(begins[0] - begins[1]) <= TOLERANCE
        yield _notified(stack)
        trial.nodes.analyzers[1].kill()
        time.sleep(20.0)
        trial.nodes.analyzers[1].start()
        time.sleep(CALM)
        yield _notified(stack, "RankscopeAnalyzerDown")
        trial.nodes.training.plan = even
        wait_for(lambda: any(one.name == LAGGING and not one.is_firing for one in stack.webhook.notifications), 120.0)
        yield _notified(stack, "RankscopeAnalyzerDown")
        ended = [one for one in stack.webhook.notifications if one.name == LAGGING and not one.is_firing]
        yield f"{len(ended)} resolved", len(ended) == 1


def _notified(stack: Stack, *allowed: str) -> tuple[str, bool]:
    """Return the firing notifications. The slow rank is right once, and the allowed alerts are."""
    names = [one.name for one in stack.webhook.firing()]
    is_right = names.count(LAGGING) == 1 and {*names} <= {LAGGING, *allowed}
    return f"notified: {', '.join(names) or 'nothing'}", is_right


CASES: dict[str, Callable[[Trial], Steps]] = {
    "nothing": nothing,
    "the analyzer is killed": killed,
    "the analyzer is killed, without a state": killed_without_state,
    "the analyzer is stopped": stopped,
    "a rank becomes slow while the analyzer is stopped": slow_in_stop,
    "the run hangs while the analyzer is stopped": hang_in_stop,
    "two analyzers": two_analyzers,
    "an exporter answers after 4 s": slow_exporter,
    "an exporter answers after 8 s": too_slow_exporter,
    "an exporter is gone": gone_exporter,
    "an exporter is killed": restarted_exporter,
    "an exporter of another version": other_version,
    "an exporter lies": lying_exporter,
    "clocks differ and drift": clocks,
    "a node is suspended": suspended,
}


def run(name: str) -> Result:
    """Carry out a case."""
    case = CASES[name]
    options: dict[str, Any] = {"analyzers": 2 if case is two_analyzers else 1}
    with directories("nodes") as (directory, memory):
        if case is clocks:
            (clock := directory / "clock").write_text(HOUR)
            options["last"] = ("validation.soak.exporter", str(clock))
        has_state = case not in (killed_without_state, clocks)
        with LiveNodes(directory, memory, has_state=has_state, **options) as nodes:
            time.sleep(HEALTHY)
            found = list(_reported(name, case(Trial(nodes))))
            if not all(holds for _, holds in found):
                print("\n".join(f"{name}: {one.log.read_text()}" for one in nodes.analyzers), file=sys.stderr)
    return Result(name, "; ".join(text for text, _ in found), all(holds for _, holds in found))


def _reported(name: str, steps: Steps) -> Steps:
    """Print each check as soon as it is done."""
    for text, holds in steps:
        print(f"{name}: {text}: {report.yes_or_no(holds)}", flush=True)
        yield text if holds else f"**{text}**", holds


def main() -> int:
    """Carry out all cases and publish. Return 1 if a check fails."""
    parser = report.parser(__doc__, prog="python -m validation.disturbed_nodes")
    parser.add_argument("--only", default="", metavar="TEXT", help="carry out the cases with this text in their names")
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = [*pool.map(run, names)]
    rows = [(one.case, one.found, report.yes_or_no(one.holds)) for one in results]
    bound = "the same findings with the same begin, no other one, one notification"
    table, figures = report.table(("disturbance", "found", "right"), rows), [one._asdict() for one in results]
    title = "Disturbed analyzers and exporters"
    report.Report("disturbed_nodes", title, __doc__, bound, [table], figures).publish(options.save)
    return 0 if all(one.holds for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
