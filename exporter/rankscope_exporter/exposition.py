"""Puts families together as text: Prometheus's format 0.0.4, or OpenMetrics 1.0.0."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from rankscope_exporter.lines import WrittenFamily

EOF = b"# EOF\n"


class Exposition:
    """One notation. May be used by several threads."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._heads: dict[str, str] = {}  # by name: there are as many as metrics are declared

    def render(self, families: Iterable[Metric]) -> bytes:
        """The whole body. A family of prometheus_client's own is left to prometheus_client."""
        parts: list[str] = []
        for family in families:
            if isinstance(family, WrittenFamily):
                parts += (self._heads.get(family.full_name) or self._head(family), family.text)
            else:
                parts.append(self._foreign(family))
        body = "".join(parts).encode()
        return body + EOF if self._openmetrics else body

    def _head(self, family: WrittenFamily) -> str:
        text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        name, kind = family.full_name, family.type
        if self._openmetrics:
            # It has no counter without `_total`: dcgm-exporter's are of no known type there.
            kind = "unknown" if kind == "counter" and name == family.name else kind
            name, text = family.name, text.replace('"', r"\"")
        head = self._heads[family.full_name] = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        return head

    def _foreign(self, family: Metric) -> str:
        registry = Collected([family])
        if not self._openmetrics:
            return generate_latest(registry).decode()
        body: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # prometheus_client has no type
        return body.removesuffix(EOF).decode()


class Collected:
    """What prometheus_client's encoders take for a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families
