"""The answer of `/api/v1/facts`, which an exporter writes and the analyzer validates: JSON, checked by pydantic.

Times are seconds of the node's CLOCK_MONOTONIC: only the analyzer converts them. A step is a row of whole microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import quote, unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from rankscope.record.layout import PHASES
from rankscope.record.numbers import LARGEST_NUMBER
from rankscope.record.snapshot import DeviceStep, Step
from rankscope.record.text import LABEL_LIMIT
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading, RankReading, Run
from rankscope_exporter.ranks.chosen_steps import AnyStep

VERSION = 1
ANALYZER = "X-Rankscope-Analyzer"
"""The header with the address of the analyzer that asks: the node's pages name it."""
HANGING = "X-Rankscope-Hanging"
"""The header with the runs of the node that hang, so that it captures them: the names in the node's own readings."""
HANGING_LIMIT = 4096
"""The most characters of that header."""
RUN_LIMIT = LABEL_LIMIT + 16
"""The most characters of a run's name, with the number of its training."""
RANKS_LIMIT, GPUS_LIMIT, MOMENTS_LIMIT, STEPS_LIMIT = 256, 64, 16, 128
"""The most ranks and GPUs of a moment, moments of an answer, and steps of a rank in a moment."""
NAMES_LIMIT, NUMBER_LIMIT = 128, 2**31
"""The most names of one kind, such as phases, and the first number that no rank has."""
MICROSECONDS = 1e6
ROW_LIMIT = 2**53
"""The largest number of a step."""
TIME_LIMIT = 1e10
"""Seconds: no clock is further from its start, and sums of such times stay exact to the microsecond."""
OWNER = re.compile(r"[0-9]{0,20}")
"""A uid, or nothing. It is part of a file's name in the state directory."""


PRINTABLE = r"\A(?: |[^\p{C}\p{Z}])*\z"
"""What str.isprintable accepts, for pydantic's own regular expressions."""

Text = Annotated[str, StringConstraints(max_length=RUN_LIMIT, pattern=PRINTABLE)]
Time = Annotated[float, Field(ge=-TIME_LIMIT, le=TIME_LIMIT)]
Row = Annotated[
    list[Annotated[int, Field(ge=0, le=ROW_LIMIT)]], Field(min_length=4 + len(PHASES), max_length=4 + len(PHASES))
]
"""Number, collective sequence, end, length, and the seconds by phase."""


def written_runs(runs: Iterable[Run]) -> str:
    """Return runs as a header's value, as many as fit."""
    text = ""
    for run in sorted(runs):
        longer = f"{text}{',' * bool(text)}{'/'.join(quote(part, safe='') for part in run)}"
        if len(longer) > HANGING_LIMIT:
            break
        text = longer
    return text


def read_runs(text: str) -> frozenset[Run]:
    """Return the runs of such a value. It may have any text."""
    runs = text[:HANGING_LIMIT].split(",")
    return frozenset(tuple(map(unquote, run.split("/"))) for run in runs if run)


def checked(reading: RankReading) -> RankReading:
    """Return a reading that is within the limits. Raise ValueError for another one."""
    times = [reading.at, reading.began, reading.last_progress, reading.phase_since, reading.last_checkpoint or 0.0]
    times += [reading.ended.at] if reading.ended else []
    times += [] if reading.oom_killed_at is None else [reading.oom_killed_at]
    if max(map(abs, times)) > TIME_LIMIT:
        raise ValueError("no clock shows that time")
    if not (0 <= reading.rank < NUMBER_LIMIT and 0 <= reading.world_size < NUMBER_LIMIT):
        raise ValueError("no rank has that number")
    return _within_limits(reading)


Reading = TypeVar("Reading", RankReading, GpuReading, GpuCounters)


def _within_limits(reading: Reading) -> Reading:
    """Return a reading with texts that may be labels, numbers that a record may have, and few names.

    Raise ValueError for another one.
    """
    texts, numbers = _leaves(reading)
    if not ("".join(texts).isprintable() and max(map(len, texts), default=0) <= LABEL_LIMIT):
        raise ValueError("a text is no label")
    if max(numbers, default=0.0) > LARGEST_NUMBER or min(numbers, default=0.0) < -LARGEST_NUMBER:
        raise ValueError("a number is too large")
    return reading


