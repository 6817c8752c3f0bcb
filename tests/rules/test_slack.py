"""The commented Slack receiver of the configuration: what a real Alertmanager posts to Slack's API."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import fast
from testing import servers
from testing.http_server import answers, http_server, sent
from testing.waiting import eventually
from tests.rules.alertmanager import NOWHERE

CONFIG = Path(__file__).resolve().parents[2] / "deploy/alertmanager/alertmanager.yml"
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


def slack_configs() -> Any:
    """Return the commented receivers of the shipped file."""
    found = re.search(r"^    # slack_configs:\n(?:    #   .*\n)+", CONFIG.read_text(), re.M)
    assert found
    return yaml.safe_load(re.sub(r"^    # ", "", found[0], flags=re.M))["slack_configs"]


@contextmanager
def slack() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve Slack's API. Yields its URL and the messages that it receives."""
    messages: list[dict[str, Any]] = []

    def receive(request: BaseHTTPRequestHandler) -> None:
        messages.append(json.loads(sent(request)))
        answers(b"ok")(request)

    with http_server(receive) as port:
        yield f"http://127.0.0.1:{port}/services/x", messages


@pytest.fixture
def posted(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that fires or resolves an alert about each run, and returns what Slack receives."""
    with slack() as (url, messages):
        config = yaml.safe_load(fast.alertmanager_config(NOWHERE))
        config["receivers"] = [{"name": "operators", "slack_configs": slack_configs()}]
        config["receivers"][0]["slack_configs"][0]["api_url"] = url
        server = servers.alertmanager(tmp_path, yaml.safe_dump(config))
        server.start()

        def post(names: list[str], **fields: str) -> list[dict[str, Any]]:
            before = len(messages)
            body = json.dumps([alert(name) | fields for name in names]).encode()
            headers = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/api/v2/alerts", body, headers)).close()
            eventually(lambda: len(messages) == before + len(names), pause=0.05)
            return [message["attachments"][0] for message in messages[before:]]

        try:
            yield post
        finally:
            server.stop()


def alert(run: str) -> dict[str, Any]:
    return {
        "labels": {"alertname": "RankscopeRankStuck", "severity": "critical", "run": run, "owner": "1000"},
        "annotations": {
            "summary": f"Run {run} hangs",
            "description": f"Rank 0 of {run} is stuck.",
            "runbook_url": "https://example.invalid/runbooks/RankscopeRankStuck.md",
        },
    }


def test_markup_in_a_runs_name_is_plain_text_in_slack(posted: Any) -> None:
    attachments = posted(list(NAMES))
    titles = {f"Run {text} hangs" for text in NAMES.values()}
    assert {one["title"] for one in attachments} == {one["fallback"] for one in attachments} == titles
    texts = [re.fullmatch(r"Since [-0-9]+ [0-9:]+ \w+\. (.*) https:.*\n?", one["text"]) for one in attachments]
    assert {text and text[1] for text in texts} == {f"Rank 0 of {name} is stuck." for name in NAMES.values()}


def test_only_the_runbook_is_a_link_and_nothing_of_the_text_is_formatted(posted: Any) -> None:
    (attachment,) = posted(["<!channel> *x*"])
    assert "<" not in json.dumps(attachment)
    assert attachment["text"].strip().endswith("RankscopeRankStuck.md")
    assert "text" not in attachment["mrkdwn_in"]
    assert "fields" not in attachment


def test_the_title_of_a_resolved_fault_says_so(posted: Any) -> None:
    posted(["llm"])
    (attachment,) = posted(["llm"], endsAt=datetime.now(UTC).isoformat())
    assert attachment["title"] == "Resolved: Run llm hangs"
