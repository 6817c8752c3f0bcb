"""A scrape isolates and times the collectors and negotiates the format."""

from __future__ import annotations

import gzip
from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.exposition.scrape import OPENMETRICS, Scrape


class Good:
    name, help = "good", ""

    def collect(self) -> Iterable[Metric]:
        yield Declaration("gauge", "rankscope_good", "A value.").family(7)


class Failing:
    name, help = "failing", ""
    is_broken = True

    def collect(self) -> Iterable[Metric]:
        yield Declaration("gauge", "rankscope_half", "A value before the failure.").family(1)
        if self.is_broken:
            raise OSError("the disk is gone")


def text(scrape: Scrape, accept: str = "", accept_encoding: str = "") -> str:
    return scrape.render(accept, accept_encoding)[0].decode()


def test_a_failing_collector_affects_only_its_own_metrics() -> None:
    body = text(Scrape([Failing(), Good()]))
    assert "rankscope_good 7.0" in body
    assert "rankscope_half" not in body
    assert 'rankscope_exporter_collector_success{collector="failing"} 0.0' in body
    assert 'rankscope_exporter_collector_success{collector="good"} 1.0' in body


def test_a_failure_is_logged_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    collector = Failing()
    scrape = Scrape([collector])
    scrape.collect()
    scrape.collect()
    collector.is_broken = False
    scrape.collect()
    assert [entry.getMessage() for entry in caplog.records] == [
        "collector failing failed: the disk is gone",
        "collector failing recovered",
    ]


def test_each_collectors_duration_is_exported() -> None:
    times = iter([10.0, 10.5])
    body = text(Scrape([Good()], clock=lambda: next(times)))
    assert 'rankscope_exporter_collector_duration_seconds{collector="good"} 0.5' in body


@pytest.mark.parametrize(
    ("accepted", "is_openmetrics"),
    [
        # Prometheus' defaults, and with the text format first.
        (f"{OPENMETRICS};version=1.0.0;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,text/plain;q=0.4,*/*;q=0.2", True),
        (f"text/plain;version=0.0.4;q=0.6,{OPENMETRICS};version=1.0.0;q=0.5,*/*;q=0.4", False),
        (f"text/plain;version=1.0.0;q=0.6,{OPENMETRICS};version=1.0.0;q=0.5", False),
        # The order does not matter, and 1 is the default.
        (f"{OPENMETRICS};q=0.5, text/plain;q=0.6", False),
        (f"{OPENMETRICS};q=0.5, text/plain", False),
        (f"text/plain;q=0.5, {OPENMETRICS}", True),
        (f"text/plain, {OPENMETRICS}", True),
        (f"text/plain;version=1.0.0, {OPENMETRICS}", False),
        # 0 is a refusal.
        (f"{OPENMETRICS};q=0", False),
        (f"{OPENMETRICS};q=0.000, */*", False),
        (f"text/plain;q=0, {OPENMETRICS};q=0.1", True),
        ("text/plain;q=0, */*;q=0.1", True),
        ("text/plain;q=0", False),
        # The most specific range decides.
        ("*/*", False),
        (f"*/*, {OPENMETRICS}", True),
        (f"*/*, {OPENMETRICS};q=0.9", False),
        (f"text/*;q=0.8, {OPENMETRICS};q=0.7", False),
        (f"text/*;q=0.6, {OPENMETRICS};q=0.7", True),
        (f"*/*;q=0.9, text/plain;q=0.5, {OPENMETRICS};q=0.7", True),
        ("application/*, text/plain;q=0.5", True),
        ("application/json, */*;q=0.1", False),
        # Upper case, and invalid parts.
        ("Text/Plain;Q=0.5, Application/OpenMetrics-Text;Version=1.0.0;Q=0.9", True),
        (f"text/plain ; q = 0.9 , {OPENMETRICS} ; q = 0.3", False),
        (f"text/plain;q=0.5, {OPENMETRICS};q=high", True),
        (f"text/plain;q=0.5, {OPENMETRICS};q=nan", True),
        (f"text/plain;q=0.5, {OPENMETRICS};q=-1", True),
        (f"{OPENMETRICS};version=one, text/plain;q=0.1", False),
        (f"{OPENMETRICS};version=one, {OPENMETRICS};version=1.0.0;q=0.5, text/plain;q=0.1", True),
        (f"{OPENMETRICS};version=0.0.1, text/plain;q=0.1", False),
        (",;,=,;q", False),
    ],
)
def test_the_weights_of_the_request_choose_the_format(accepted: str, is_openmetrics: bool) -> None:
    body, headers = Scrape([Good()]).render(accepted, "")
    assert headers["Content-Type"].startswith(OPENMETRICS if is_openmetrics else "text/plain")
    assert body.endswith(b"# EOF\n") is is_openmetrics


@pytest.mark.parametrize(
    ("accepted", "is_zipped"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("GZip ; Q=0.001", True),
        ("gzip;q=high", True),
        ("gzip;q=0", False),
        ("gzip; q = 0.000", False),
        ("gzip;q=0.;x=1", False),
        ("identity", False),
        ("", False),
    ],
)
def test_the_body_is_compressed_if_the_client_accepts_it(accepted: str, is_zipped: bool) -> None:
    body, headers = Scrape([Good()]).render("", accepted)
    assert ("Content-Encoding" in headers) is is_zipped
    plain = gzip.decompress(body) if is_zipped else body
    assert b"rankscope_good 7.0" in plain
