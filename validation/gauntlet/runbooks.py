"""Asks Prometheus what the runbook of an alert would have one ask, while the fault lasts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs/runbooks"
BLOCK = re.compile(r"```promql( optional)?\n(.*?)```", re.DOTALL)
PLACEHOLDER = '"RUN"'


class Query(NamedTuple):
    """One of a runbook."""

    text: str
    may_be_empty: bool
    """Where the page says that only some runs have it."""

    @property
    def is_sorted(self) -> bool:
        """The first line is who it is about, then."""
        return self.text.startswith("sort")


def queries(alert: str) -> list[Query]:
    """All of its runbook, in their order."""
    return [Query(text.strip(), bool(empty)) for empty, text in BLOCK.findall((RUNBOOKS / f"{alert}.md").read_text())]


def ask(url: str, run: str, told: Iterable[tuple[str, Mapping[str, str]]]) -> list[dict[str, Any]]:
    """What the queries of each alert's runbook return at this moment. `told` has the place of the fault, too."""
    prometheus = Prometheus(url, None)
    return [line for alert, place in told for line in _ask(prometheus, run, alert, place)]


def _ask(prometheus: Prometheus, run: str, alert: str, place: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for number, query in enumerate(queries(alert), start=1):
        asked = {"alert": alert, "query": number}
        try:
            found = prometheus.query(query.text.replace(PLACEHOLDER, f'"{run}"'))
        except PrometheusError as error:
            yield {**asked, "right": False, "said": str(error)}
            continue
        first = found[0].labels if found else {}
        shared = place.keys() & first.keys() if query.is_sorted else ()
        is_right = all(first[name] == place[name] for name in shared) if found else query.may_be_empty
        yield {**asked, "right": is_right, "samples": len(found), "first": first}
