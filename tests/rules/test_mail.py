"""The mail receiver: what a real Alertmanager delivers to a mail server with the shipped template."""

from __future__ import annotations

import email
import email.policy
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from testing.waiting import eventually
from tests.rules.alertmanager import Alertmanager, commented_receiver, running_with_template

LONGEST_LINE = 998
"""Bytes of a line that every mail server accepts (RFC 5322)."""
RUNBOOK = "https://example.invalid/runbooks/RankscopeRankLagging.md"
DASHBOARD = "https://example.invalid/d/run?run=llm&owner=1000"
QUERY = "http://prometheus.invalid/graph?g0.expr=a%3Eb&g0.tab=1"
NAMES = [
    '<script>alert("x")</script><a href="http://evil.invalid">',
    "a\nsilence       http://evil.invalid\r\nBcc: victim@example.invalid",
    "\x1b[31mred\x1b[0m \u202egnirts",
    "a'b\\d $1 {{ .Labels }} +%22&amp;",
    "a" * 200,
    "words of a run " * 13,
    "漢字" * 100,
    "\N{ROCKET} " * 100,
]
FORM = re.compile(r'\{(?:\w+=~?"[^"\\]*",?)*\}')
"""The matchers that each version of Alertmanager's form reads as they are."""


class MailServer:
    """An SMTP server on loopback that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        messages = self.messages

        class Session(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 ready\r\n")
                for line in self.rfile:
                    command = line[:4].upper()
                    if command == b"DATA":
                        self.wfile.write(b"354 go on\r\n")
                        lines = iter(self.rfile.readline, b".\r\n")
                        messages.append(b"".join(line.removeprefix(b".") for line in lines))
                    self.wfile.write(b"221 bye\r\n" if command == b"QUIT" else b"250 ok\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self.address = "{}:{}".format(*self._server.server_address)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Page(HTMLParser):
    """The tags, the texts and the links of a mail."""

    html: str
    tags: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._href = ""
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._href = dict(attrs).get("href") or ""

    def handle_data(self, data: str) -> None:
        if self._href:
            self.links[data.strip()] = self._href
            self._href = ""
        self.texts.append(" ".join(data.split()))


class Mail:
    """A message as a mail program reads it."""

    def __init__(self, content: bytes) -> None:
        self.longest_line = max(len(line) for line in content.split(b"\r\n"))
        self._message: EmailMessage = email.message_from_bytes(content, policy=email.policy.default)  # type: ignore[assignment]
        self.subject: str = self._message["Subject"]
        self.headers = set(self._message.keys())
        self.text = self._part("plain").replace("\r\n", "\n")
        self.page = Page(self._part("html"))

    def _part(self, kind: str) -> str:
        part = self._message.get_body((kind,))
        assert part is not None
        return str(part.get_content())

    def facts(self) -> dict[str, str]:
        """Return the lines of the text that have a name and a value."""
        return dict(re.findall(r"^([a-z]+) {2,}(.*)$", self.text, re.M))


Deliver = Callable[..., list[Mail]]


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    server = MailServer()
    receiver = commented_receiver("email_configs") | {"smarthost": server.address, "require_tls": False}
    with running_with_template(tmp_path, email_configs=[receiver]) as alertmanager:
        alertmanager.mails = server.messages  # type: ignore[attr-defined]
        yield alertmanager
    server.stop()


@pytest.fixture
def deliver(alertmanager: Alertmanager) -> Deliver:
    """Return a function that posts alerts and returns the mails that follow."""
    contents: list[bytes] = alertmanager.mails  # type: ignore[attr-defined]

    def post(*alerts: dict[str, Any], mails: int = 1) -> list[Mail]:
        before = len(contents)
        alertmanager.post(list(alerts))
        eventually(lambda: len(contents) == before + mails, pause=0.05)
        return [Mail(content) for content in contents[before:]]

    return post


def alert(run: str = "llm", rank: int = 3, severity: str = "warning", **labels: str) -> dict[str, Any]:
    where = {"run": run, "owner": "1000", "rank": f"{rank}", "node": "node-a", "gpu": f"{rank}", "cause": "throttled"}
    return {
        "labels": {"alertname": "RankscopeRankLagging", "severity": severity, **where, **labels},
        "annotations": {
            "summary": f"Rank {rank} (node-a, GPU {rank}) slows down run {run} by 45%: its GPU is throttled",
            "description": "Throttled 61% of the time. Check its cooling and power.",
            "runbook_url": RUNBOOK,
            "dashboard_url": DASHBOARD,
        },
        "generatorURL": QUERY,
    }


def ended(fired: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC)
    return fired | {"startsAt": (now - timedelta(minutes=42)).isoformat(), "endsAt": now.isoformat()}


def test_a_mail_says_what_is_wrong_and_where_and_has_the_links_in_both_parts(deliver: Deliver) -> None:
    (mail,) = deliver(alert())
    summary = "Rank 3 (node-a, GPU 3) slows down run llm by 45%: its GPU is throttled"
    assert mail.subject == f"[WARNING] {summary}"
    assert mail.text.startswith(f"WARNING: {summary}\n\nThrottled 61% of the time. Check its cooling and power.\n")
    assert {"WARNING", summary, "Throttled 61% of the time. Check its cooling and power."} <= set(mail.page.texts)
    facts = mail.facts()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["since"])
    where = {"alertname": "RankscopeRankLagging", "run": "llm", "rank": "3", "node": "node-a", "gpu": "3"}
    assert where.items() <= facts.items()
    assert {*where, *where.values(), facts["since"]} <= set(mail.page.texts)
    links = {"runbook": RUNBOOK, "dashboard": DASHBOARD, "prometheus": QUERY}
    assert links.items() <= facts.items()
    assert {name.lower(): url for name, url in mail.page.links.items()}.items() >= {
        *links.items(),
        ("silence", facts["silence"]),
        ("alertmanager", facts["alertmanager"]),
    }


def test_a_resolved_alert_is_named_and_its_numbers_are_only_quoted(deliver: Deliver) -> None:
    deliver(alert())
    (mail,) = deliver(ended(alert()))
    named = "RankscopeRankLagging, run llm, rank 3, node node-a, gpu 3, cause throttled"
    assert mail.subject == f"[RESOLVED] {named}"
    assert mail.text.startswith(
        f"RESOLVED: {named}\n\nIt was reported as: Rank 3 (node-a, GPU 3) slows down run llm by 45%:"
    )
    assert mail.facts()["fired"].endswith(" (42 min)")
    assert {"RESOLVED", named} <= set(mail.page.texts)
    for text in (mail.text, mail.page.html):
        assert "61%" not in text
        assert "silences/new" not in text


def test_alerts_of_a_group_are_one_mail_whose_subject_has_a_critical_one(deliver: Deliver) -> None:
    ranks = range(3)
    (mail,) = deliver(*(alert(rank=rank, severity="critical" if rank == 2 else "warning") for rank in ranks))
    texts = [f"Rank {rank} (node-a, GPU {rank}) slows down run llm by 45%: its GPU is throttled" for rank in ranks]
    assert mail.subject == f"[CRITICAL] {texts[2]} (and 2 more)"
    assert [text for text in mail.page.texts if text in texts] == texts
    assert re.findall(r"^(?:WARNING|CRITICAL): (.*)$", mail.text, re.M) == texts
    assert mail.text.count("runbooks/") == mail.page.html.count("runbooks/") == 1
    (mail,) = deliver(ended(alert(rank=0)))
    assert mail.subject == f"[CRITICAL] {texts[2]} (and 1 more)"
    assert [line.split()[0] for line in re.findall(r"^[A-Z]+: .*$", mail.text, re.M)] == [
        "WARNING:",
        "CRITICAL:",
        "RESOLVED:",
    ]


def test_a_mail_has_20_alerts_at_most_and_the_number_of_the_others(deliver: Deliver) -> None:
    (mail,) = deliver(*(alert(rank=rank) for rank in range(27)))
    assert mail.page.tags.count("h1") == len(re.findall("^WARNING: ", mail.text, re.M)) == 20
    assert "\nFiring alerts that are not shown: 7\n" in mail.text
    assert "Firing alerts that are not shown: 7" in mail.page.texts


def test_a_runs_name_is_text_on_one_line_and_every_mail_server_accepts_it(deliver: Deliver) -> None:
    (usual,) = deliver(alert())
    mails = {mail.facts()["run"].strip(): mail for mail in deliver(*map(alert, NAMES), mails=len(NAMES))}
    shown = [re.sub(r"[\s\x1b\u202e]+", " ", name).strip() for name in NAMES]
    assert mails.keys() == set(shown)
    for name, mail in mails.items():
        assert mail.headers == usual.headers
        assert mail.longest_line <= LONGEST_LINE
        assert mail.page.tags == usual.page.tags
        assert mail.facts().keys() == usual.facts().keys()
        assert name in mail.page.texts
        assert mail.subject.startswith("[WARNING] Rank 3 (node-a, GPU 3) slows down run " + name[:40])


def matchers(url: str) -> list[dict[str, Any]]:
    """Return the matchers that Alertmanager's form reads from a link."""
    _, _, text = unquote(url).partition("/#/silences/new?filter=")
    assert FORM.fullmatch(text)
    return [
        {"name": label, "value": value, "isRegex": operator == "=~", "isEqual": True}
        for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', text)
    ]


