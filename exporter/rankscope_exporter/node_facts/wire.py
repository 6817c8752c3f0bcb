"""The answer of `/api/v1/facts`, which an exporter writes and the analyzer validates: JSON, checked by pydantic.

Times are seconds of the node's CLOCK_MONOTONIC: only the analyzer converts them. A step is a row of whole microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from rankscope.record.layout import PHASES
from rankscope.record.snapshot import DeviceStep, Step
from rankscope.record.text import LABEL_LIMIT, is_label
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading, RankReading
from rankscope_exporter.ranks.reference_step import AnyStep

VERSION = 1
ANALYZER = "X-Rankscope-Analyzer"
"""The header with the address of the analyzer that asks: the node's pages name it."""
RUN_LIMIT = LABEL_LIMIT + 16
"""The most characters of a run's name, with the number of its training."""
RANKS_LIMIT, GPUS_LIMIT, MOMENTS_LIMIT, STEPS_LIMIT = 256, 64, 16, 128
"""The most ranks and GPUs of a moment, moments of an answer, and steps of a rank in a moment."""
NAMES_LIMIT, NUMBER_LIMIT = 128, 2**31
"""The most names of one kind, such as phases, and the first number that no rank has."""
MICROSECONDS = 1e6

Text = Annotated[str, StringConstraints(max_length=RUN_LIMIT)]
Row = Annotated[
    list[Annotated[int, Field(ge=0, le=2**53)]], Field(min_length=4 + len(PHASES), max_length=4 + len(PHASES))
]
"""Number, collective sequence, end, length, and the seconds by phase."""


def _checked(reading: RankReading) -> RankReading:
    """Return a reading with texts that may be labels, and with few names. Raise ValueError for another one."""
    named = reading.counters, reading.counters.collectives, reading.counters.aligned, reading
    mappings = [getattr(one, name) for one in named for name in one.__slots__ if isinstance(getattr(one, name), dict)]
    texts = [reading.group, reading.node, reading.uuid, reading.phase, reading.collective, reading.operation]
    texts += [name for mapping in mappings for name in mapping]
    if any(len(mapping) > NAMES_LIMIT for mapping in mappings) or not all(map(is_label, texts)):
        raise ValueError("a text is no label, or there are too many")
    if not (0 <= reading.rank < NUMBER_LIMIT and 0 <= reading.world_size < NUMBER_LIMIT):
        raise ValueError("no rank has that number")
    return reading


class _Sent(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")


class SentRank(_Sent):
    """One rank at one moment, and its steps since the moment before."""

    run: Annotated[list[Text], Field(min_length=2, max_length=3)]
    reading: Annotated[RankReading, AfterValidator(_checked)]
    job: Text = ""
    """The ID of its Slurm job."""
    clock: Literal["host", "device"] | None = None
    """The clock that has measured the steps."""
    steps: Annotated[list[Row], Field(max_length=STEPS_LIMIT)] = []


class SentGpu(_Sent):
    """A GPU that no rank of this node uses: a rank that another exporter reads may."""

    reading: GpuReading
    counters: GpuCounters = GpuCounters()


class Moment(_Sent):
    """One second of a node."""

    at: float
    ranks: Annotated[list[SentRank], Field(max_length=RANKS_LIMIT)] = []
    gpus: Annotated[dict[Text, SentGpu], Field(max_length=GPUS_LIMIT)] = {}


class Answer(_Sent):
    """The answer: the moments after the client's cursor, the oldest first. The cursor is a moment's `at`."""

    version: Literal[1]
    node: Text
    boot: Text
    now: float
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
