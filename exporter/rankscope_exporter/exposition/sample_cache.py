"""A metric's lines on /metrics, written when its values change and kept until they do: what makes a scrape cheap.

The lines of GPUs and ranks are written by the threads that read them, once a second, so that a scrape only puts texts
together: filling and rendering families of 800 series took 3 ms, on a machine whose jobs keep the caches busy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

R = TypeVar("R")
Reading = TypeVar("Reading", contravariant=True)

Values = float | Mapping[Any, float | None] | None
"""One number, or one by the value (str) or values (tuple of str) of the labels that tell them apart; None is absent."""

Texts = Sequence[bytes]
"""What there is to say of one GPU or rank, a text a metric, as it is sent: to encode it costs a scrape 0.3 ms."""


class Declared(Protocol):
    """A metric, whatever its values are."""

    @property
    def kind(self) -> str:
        """Gauge, counter or histogram."""

    @property
    def name(self) -> str:
        """As on /metrics."""

    @property
    def help(self) -> str:
        """The HELP line."""

    def prefix(self, labels: Sequence[str]) -> str:
        """A line up to its value."""


class Valued(Declared, Protocol[Reading]):
    """A metric that knows its values from a reading."""

    def values(self, reading: Reading) -> Values:
        """The values, by the labels that follow those that all lines have."""


class SampleCache(Generic[R]):
    """The samples of one GPU, or of one rank, as lines. Used by one thread at a time."""

    def __init__(self, metrics: Sequence[Valued[R]], labels: Sequence[str] = ()) -> None:
        self._metrics = metrics
        self._labels = tuple(labels)  # of all lines, the first in every metric's order
        self._values_of = [metric.values for metric in metrics]
        self._values: list[Values] = [None] * len(metrics)
        self._prefixes: list[dict[Any, str]] = [{} for _ in metrics]
        self._texts = [b""] * len(metrics)

    def write(self, reading: R) -> Texts:
        """The texts of all metrics, in their order."""
        for index, values_of in enumerate(self._values_of):
            values = values_of(reading)
            if values != self._values[index]:
                if values is None or isinstance(values, (int, float)):
                    self._values[index] = values
                    self._texts[index] = self._text(index, {(): values})
                else:
                    # A copy, because a reader may go on counting in the same mapping.
                    self._values[index] = several = dict(values)
                    self._texts[index] = self._text(index, several)
        return tuple(self._texts)

    def _text(self, index: int, values: Mapping[Any, float | None]) -> bytes:
        before, now, text = self._prefixes[index], dict[Any, str](), []
        for labels, number in values.items():
            if number is not None:
                now[labels] = prefix = before.get(labels) or self._prefix(index, labels)
                text.append(f"{prefix}{number_text(number)}\n")
        self._prefixes[index] = now  # a series that is gone takes no memory
        return "".join(text).encode()

    def _prefix(self, index: int, labels: str | tuple[str, ...]) -> str:
        more = (labels,) if isinstance(labels, str) else labels
        return self._metrics[index].prefix((*self._labels, *more))


class WrittenFamily(Metric):
    """A family whose lines exist already. Samples are made of them for who asks: the status page, and tests."""

    # What is an attribute of Metric's is made for who asks: a scrape has a hundred families, and asks for none of it.
    unit = ""

    def __init__(self, declared: Declared, texts: Iterable[bytes]) -> None:
        # Not Metric's own: it checks the name against a pattern, and sets `samples`.
        self.declared = declared
        self.text = b"".join(texts)

    @property
    def name(self) -> str:  # type: ignore[override]
        """As prometheus_client has it: a counter's without `_total`."""
        name = self.declared.name
        return name.removesuffix("_total") if self.declared.kind == "counter" else name

    @property
    def documentation(self) -> str:  # type: ignore[override]
        """The HELP line."""
        return self.declared.help

    @property
    def type(self) -> str:  # type: ignore[override]
        """Gauge, counter or histogram."""
        return self.declared.kind

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The lines as prometheus_client has them."""
        return [_sample(line) for line in self.text.decode().split("\n") if line]


def families(metrics: Sequence[Declared], written: Iterable[Texts]) -> list[Metric]:
    """The families of several GPUs' or ranks' lines."""
    columns = zip(*written, strict=True)
    return [WrittenFamily(metric, texts) for metric, texts in zip(metrics, columns, strict=False)] or [
        WrittenFamily(metric, ()) for metric in metrics
    ]


@lru_cache(maxsize=512)  # for the families that are written anew at each scrape
def line_prefix(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """A line up to its value: labels sorted by name, as prometheus_client has them."""
    inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels))
    return f"{name}{{{inside}}} " if inside else f"{name} "


def number_text(number: float) -> str:
    """The shortest text that is read as this number."""
    if math.isfinite(number):
        return repr(float(number))
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# These read what is written above and nothing else, at 3.5 µs a line where prometheus_client's parser takes 21: for a
# status page of 256 ranks it held the interpreter's lock for 0.1 s.
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPE = re.compile(r"\\(.)")


def _sample(line: str) -> Sample:
    series, _, number = line.rpartition(" ")
    name, _, inside = series.partition("{")
    labels = {label: _unescaped(value) if "\\" in value else value for label, value in LABEL.findall(inside)}
    return Sample(name, labels, float(number))


def _unescaped(value: str) -> str:
    return ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