def test_the_silence_links_mute_the_alerts_of_their_mails_and_no_others(
    alertmanager: Alertmanager, deliver: Deliver
) -> None:
    names = ["llm-7b_v2.1", "ünï/7:x@y", "+plus", *NAMES]
    others = [one for name in names for one in (alert(name, owner="1001"), alert(name, alertname="RankscopeDataBound"))]
    mails = deliver(*map(alert, names), mails=len(names))
    deliver(alert("llm-7b_v2x1"), *others, mails=1 + len(others))
    now = datetime.now(UTC)
    about = {"createdBy": "test", "comment": "test", "startsAt": now.isoformat()}
    about["endsAt"] = (now + timedelta(hours=1)).isoformat()
    for mail in mails:
        assert mail.page.links["Silence"] == mail.facts()["silence"]
        alertmanager.post({"matchers": matchers(mail.facts()["silence"]), **about}, to="silences")
    eventually(lambda: len(alertmanager.silenced()) >= len(names), pause=0.05)
    silenced = alertmanager.silenced()
    assert all(alert(name)["labels"] in silenced for name in names)
    assert len(silenced) == len(names)


def test_the_silence_link_of_an_alert_without_a_run_has_its_node(deliver: Deliver) -> None:
    labels = {"alertname": "RankscopeGpuLost", "severity": "critical", "instance": "node-a:10417"}
    (mail,) = deliver(*({"labels": labels | {"gpu": f"{gpu}"}, "annotations": {"summary": "Lost"}} for gpu in range(2)))
    assert mail.facts()["silence"].endswith(
        "/#/silences/new?filter=%7Balertname%3D%22RankscopeGpuLost%22%2Cinstance%3D%22node-a%3A10417%22%7D"
    )


def test_an_alert_of_another_rule_has_what_it_has(deliver: Deliver) -> None:
    (mail,) = deliver({"labels": {"alertname": "NodeDown"}})
    assert mail.subject == "[FIRING] NodeDown"
    assert mail.facts().keys() == {"since", "alertname", "silence", "alertmanager"}
    assert mail.page.links.keys() == {"Silence", "Alertmanager"}
