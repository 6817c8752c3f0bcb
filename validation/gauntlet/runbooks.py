"""Run the queries of an alert's runbook while the fault lasts."""

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
    text: str
    may_be_empty: bool
    """Whether the page says that only some runs have an answer."""

    @property
    def is_sorted(self) -> bool:
        """Return whether the first line of the answer names the place of the fault."""
        return self.text.startswith("sort")


def queries(alert: str) -> list[Query]:
    """Return the queries of the alert's runbook, in their order."""
    return [Query(text.strip(), bool(empty)) for empty, text in BLOCK.findall((RUNBOOKS / f"{alert}.md").read_text())]


def ask(url: str, run: str, notified: Iterable[tuple[str, Mapping[str, str]]]) -> list[dict[str, Any]]:
    """Return the current answers to the queries of each alert's runbook. `notified` has alerts and places of faults."""
    prometheus = Prometheus(url, None)
    return [line for alert, place in notified for line in _ask(prometheus, run, alert, place)]


def _ask(prometheus: Prometheus, run: str, alert: str, place: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for number, query in enumerate(queries(alert), start=1):
        asked = {"alert": alert, "query": number}
        try:
            found = prometheus.query(query.text.replace(PLACEHOLDER, f'"{run}"'))
        except PrometheusError as error:
            yield {**asked, "right": False, "error": str(error)}
            continue
        first = found[0].labels if found else {}
        shared = place.keys() & first.keys() if query.is_sorted else ()
        is_right = all(first[name] == place[name] for name in shared) if found else query.may_be_empty
        yield {**asked, "right": is_right, "samples": len(found), "first": first}
