"""A metric's lines on /metrics, written when its values change and kept until they do: what makes a scrape cheap.

The lines of GPUs and ranks are written by the threads that read them, once a second, so that a scrape only puts texts
together: filling and rendering families of 800 series took 3 ms, on a machine whose jobs keep the caches busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client.core import Metric

from rankscope_exporter.exposition.line import number_text
from rankscope_exporter.exposition.metric import Declaration, ReadMetric, Values, WrittenFamily

R = TypeVar("R")

Texts = Sequence[bytes]
"""What there is to say of one GPU or rank, a text a metric, as it is sent: to encode it costs a scrape 0.3 ms."""


class SampleCache(Generic[R]):
    """The samples of one GPU, or of one rank, as lines. Used by one thread at a time."""

    def __init__(self, metrics: Sequence[ReadMetric[R]], labels: Sequence[str] = ()) -> None:
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


def families(metrics: Sequence[Declaration], written: Iterable[Texts]) -> list[Metric]:
    """The families of several GPUs' or ranks' lines."""
    columns = zip(*written, strict=True)
    return [WrittenFamily(metric, texts) for metric, texts in zip(metrics, columns, strict=False)] or [
        WrittenFamily(metric, ()) for metric in metrics
    ]
