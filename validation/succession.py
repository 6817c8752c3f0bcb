"""Check that each of two faults, one after the other, is found once, with its own cause and place.

    python -m validation.succession --save
    RANKS=2 python -m validation.succession --real gloo --save
    RANKS=2 python -m validation.succession --real asynchronous --save

Each pair of faults is injected for 40 s each, on the same rank and on another one, with 0, 10, 40 and 120 s between
them, with two and four ranks, on the host's clock and on the device's. A scene is right if each fault has one finding,
with its cause and its rank, that begins at its onset (from 8 s before, since a rank may have lagged without a gap, to
3 s after), if there is no other finding, and if none is open 60 s after the end. A hang lasts for 80 s. It sets the
pace of its rank for an hour, so a second one lasts for 340 s.

Ranks and time are simulated, and computing varies at random by 3%. The diagnosis is the exporter's, once a second, with
the thresholds as shipped. With `--real`, some of these pairs are injected into a real job, and notifications are
counted instead of findings: exporter, Prometheus and Alertmanager are real, at the demo's speed.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from testing import report
from testing.job.device import DEVICES
from testing.job.launch import RANKS
from testing.readings import DEVICE, HOST, Training, Trial, Work, spend
from testing.report import Line, table
from testing.servers import directories
from testing.stack import Stack
from testing.webhook import Notification
from validation.gauntlet.arena import QUIET_FOR, READY, Arena, become_quiet
from validation.gauntlet.findings import RANK_ZERO, STRAGGLER

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.thresholds import Thresholds

HANG = "hang"
LASTS, OBSERVED = 40.0, 61.0  # seconds of a fault, and after the second one
HANG_LASTS, SECOND_HANG_LASTS = 80.0, 340.0
TRAINS_FOR = 330.0  # seconds before the first fault: then the run has a pace
GAPS, SIZES, CLOCKS = (0, 10, 40, 120), (2, 4), (HOST, DEVICE)
CAUSES = ("data_wait", "h2d_copy", "backward", "optimizer", "other", HANG)
EXTRA = 0.12  # seconds a step
LATE, EARLY = 3.0, 8.0
"""How much later and earlier than the onset a finding may begin. Without a gap, the loss of the first fault lasts."""
BEHAVIORS: dict[str, dict[str, Any]] = {
    "data_wait": {"fetch": 170.0},
    "backward": {"forward": 50.0, "backward": 100.0},
    "other": {"post": 60.0},
}
"""How a rank of the real job differs from a healthy one, by cause."""
RealScene = tuple[str, str, bool, int]
REAL: tuple[RealScene, ...] = (
    ("data_wait", "backward", True, 40),
    ("data_wait", "backward", False, 0),
    ("backward", "other", True, 10),
    ("other", "data_wait", True, 0),
)
"""The scenes with real ranks: two causes, whether they are of the same rank, and the gap."""
COLUMNS = ("is_same_rank", "ranks", "clock", "gap")
WARMED_UP = 60.0  # seconds of the real job before the first fault
CALM_WITHIN = 120.0  # seconds for all alerts to end


class Scene(NamedTuple):
    """Two faults in succession."""

    first: str
    second: str
    is_same_rank: bool
    gap: int
    ranks: int
    clock: str

    @property
    def faults(self) -> Sequence[tuple[str, int]]:
        """Return the causes with their ranks."""
        return (self.first, 1), (self.second, 1 if self.is_same_rank else 0)


def scenes() -> Iterator[Scene]:
    """Yield every scene. The same cause on the same rank is one fault that returns."""
    for ranks, clock, first, gap, second, is_same in product(SIZES, CLOCKS, CAUSES, GAPS, CAUSES, (True, False)):
        if not (is_same and first == second):
            yield Scene(first, second, is_same, gap, ranks, clock)


def jitter(step: int, rank: int, work: Work) -> None:
    """Change the work of each step at random, with a standard deviation of 3% of backward."""
    work["backward"] *= random.Random(f"{step}-{rank}").gauss(1.0, 0.03)


@cache
def _healthy(ranks: int, clock: str) -> Trial:
    trial = Trial(Training(ranks, clock=clock), Thresholds()).trained(TRAINS_FOR, jitter)
    trial.verdicts.clear()
    return trial


@cache
def _first(cause: str, ranks: int, clock: str) -> Trial:
    trial = copy.deepcopy(_healthy(ranks, clock))
    _inject(trial, cause, 1)
    return trial


@cache
def _until_second(first: str, ranks: int, clock: str, gap: int) -> Trial:
    trial = copy.deepcopy(_first(first, ranks, clock)).trained(gap, jitter)
    for verdict in trial.verdicts:
        verdict.facts = None  # they take long to copy
    return trial


def _inject(trial: Trial, cause: str, rank: int, hang_lasts: float = HANG_LASTS) -> None:
    if cause == HANG:
        trial.train(1.0, jitter, spend("other", hang_lasts, rank))
        trial.train(hang_lasts - 1.0, jitter)
    else:
        trial.train(LASTS, jitter, spend(cause, EXTRA, rank))


def play(scene: Scene) -> Line:
    """Play a scene. Return its findings, and what is wrong; nothing if it is right."""
    first, (second, rank) = scene.faults[0][0], scene.faults[1]
    trial = copy.deepcopy(_until_second(first, scene.ranks, scene.clock, scene.gap))
    onsets = _healthy(scene.ranks, scene.clock).training.now, trial.training.now
    _inject(trial, second, rank, SECOND_HANG_LASTS if first == HANG else HANG_LASTS)
    last = trial.train(OBSERVED, jitter)
    found = {(one.kind, one.candidate.place.rank_label, one.opened): one for one in _findings(trial)}
    problems = list(_problems(scene, onsets, [*found.values()]))
    problems += [f"{_words(one)} is open 60 s after the end" for one in last.findings]
    return {**scene._asdict(), "found": [*map(_words, found.values())], "wrong": problems}


def _findings(trial: Trial) -> Iterator[Finding]:
    """Yield each shown finding of each second."""
    for verdict in trial.verdicts:
        yield from verdict.findings


def _problems(scene: Scene, onsets: Sequence[float], found: Sequence[Finding]) -> Iterator[str]:
    wanted = [(*_label(cause), rank) for cause, rank in scene.faults]
    named = [(one.kind, one.candidate.cause, one.candidate.place.rank) for one in found]
    if named != wanted:
        yield f"found {', '.join(map(_words, found)) or 'nothing'}"
        return
    for one, onset in zip(found, onsets, strict=True):
        if not -EARLY <= one.since - onset <= LATE:
            yield f"{_words(one)} begins {one.since - onset:+.0f} s after the onset"


def _label(cause: str) -> tuple[str, str]:
    return (HANG, "other") if cause == HANG else ("straggler", cause)


def _words(one: Finding) -> str:
    return f"{one.kind} {one.candidate.cause} rank {one.candidate.place.rank_label}"


def play_all(at_once: int | None) -> Iterator[Line]:
    """Play every scene, in several processes."""
    every = [*scenes()]
    of_one_start = len(every) // (len(SIZES) * len(CLOCKS) * len(CAUSES))  # they share the time until their gap
    with ProcessPoolExecutor(at_once) as pool:
        yield from pool.map(play, every, chunksize=of_one_start)


class RealNode(Arena):
    """A node with the exporter's thresholds as shipped, and the demo's stack."""

    def __init__(self, directory: Path, memory: Path, device: str) -> None:
        super().__init__(directory, memory, device, thresholds=None)
        self.stack = Stack(directory, [self.exporter])

    def _start(self, started: ExitStack) -> None:
        started.enter_context(self.stack)
        super()._start(started)

    def play(self, scene: Scene) -> Line:
        """Play a scene in real time. Return its notifications, and what is wrong; nothing if it is right."""
        become_quiet(self.stack.prometheus, READY, QUIET_FOR, CALM_WITHIN)
        first, onsets = len(self.stack.webhook.notifications), list[float]()
        for cause, rank in scene.faults:
            time.sleep(scene.gap if onsets else 0.0)
            self.change_ranks(ranks={rank: BEHAVIORS[cause]})
            onsets.append(time.time())
            time.sleep(LASTS)
            self.heal()
        time.sleep(OBSERVED)
        notified = first_of_each(one for one in self.stack.webhook.notifications[first:] if one.is_firing)
        wanted = [(*_label(cause), str(rank)) for cause, rank in scene.faults]
        named = [(_kind(one), one.labels.get("cause", ""), one.labels.get("rank", "")) for one in notified]
        problems = [] if named == wanted else [f"notified {', '.join(map(' '.join, named)) or 'nothing'}"]
        still = [one["metric"] for one in self.stack.prometheus.query('ALERTS{alertstate="firing"}')]
        problems += [f"{one['alertname']} fires 60 s after the end" for one in still]
        seconds = [round(one.received - onset, 1) for one, onset in zip(notified, onsets, strict=False)]
        return {**scene._asdict(), "found": [*map(" ".join, named)], "seconds": seconds, "wrong": problems}


def first_of_each(notifications: Iterable[Notification]) -> Sequence[Notification]:
    """Return the first notification of each alert. The end of another alert of its group repeats it."""
    return [*{(tuple(one.labels.items()), one.starts_at): one for one in reversed([*notifications])}.values()][::-1]


def _kind(one: Notification) -> str:
    return {STRAGGLER: "straggler", RANK_ZERO: "straggler"}.get(one.name, one.name)


def play_real(device: str, scenes: Sequence[RealScene]) -> Iterator[Line]:
    """Play scenes with real ranks on one kind of device."""
    with directories("succession") as places, RealNode(*places, device) as node:
        time.sleep(WARMED_UP)
        for scene in scenes:
            yield node.play(Scene(*scene, RANKS, device))


def body(lines: Sequence[Line]) -> list[str]:
    """Return the right scenes by gap and by pair of causes, and each wrong one."""
    kinds = dict.fromkeys((one["is_same_rank"], one["ranks"], one["clock"]) for one in lines)
    rows = [
        (_place(kind[0]), *kind[1:], *(_share(lines, **dict(zip(COLUMNS, (*kind, gap), strict=True))) for gap in GAPS))
        for kind in kinds
    ]
    by_gap = table(("second fault", "ranks", "clock", *(f"after {gap} s" for gap in GAPS)), rows)
    seconds = [*dict.fromkeys(one["second"] for one in lines)]
    firsts = dict.fromkeys(one["first"] for one in lines)
    pairs = [(first, *(_share(lines, first=first, second=second) for second in seconds)) for first in firsts]
    wrong = [f"- {_words_of(one)}: {'; '.join(one['wrong'])}" for one in lines if one["wrong"]]
    return [by_gap, table(("first, then", *seconds), pairs), "\n".join(wrong) if wrong else "None is wrong."]


def _place(is_same_rank: bool) -> str:
    return "of the same rank" if is_same_rank else "of another rank"


def _words_of(one: Line) -> str:
    gap = f"{one['first']}, after {one['gap']} s {one['second']} {_place(one['is_same_rank'])}"
    return f"{gap}, {one['ranks']} ranks, {one['clock']}"


def _share(lines: Sequence[Line], **values: Any) -> str:
    """Return the right scenes of all with these values, as in `4/4`; a dash without any."""
    chosen = [not one["wrong"] for one in lines if all(one[name] == value for name, value in values.items())]
    return f"{sum(chosen)}/{len(chosen)}" if chosen else "-"


def main() -> int:
    """Play all scenes and publish. Return 1 if one is wrong."""
    parser = report.parser(__doc__)
    parser.add_argument("--real", choices=DEVICES, help="play some scenes with real ranks on this kind of device")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N of the real scenes")
    parser.add_argument("--at-once", type=int, metavar="N", help="processes of the simulation (default: one per core)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the job and the servers, too
    lines = []
    for line in play_real(options.real, REAL[: options.first]) if options.real else play_all(options.at_once):
        lines.append(line)
        if options.real or line["wrong"]:
            print(line, file=sys.stderr, flush=True)
    name = f"succession_{options.real}" if options.real else "succession"
    title = f"Faults in succession, {'real' if options.real else 'simulated'} ranks"
    report.Report(name, title, __doc__, "all right", body(lines), lines).publish(options.save)
    return 1 if any(line["wrong"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
