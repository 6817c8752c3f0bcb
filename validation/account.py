"""Compare the diagnosis' account of a run's GPU time with the truth, on the host's clock and on the device's.

    python -m validation.account --minutes 30 --save

Each simulated run of four ranks trains for this time and loses time in one way. The truth is in its steps; the account
is the sum of what the judge returns for readings once a second. On the device's clock, one step of eight is measured,
chosen by its number. The error is that of the cause that most time is lost to. `unknown` is time that no measured step
explains. `Host ahead`: it issues ten or fifty steps before it waits for the device.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from testing import report
from testing.readings import RUN, STEP, Change, Training, Work, drift, spend

from rankscope.record.phases import COMPUTING, PLANNED
from rankscope_exporter.diagnosis.facts import DEVICE, HOST, WAIT
from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.lost import Parts
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.ledger.account import add_seconds

BOUND = 0.1
RANKS, LEVEL = 4, 3
CAUSES = {**dict.fromkeys(COMPUTING, "none"), "data_wait": "data", "h2d_copy": "copies"}


class Known(Training):
    """A training that adds up its true GPU seconds by cause."""

    truth: Parts

    def restart(self) -> None:
        """End all processes and start new ones, and keep the sums."""
        self.truth = defaultdict(float)
        super().restart()

    def _finish_step(self) -> None:
        waits = [rank.work.get(WAIT, 0.0) for rank in self._ranks]
        planned = [sum(rank.work.get(phase, 0.0) for phase in PLANNED) for rank in self._ranks]
        longest = max(self._ranks, key=lambda rank: sum(rank.work.get(phase, 0.0) for phase in PLANNED)).work
        for rank, wait, own in zip(self._ranks, waits, planned, strict=True):
            for phase, seconds in rank.work.items():
                if phase != WAIT:
                    self.truth[CAUSES.get(phase, phase)] += seconds
            for_planned = min(wait - min(waits), max(planned) - own)
            self.truth[next((phase for phase in PLANNED if phase in longest), "other")] += for_planned
            self.truth["transfer"] += min(waits)
            self.truth["straggler"] += wait - min(waits) - for_planned
        super()._finish_step()


def in_turn(phase: str, seconds: float, every: int) -> Change:
    """Make another rank late in every n-th step."""

    def change(step: int, rank: int, work: Work) -> None:
        if step % every == 0 and (step // every * 7) % RANKS == rank:
            work[phase] = work.get(phase, 0.0) + seconds

    return change


def longer(times: float) -> Change:
    """Make all steps this many times as long."""

    def change(_step: int, _rank: int, work: Work) -> None:
        work.update({phase: times * work[phase] for phase in STEP})

    return change


class Scene(NamedTuple):
    """A way to lose time."""

    name: str
    cause: str
    changes: Sequence[Change]
    ahead: int = 1
    """The steps that the host issues before it waits for the device."""


LATE = "one rank late"
SCENES = (
    Scene(f"{LATE} in each step", "straggler", [spend("backward", 0.12, 1)]),
    Scene(f"{LATE} 1 s in each 10th step", "straggler", [spend("other", 1.0, 1, every=10)]),
    Scene(f"{LATE} 2 s in each 20th step", "straggler", [spend("other", 2.0, 0, every=20)]),
    Scene(f"{LATE} 8 s in each 100th step", "straggler", [spend("backward", 8.0, 2, every=100)]),
    Scene(f"{LATE} 8 s in each 100th step, host ahead", "straggler", [spend("backward", 8.0, 2, every=100)], 10),
    Scene(f"{LATE} 1 s in each 50th step of 20 ms", "straggler", [longer(0.1), spend("other", 1.0, 1, every=50)]),
    Scene(f"{LATE} 20 s in each 2nd step of 20 s", "straggler", [longer(100.0), spend("backward", 20.0, 1, every=2)]),
    Scene("half of the ranks late in each 10th step", "straggler", [spend("forward", 1.0, 0, 1, every=10)]),
    Scene("ranks late in turn, each 20th step", "straggler", [in_turn("other", 2.0, 20)]),
    Scene("all data late in each step", "data", [spend("data_wait", 0.12)]),
    Scene("all data 5 s late in each 50th step", "data", [spend("data_wait", 5.0, every=50)]),
    Scene("copies in each step", "copies", [spend("h2d_copy", 0.12)]),
    Scene(
        "rank 0 writes a checkpoint of 20 s each 500th step", "checkpoint", [spend("checkpoint", 20.0, 0, every=500)]
    ),
    Scene("all ranks evaluate for 60 s each 500th step", "evaluation", [spend("evaluation", 60.0, every=500)]),
    Scene("healthy", "transfer", []),
    Scene("healthy, host ahead", "transfer", [], 50),
)


def account(scene: Scene, clock: str, seconds: float) -> tuple[Parts, Parts]:
    """Return the GPU seconds by cause: the truth, and the judge's account."""
    training = Known(RANKS, clock=clock, level=LEVEL, ahead=scene.ahead)
    judge, sums = RunJudge(RUN, Thresholds()), defaultdict[str, float](float)
    for at, readings in training.train(seconds, drift, *scene.changes):
        add_seconds(sums, judge.update(at, readings).new_gpu_seconds)
    return training.truth, sums


def measure(scene: Scene, clock: str, seconds: float) -> dict[str, str | float]:
    """Return the result of a scene on a clock, as ratios of the time."""
    truth, found = (
        {cause: round(one / sum(sums.values()), 4) for cause, one in sums.items()}
        for sums in account(scene, clock, seconds)
    )
    row: dict[str, str | float] = {"scene": scene.name, "clock": clock, "cause": scene.cause}
    row |= {"truth": truth[scene.cause], "account": found.get(scene.cause, 0.0)}
    row["error"] = round(found.get(scene.cause, 0.0) / truth[scene.cause] - 1.0, 4)
    return row | {"useful": truth["none"], "account_useful": found["none"], "unknown": found.get("unknown", 0.0)}


def table(rows: Sequence[Mapping[str, str | float]]) -> str:
    """Return the table of the results."""
    heads = ["scene", "clock", "cause", "truth", "account", "error", "useful", "account", "unknown"]
    return report.table(
        heads, [[f"{100 * one:.1f}%" if isinstance(one, float) else one for one in row.values()] for row in rows]
    )


def main() -> int:
    """Measure and publish. Return 1 if an account differs from the truth by more than a tenth."""
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    clocked = [(one, clock) for one in SCENES for clock in (HOST, DEVICE) if clock == DEVICE or one.ahead == 1]
    rows = [measure(one, clock, 60.0 * options.minutes) for one, clock in clocked]
    title = "The account of GPU time and the truth"
    report.Report("account", title, __doc__, f"{BOUND:.0%}", [table(rows)], rows).publish(options.save)
    return int(any(abs(float(row["error"])) > BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
