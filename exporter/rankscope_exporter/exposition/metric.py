"""A metric, declared once in a table: collectors emit from the declaration, and docs/metrics.md is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from rankscope_exporter.exposition.line import line_prefix, number_text, sample

R = TypeVar("R")
Part = TypeVar("Part")
Kind = Literal["gauge", "counter", "histogram"]

Values = float | Mapping[Any, float | None] | None
"""One number, or one by the value (str) or values (tuple of str) of the labels that tell them apart; None is absent."""

UNITS = ("seconds", "bytes", "watts", "joules", "hertz", "celsius")


@dataclass(frozen=True)
class Declaration:
    """What is true of a metric whatever its values are."""

    kind: Kind
    name: str
    """As on /metrics: a counter's ends in `_total`."""
    help: str
    """What it says, in a sentence or two: the HELP line and the reference's text."""
    labels: tuple[str, ...] = ()
    source: str = ""
    """The call or the fact that it is read from, where the text does not say."""
    since: str = "any"
    """The first GPU architecture that has it, by NVIDIA's documentation of the call."""

    @property
    def unit(self) -> str:
        """The base unit, which the name ends with; 1 for counts, states and infos."""
        stem = self.name.removesuffix("_total")
        if stem.endswith("_bytes_per_second"):
            return "bytes per second"
        return next((unit for unit in UNITS if stem.endswith(f"_{unit}")), "1")

    def prefix(self, labels: Sequence[str]) -> str:
        """A line up to its value. Raises ValueError unless there is a value for each label."""
        return line_prefix(self.name, tuple(zip(self.labels, labels, strict=True)))

    def family(self, values: Values) -> WrittenFamily:
        """These values, as a family that is written anew each time: for the few that are not worth remembering."""
        several: Mapping[Any, float | None] = values if isinstance(values, Mapping) else {(): values}
        lines = (
            f"{self.prefix((labels,) if isinstance(labels, str) else labels)}{number_text(number)}\n".encode()
            for labels, number in several.items()
            if number is not None
        )
        return WrittenFamily(self, lines)


class WrittenFamily(Metric):
    """A family whose lines exist already. Samples are made of them for who asks: the status page, and tests."""

    # What is an attribute of Metric's is made for who asks: a scrape has a hundred families, and asks for none of it.
    unit = ""

    def __init__(self, declared: Declaration, texts: Iterable[bytes]) -> None:
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
        """The text of the HELP line, not escaped yet."""
        return self.declared.help

    @property
    def type(self) -> str:  # type: ignore[override]
        """Gauge, counter or histogram."""
        return self.declared.kind

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The lines as prometheus_client has them."""
        return [sample(line) for line in self.text.decode().split("\n") if line]


@dataclass(frozen=True)
class ReadMetric(Declaration, Generic[R]):
    """A metric, and how its values come out of a reading."""

    values: Callable[[R], Values] = field(kw_only=True)


@dataclass(frozen=True)
class HistogramMetric(ReadMetric[R]):
    """A distribution. Its values are by the suffix of the name (`_bucket`, `_count`, `_sum`) and the bound."""

    def prefix(self, labels: Sequence[str]) -> str:
        """A bucket's bound stands in the label `le`."""
        *common, suffix, bound = labels
        bounds = [("le", bound)] if bound else []
        return line_prefix(self.name + suffix, (*zip(self.labels, common, strict=True), *bounds))


@dataclass(frozen=True)
class NamingMetric(ReadMetric[R]):
    """Its values are by pairs of a label's name and value: each reading has labels of its own, after the metric's."""

    def prefix(self, labels: Sequence[Any]) -> str:
        """The names of the metric's own labels are known."""
        count = len(self.labels)
        return line_prefix(self.name, (*zip(self.labels, labels[:count], strict=True), *labels[count:]))


def whole(reading: R) -> R:
    """The part that is all of a reading."""
    return reading


class MetricTable(Generic[R, Part]):
    """Declares metrics whose names begin alike, whose first labels are the same, and that are of one part of a reading.

    They are absent from a reading without that part. `source` and `since` are those of all that say no other.
    """

    def __init__(
        self,
        prefix: str,
        labels: tuple[str, ...],
        part: Callable[[R], Part | None],
        *,
        source: str = "",
        since: str = "any",
    ) -> None:
        """`part` takes it out of a reading; None if there is none."""
        self._prefix = prefix
        self._labels = labels
        self._part = part
        self._source = source
        self._since = since

    def gauge(
        self,
        name: str,
        text: str,
        value: Callable[[Part], Values],
        *labels: str,
        source: str = "",
        since: str = "",
        without: float | None = None,
    ) -> ReadMetric[R]:
        """`labels` are those besides the table's; `without` is the value where a reading has no such part."""
        return ReadMetric(
            "gauge", *self._described(name, text, labels, source, since), values=self._values(value, without)
        )

    def counter(
        self, name: str, text: str, value: Callable[[Part], Values], *labels: str, source: str = "", since: str = ""
    ) -> ReadMetric[R]:
        """As `gauge`; the name is written with its end `_total`."""
        return ReadMetric("counter", *self._described(name, text, labels, source, since), values=self._values(value))

    def histogram(
        self, name: str, text: str, value: Callable[[Part], Values], *, source: str = "", since: str = ""
    ) -> HistogramMetric[R]:
        """Of the buckets that `value` gives."""
        return HistogramMetric("histogram", *self._described(name, text, (), source, since), values=self._values(value))

    def naming(self, name: str, text: str, value: Callable[[Part], Values]) -> NamingMetric[R]:
        """A gauge with labels that `value` names."""
        return NamingMetric("gauge", *self._described(name, text, (), "", ""), values=self._values(value))

    def _described(
        self, name: str, text: str, labels: tuple[str, ...], source: str, since: str
    ) -> tuple[str, str, tuple[str, ...], str, str]:
        labels = (*self._labels, *labels)
        return f"{self._prefix}{name}", text, labels, source or self._source, since or self._since

    def _values(self, value: Callable[[Part], Values], without: float | None = None) -> Callable[[R], Values]:
        part_of = self._part

        def values(reading: R) -> Values:
            part = part_of(reading)
            return without if part is None else value(part)

        return values
