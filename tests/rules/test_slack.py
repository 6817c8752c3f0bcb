"""The Slack receiver: what a real Alertmanager posts to Slack's API with the shipped template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from testing.http_server import answers, http_server, sent
from testing.waiting import eventually
from tests.rules.alertmanager import commented_receiver, running_with_template

NAMES = {
    "<!channel>": "&lt;!channel&gt;",
    "<!here|all> <@U1>": "&lt;!here|all&gt; &lt;@U1&gt;",
    "<http://evil.invalid|the runbook>": "&lt;http://evil.invalid|the runbook&gt;",
    "a&b": "a&amp;b",
    "&lt;!channel&gt;": "&amp;lt;!channel&amp;gt;",
    "a\nb\r\n\tc": "a b c",
    "*bold* _low_ ~gone~ `code` ```": "*bold* _low_ ~gone~ `code` ```",
    '"quoted" {{ .Labels }} \\s $1': '"quoted" {{ .Labels }} \\s $1',
    "ünï-7": "ünï-7",
}
LINK = re.compile(r"<(http[^<>|\s]+)\|([A-Z][a-z]+)>")


@pytest.fixture
def posted(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that fires or resolves an alert about each run, and returns what Slack receives."""
    messages: list[dict[str, Any]] = []

    def receive(request: BaseHTTPRequestHandler) -> None:
        messages.append(json.loads(sent(request)))
        answers(b"ok")(request)

    with http_server(receive) as port:
        receiver = commented_receiver("slack_configs") | {"api_url": f"http://127.0.0.1:{port}/services/x"}
        with running_with_template(tmp_path, slack_configs=[receiver]) as alertmanager:

            def post(names: list[str], **fields: str) -> list[dict[str, Any]]:
                before = len(messages)
                alertmanager.post([alert(name) | fields for name in names])
                eventually(lambda: len(messages) == before + len(names), pause=0.05)
                return [message["attachments"][0] for message in messages[before:]]

            yield post


def alert(run: str) -> dict[str, Any]:
    return {
        "labels": {"alertname": "RankscopeRankStuck", "severity": "critical", "run": run, "owner": "1000"},
        "annotations": {
            "summary": f"Run {run} hangs",
            "description": f"Rank 0 of {run} is stuck.",
            "runbook_url": "https://example.invalid/runbooks/RankscopeRankStuck.md",
            "dashboard_url": "https://example.invalid/d/run?a=1&b=<x|y>",
        },
        "generatorURL": "http://example.invalid/graph?g0.expr=a%3Eb&g0.tab=1",
    }


def test_markup_in_a_runs_name_is_plain_text_in_slack(posted: Any) -> None:
    attachments = posted(list(NAMES))
    titles = {f"[CRITICAL] Run {text} hangs" for text in NAMES.values()}
    assert {one["title"] for one in attachments} == {one["fallback"] for one in attachments} == titles
    texts = [re.match(r"Since [-0-9]+ [0-9:]+ \w+\. (.*)\n", one["text"]) for one in attachments]
    assert {text and text[1] for text in texts} == {f"Rank 0 of {name} is stuck." for name in NAMES.values()}


def test_only_our_links_are_links_and_nothing_of_the_text_is_formatted(posted: Any) -> None:
    (attachment,) = posted(["<!channel> *x*"])
    links = {name: url for url, name in LINK.findall(attachment["text"])}
    assert links.pop("Silence").endswith("run%3D~%22..channel...x.%22%7D")
    assert links == {
        "Runbook": "https://example.invalid/runbooks/RankscopeRankStuck.md",
        "Dashboard": "https://example.invalid/d/run?a=1&amp;b=%3Cx%7Cy%3E",
        "Prometheus": "http://example.invalid/graph?g0.expr=a%3Eb&amp;g0.tab=1",
    }
    attachment["text"] = LINK.sub("", attachment["text"])
    assert "<" not in json.dumps(attachment)
    assert "text" not in attachment["mrkdwn_in"]
    assert "fields" not in attachment


def test_a_resolved_fault_is_named_and_its_text_is_quoted(posted: Any) -> None:
    assert posted(["llm"])[0]["color"] == "danger"
    (attachment,) = posted(["llm"], endsAt=datetime.now(UTC).isoformat())
    assert attachment["title"] == "[RESOLVED] RankscopeRankStuck, run llm"
    assert attachment["color"] == "good"
    line, links = attachment["text"].split("\n", 1)
    assert re.fullmatch(r"Fired .* to .* \(\d+ s\)\. It was reported as: Run llm hangs", line)
    assert "Silence" not in links
