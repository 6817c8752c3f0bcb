"""The queries of the runbooks, as the gauntlet runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import promql_parser
import pytest
from testing import http_server, promtool
from validation.gauntlet.runbooks import PLACEHOLDER, RUNBOOKS, ask, queries

ALERTS = sorted(path.stem for path in RUNBOOKS.glob("Rankscope*.md"))
LAGGING = "RankscopeRankLagging"


@pytest.mark.parametrize("alert", ALERTS)
def test_every_block_is_one_query_that_prometheus_understands(alert: str) -> None:
    assert queries(alert)
    for query in queries(alert):
        promql_parser.parse(query.text)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_query_about_a_run_selects_that_run(alert: str) -> None:
    about = [query.text for query in queries(alert) if "rankscope_rank_" in query.text or "run:" in query.text]
    assert alert == "RankscopeExporterDown" or all('{run="RUN"' in text for text in about)


@pytest.fixture
def answers() -> Iterator[tuple[str, list[object]]]:
    """Yield the address of a Prometheus that answers each query with these samples, and the samples."""
    samples: list[object] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked = parse_qs(urlsplit(request.path).query)["query"][0]
        assert '"RUN"' not in asked
        result = {"status": "success", "data": {"resultType": "vector", "result": samples}}
        http_server.answers(json.dumps(result).encode(), **{"Content-Type": "application/json"})(request)

    with http_server.http_server(answer) as port:
        yield f"http://127.0.0.1:{port}", samples


def rank(number: str) -> object:
    return {"metric": {"rank": number}, "value": [0, "1"]}


@pytest.mark.parametrize(
    ("found", "is_right"), [([], False), ([rank("3"), rank("1")], True), ([rank("1"), rank("3")], False)]
)
def test_a_sorted_query_is_right_if_its_first_line_is_the_place_of_the_fault(
    answers: tuple[str, list[object]], found: list[object], is_right: bool
) -> None:
    url, samples = answers
    samples[:] = found
    (line,) = ask(url, "train", [(LAGGING, {"rank": "3"})])
    assert (line["alert"], line["query"], line["right"]) == (LAGGING, 1, is_right)


def test_a_killed_rank_is_first_though_its_end_is_noticed_after_the_others(tmp_path: Path) -> None:
    (query,) = queries("RankscopeRankCrashed")
    first = query.text.replace(PLACEHOLDER, '"train"').replace("sort(", "bottomk(1, ", 1)
    labels = 'instance="a", job="gpus", run="train"'
    ranks = {"0": ("sigterm", 29, 30.2), "1": ("killed", 29.1, 34.0), "2": ("exception", 29.2, 29.9)}
    series = {
        f'rankscope_rank_{name}{{{labels}, rank="{rank}"{more}}}': values
        for rank, (reason, progress, end) in ranks.items()
        for name, more, values in (
            ("exit_info", f', reason="{reason}"', "_x2 1x6"),
            ("exit_timestamp_seconds", "", f"_x2 {end}x6"),
            ("last_progress_timestamp_seconds", "", f"{progress}x8"),
        )
    }
    expected = {"labels": f'{{{labels}, rank="1", reason="killed"}}', "value": 29.1}
    question = {"expr": first, "eval_time": "60s", "exp_samples": [expected]}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [question],
    }
    assert not promtool.complaint(test, tmp_path / "test.yml")


def test_a_query_that_not_every_run_answers_may_return_nothing(answers: tuple[str, list[object]]) -> None:
    alert = "RankscopeTransferBound"
    lines = ask(answers[0], "train", [(alert, {})])
    may_be_empty = [query.may_be_empty for query in queries(alert)]
    assert [line["right"] for line in lines] == may_be_empty == [False, True, True, True]


def test_a_query_without_an_answer_is_not_right() -> None:
    (line,) = ask("http://127.0.0.1:9", "train", [(LAGGING, {"rank": "3"})])
    assert not line["right"]
    assert line["error"]
