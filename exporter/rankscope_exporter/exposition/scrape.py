"""One scrape: run, time and isolate each collector, and render the body in the requested format."""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from rankscope_exporter.exposition.collector import Collector
from rankscope_exporter.exposition.encoder import Encoder
from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families

GZIP_LEVEL = 1  # 0.2 ms instead of 3.7 ms at level 9 for a thousand series; 1.3 times the size
PLAIN_TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text"

Outcome = Mapping[str, tuple[bool, float]]
"""Success and duration in seconds, by collector."""


COLLECTOR = MetricTable[Outcome, Outcome]("rankscope_exporter_collector_", ("collector",), whole)
METRICS = (
    COLLECTOR.gauge(
        "success",
        "1 if the collector succeeded in this scrape, 0 if it failed.",
        lambda outcome: {name: has_succeeded for name, (has_succeeded, _) in outcome.items()},
    ),
    COLLECTOR.gauge(
        "duration_seconds",
        "Duration of the collector in this scrape.",
        lambda outcome: {name: seconds for name, (_, seconds) in outcome.items()},
    ),
)

logger = logging.getLogger(__name__)


class Form(NamedTuple):
    """Format of a body: one of four combinations."""

    openmetrics: bool
    compressed: bool


class Scrape:
    """A scrape runs every collector and renders its metrics. `begin` is called first."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        begin: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._collectors = collectors
        self._begin = begin
        self._clock = clock
        self._cache = SampleCache(METRICS)
        self._failing: set[str] = set()
        self._lock = threading.Lock()  # another thread renders the status page
        self._encoders = {openmetrics: Encoder(openmetrics=openmetrics) for openmetrics in (False, True)}

    def collect(self) -> list[Metric]:
        """Return the metrics of all collectors, then each collector's success and duration."""
        collected: list[Metric] = []
        outcome: dict[str, tuple[bool, float]] = {}
        with self._lock:
            self._begin()
            for collector in self._collectors:
                began = self._clock()
                delivered = self._run(collector)
                outcome[collector.name] = delivered is not None, self._clock() - began
                collected += delivered or []
            return [*collected, *families(METRICS, [self._cache.write(outcome)])]

    def render(self, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and the response headers for these request headers."""
        form, headers = negotiate_format(accept, accept_encoding)
        return self.bodies([form])[form], headers

    def bodies(self, forms: Collection[Form]) -> dict[Form, bytes]:
        """Run all collectors once and return the body in each of these formats."""
        families = self.collect()
        plain = {kind: self._encoders[kind].render(families) for kind in {form.openmetrics for form in forms}}
        return {form: _packed(plain[form.openmetrics], form) for form in forms}

    def _run(self, collector: Collector) -> list[Metric] | None:
        """Return all of the collector's metrics, or None if it raised. Logs only the first of consecutive failures."""
        try:
            collected = list(collector.collect())
        except Exception as error:
            if collector.name not in self._failing:
                logger.exception("collector %s failed: %s", collector.name, error)
            self._failing.add(collector.name)
            return None
        if collector.name in self._failing:
            logger.info("collector %s recovered", collector.name)
            self._failing.discard(collector.name)
        return collected


@lru_cache(maxsize=16)  # a scraper sends the same headers each time
def _negotiated(accept: str, accept_encoding: str) -> tuple[Form, str]:
    content_type = _content_type(accept)
    return Form(content_type.startswith(OPENMETRICS), accepts_gzip(accept_encoding)), content_type


def negotiate_format(accept: str, accept_encoding: str) -> tuple[Form, dict[str, str]]:
    """Return the body's format and the response headers for these request headers."""
    form, content_type = _negotiated(accept, accept_encoding)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    return form, {**headers, "Content-Encoding": "gzip"} if form.compressed else headers


def _packed(body: bytes, form: Form) -> bytes:
    return gzip.compress(body, GZIP_LEVEL) if form.compressed else body


def _content_type(accept: str) -> str:
    """Return the content type with the largest weight; between equal weights, `choose_encoder` decides."""
    ranges = [(part.split(";")[0].strip(), _weight(part), part) for part in accept.lower().split(",")]
    ranges = [named for named in ranges if named[0] != OPENMETRICS or _encoder_type(named[2]).startswith(OPENMETRICS)]
    weights = {name: _weight_of(ranges, name) for name in (PLAIN_TEXT, OPENMETRICS)}
    largest = max(weights.values())
    best = [name for name, weight in weights.items() if weight == largest]
    named = [part for name, weight, part in ranges if name in best and weight == largest > 0]
    return _encoder_type(",".join(named) or (OPENMETRICS if best == [OPENMETRICS] else ""))


def _encoder_type(accept: str) -> str:
    try:
        return choose_encoder(accept)[1]
    except (TypeError, ValueError):  # choose_encoder fails on a version that is not a number or has thousands of digits
        return choose_encoder("")[1]


def _weight_of(ranges: Sequence[tuple[str, float, str]], media_type: str) -> float:
    """Return the weight by the most specific range that includes the media type; 0 without such a range."""
    for wanted in (media_type, f"{media_type.split('/')[0]}/*", "*/*"):
        if weights := [weight for name, weight, _ in ranges if name == wanted]:
            return max(weights)
    return 0.0


def _weight(part: str) -> float:
    """Return the parameter q of one part of a header; 1 if it is absent or invalid."""
    for parameter in part.lower().split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                break
            return weight if 0 <= weight <= 1 else 1.0
    return 1.0


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether a client's header `Accept-Encoding` allows gzip."""
    codings = accept_encoding.lower().split(",")
    return any(coding.split(";")[0].strip() == "gzip" and _weight(coding) > 0 for coding in codings)
