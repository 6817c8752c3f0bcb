"""Values of metric families by name and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Labels = tuple[str, ...]


class Values:
    """The values in metric families. A missing label is empty.

    Samples are made only for the families that are read, and once: a family of written lines parses them each time.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = {_name(family): family for family in families}
        self._samples: dict[str, Sequence[Sample]] = {}

    def rows(self, name: str, *labels: str) -> dict[Labels, Mapping[str, str]]:
        """Return the label sets of a metric by the values of `labels`."""
        return {tuple(s.labels.get(label, "") for label in labels): s.labels for s in self._of(name)}

    def by(self, name: str, *labels: str) -> dict[Labels, float]:
        """Return the values of a metric by the values of `labels`."""
        return {tuple(s.labels.get(label, "") for label in labels): s.value for s in self._of(name)}

    def _of(self, name: str) -> Sequence[Sample]:
        if name not in self._samples:
            family = self._families.get(name)
            self._samples[name] = tuple(family.samples) if family else ()
        return self._samples[name]


def _name(family: Metric) -> str:
    """Return the name in the family's lines."""
    return f"{family.name}_total" if family.type == "counter" else family.name
