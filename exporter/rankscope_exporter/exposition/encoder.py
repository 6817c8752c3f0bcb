"""Rendering of metric families as Prometheus text format 0.0.4 or OpenMetrics 1.0.0."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration, WrittenFamily

EOF = b"# EOF\n"
TOTAL = "_total"


class Encoder:
    """Encoder of one format. Safe for use by several threads."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._heads: dict[str, bytes] = {}  # by metric name

    def render(self, families: Iterable[Metric]) -> bytes:
        """Return the whole body."""
        parts: list[bytes] = []
        for family in families:
            assert isinstance(family, WrittenFamily)
            parts += (self._heads.get(family.declared.name) or self._head(family.declared), family.text)
        if self._openmetrics:
            parts.append(EOF)
        return b"".join(parts)

    def _head(self, declared: Declaration) -> bytes:
        text = declared.help.replace("\\", r"\\").replace("\n", r"\n")
        name, kind = declared.name, str(declared.kind)
        if self._openmetrics:
            text = text.replace('"', r"\"")
            if kind == "counter":  # in OpenMetrics it ends in `_total`; dcgm-exporter's are of type unknown
                name, kind = (name.removesuffix(TOTAL), kind) if name.endswith(TOTAL) else (name, "unknown")
        head = self._heads[declared.name] = f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()
        return head
