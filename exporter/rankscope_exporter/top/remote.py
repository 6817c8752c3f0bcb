"""The report of another machine: of an exporter's node, or of the analyzer's runs."""

from __future__ import annotations

from http import HTTPStatus

from pydantic import TypeAdapter, ValidationError

from rankscope.cli.explaining.fetching import within
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope_exporter.report.runs import NodeReport

ANSWERS_WITHIN = 10.0
REPORT = TypeAdapter(NodeReport)


class RemoteError(Exception):
    """The report cannot be read; the text says from where, and why."""


def fetch_report(server: Prometheus) -> NodeReport:
    """Return the report at `/api/v1/runs` of an exporter or an analyzer. Raise RemoteError."""
    try:
        answer = within(ANSWERS_WITHIN, lambda: server.ask("runs"))
    except (PrometheusError, TimeoutError) as error:
        raise RemoteError(f"{server.url}: {error}" if isinstance(error, TimeoutError) else str(error)) from error
    if answer.status != HTTPStatus.OK:
        raise RemoteError(f"{server.url} answers {answer.status} {answer.reason}")
    try:
        return REPORT.validate_json(answer.body)
    except ValidationError as error:
        raise RemoteError(f"{server.url} is not a Rankscope exporter or analyzer of this version") from error