def _leaves(reading: object) -> tuple[list[str], list[float]]:
    """Return all texts and numbers of a reading. Raise ValueError if there are too many names of one kind."""
    texts: list[str] = []
    numbers: list[float] = []
    rest: list[Any] = [reading]
    while rest:
        value = rest.pop()
        of_fields: Any = type(value)
        for leaf in _values(of_fields)(value):
            kind = type(leaf)
            if kind is float or kind is int:
                numbers.append(leaf)
            elif kind is str:
                texts.append(leaf)
            elif kind is dict or kind is tuple:
                if len(leaf) > NAMES_LIMIT:
                    raise ValueError("too many names of one kind")
                of_names = kind is dict or isinstance(next(iter(leaf), None), str)
                (texts if of_names else numbers).extend(leaf)
                numbers.extend(leaf.values() if kind is dict else ())
            elif leaf is not None and kind is not bool:
                rest.append(leaf)
    return texts, numbers


@lru_cache
def _values(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of a dataclass' fields."""
    return cast("Callable[[Any], tuple[Any, ...]]", attrgetter(*(one.name for one in fields(kind))))


def _checked_run(run: list[str]) -> list[str]:
    """Return a run's name, owner and perhaps number. Raise ValueError for another one."""
    if not (run[0].strip() and all(OWNER.fullmatch(text) for text in run[1:])):
        raise ValueError("no run has that name or owner")
    return run


class _Sent(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")


class SentRank(_Sent):
    """One rank at one moment, and its steps since the moment before."""

    run: Annotated[list[Text], Field(min_length=2, max_length=3), AfterValidator(_checked_run)]
    reading: Annotated[RankReading, AfterValidator(checked)]
    training: Annotated[int, Field(ge=1)] = 1
    """Its number among the trainings of this node that have the run's name."""
    job: Text = ""
    """The ID of its Slurm job."""
    namespace: Text = ""
    """The Kubernetes namespace of the pod that has its GPU."""
    rendezvous: Text = ""
    """The address and port at which the ranks of its job meet, as its environment names them."""
    clock: Literal["host", "device"] | None = None
    """The clock that has measured the steps."""
    steps: Annotated[list[Row], Field(max_length=STEPS_LIMIT)] = []


class SentGpu(_Sent):
    """A GPU that no rank of this node uses: a rank that another exporter reads may."""

    reading: Annotated[GpuReading, AfterValidator(_within_limits)]
    counters: Annotated[GpuCounters, AfterValidator(_within_limits)] = GpuCounters()


class Moment(_Sent):
    """One second of a node."""

    at: Time
    ranks: Annotated[list[SentRank], Field(max_length=RANKS_LIMIT)] = []
    gpus: Annotated[dict[Text, SentGpu], Field(max_length=GPUS_LIMIT)] = {}


class Answer(_Sent):
    """The answer: the moments after the client's cursor, the oldest first. The cursor is a moment's `at`."""

    version: Literal[1]
    node: Text
    boot: Text
    now: Time
    moments: Annotated[list[Moment], Field(max_length=MOMENTS_LIMIT)]


def row_of(step: AnyStep) -> list[int]:
    """Return a step as numbers."""
    sequence = step.sequence if isinstance(step, DeviceStep) else 0
    seconds = (step.end, step.seconds, *step.phases)
    return [step.number, sequence, *(round(MICROSECONDS * one) for one in seconds)]


def step_of(row: Sequence[int], clock: str) -> AnyStep:
    """Return the step that `row_of` made a row of."""
    number, sequence, *times = row
    end, seconds, *phases = (one / MICROSECONDS for one in times)
    if clock == "device":
        return DeviceStep(0, number, end, sequence, tuple(phases))
    return Step(number, end, seconds, tuple(phases))


Gpus = Mapping[str, SentGpu]
