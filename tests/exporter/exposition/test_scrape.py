"""A scrape isolates and times the collectors and negotiates the format."""

from __future__ import annotations

import gzip
from collections.abc import Iterable

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from rankscope_exporter.exposition.scrape import Scrape


class Good:
    name, help = "good", ""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("rankscope_good", "A value.", 7)


class Failing:
    name, help = "failing", ""
    is_broken = True

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("rankscope_half", "A value before the failure.", 1)
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


def test_openmetrics_is_served_on_request() -> None:
    body, headers = Scrape([Good()]).render("application/openmetrics-text; version=1.0.0", "")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_plain_text_is_the_default() -> None:
    assert Scrape([Good()]).render("*/*", "")[1]["Content-Type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("accepted", "is_zipped"),
    [("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False), ("identity", False), ("", False)],
)
def test_the_body_is_compressed_if_the_client_accepts_it(accepted: str, is_zipped: bool) -> None:
    body, headers = Scrape([Good()]).render("", accepted)
    assert ("Content-Encoding" in headers) is is_zipped
    plain = gzip.decompress(body) if is_zipped else body
    assert b"rankscope_good 7.0" in plain
