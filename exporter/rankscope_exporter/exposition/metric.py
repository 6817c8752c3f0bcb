"""Metric declarations. Collectors export from them, and docs/metrics.md is generated from them."""

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
"""One number, or one per value (str) or values (tuple of str) of the distinguishing labels; None is absent."""

UNITS = ("seconds", "bytes", "watts", "joules", "hertz", "celsius")


@dataclass(frozen=True)
class Declaration:
    """The fixed properties of a metric."""

    kind: Kind
    name: str
    """Name on /metrics; a counter's name ends in `_total`."""
    help: str
    """One or two sentences for the HELP line and the reference."""
    labels: tuple[str, ...] = ()
    source: str = ""
    """NVML call or other source of the values, unless `help` names it."""
    since: str = "any"
    """First GPU architecture that has it, according to NVIDIA's documentation of the call."""

    @property
    def unit(self) -> str:
        """Base unit, which is the suffix of the name; 1 for counts, states and infos."""
        stem = self.name.removesuffix("_total")
        if stem.endswith("_bytes_per_second"):
            return "bytes per second"
        return next((unit for unit in UNITS if stem.endswith(f"_{unit}")), "1")

    def prefix(self, labels: Sequence[str]) -> str:
        """Return a line up to its value. Raises ValueError unless there is one value per label."""
        return line_prefix(self.name, tuple(zip(self.labels, labels, strict=True)))

    def family(self, values: Values) -> WrittenFamily:
        """Return a family of these values without caching, for the few metrics that are not worth it."""
        by_labels: Mapping[Any, float | None] = values if isinstance(values, Mapping) else {(): values}
        lines = (
            f"{self.prefix((labels,) if isinstance(labels, str) else labels)}{number_text(number)}\n".encode()
            for labels, number in by_labels.items()
            if number is not None
        )
        return WrittenFamily(self, lines)


class WrittenFamily(Metric):
    """A family of rendered lines. Samples are parsed from them on demand, for the status page and tests."""

    # Attributes of Metric are computed on demand: a scrape has a hundred families and reads none of these.
    unit = ""

    def __init__(self, declared: Declaration, texts: Iterable[bytes]) -> None:
        # Metric.__init__ is not called: it validates the name with a regex and sets `samples`.
        self.declared = declared
        self.text = b"".join(texts)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name in prometheus_client's convention: a counter without `_total`."""
        name = self.declared.name
        return name.removesuffix("_total") if self.declared.kind == "counter" else name

    @property
    def documentation(self) -> str:  # type: ignore[override]
        """Text of the HELP line, not escaped."""
        return self.declared.help

    @property
    def type(self) -> str:  # type: ignore[override]
        """Gauge, counter or histogram."""
        return self.declared.kind

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The lines as prometheus_client's samples."""
        return [sample(line) for line in self.text.decode().split("\n") if line]


@dataclass(frozen=True)
class ReadMetric(Declaration, Generic[R]):
    """A metric and the function that extracts its values from a reading."""

    values: Callable[[R], Values] = field(kw_only=True)


@dataclass(frozen=True)
class HistogramMetric(ReadMetric[R]):
    """A histogram. Its values are by suffix of the name (`_bucket`, `_count`, `_sum`) and bucket bound."""

    def prefix(self, labels: Sequence[str]) -> str:
        """Return a line up to its value; a bucket's bound becomes the label `le`."""
        *common, suffix, bound = labels
        bounds = [("le", bound)] if bound else []
        return line_prefix(self.name + suffix, (*zip(self.labels, common, strict=True), *bounds))


@dataclass(frozen=True)
class DynamicLabelMetric(ReadMetric[R]):
    """A metric whose readings add labels of their own. Its values are by pairs of label name and value."""

    def prefix(self, labels: Sequence[Any]) -> str:
        """Return a line up to its value, with the metric's own labels first."""
        count = len(self.labels)
        return line_prefix(self.name, (*zip(self.labels, labels[:count], strict=True), *labels[count:]))


def whole(reading: R) -> R:
    """Return the reading itself, for metrics that use all of it."""
    return reading


class MetricTable(Generic[R, Part]):
    """Factory of metrics that share a name prefix, their first labels and one part of a reading.

    They are absent if a reading lacks that part. `source` and `since` are defaults.
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
        """Initialize the table. `part` extracts the part from a reading; None if there is none."""
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
        """Declare a gauge. `labels` follow the table's labels; `without` is the value if a reading lacks the part."""
        return ReadMetric(
            "gauge", *self._described(name, text, labels, source, since), values=self._values(value, without)
        )

    def counter(
        self, name: str, text: str, value: Callable[[Part], Values], *labels: str, source: str = "", since: str = ""
    ) -> ReadMetric[R]:
        """Declare a counter. `name` includes `_total`."""
        return ReadMetric("counter", *self._described(name, text, labels, source, since), values=self._values(value))

    def histogram(
        self, name: str, text: str, value: Callable[[Part], Values], *, source: str = "", since: str = ""
    ) -> HistogramMetric[R]:
        """Declare a histogram with the buckets that `value` returns."""
        return HistogramMetric("histogram", *self._described(name, text, (), source, since), values=self._values(value))

    def naming(self, name: str, text: str, value: Callable[[Part], Values]) -> DynamicLabelMetric[R]:
        """Declare a gauge with additional label names, returned by `value`."""
        return DynamicLabelMetric("gauge", *self._described(name, text, (), "", ""), values=self._values(value))

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
