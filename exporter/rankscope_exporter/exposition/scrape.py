"""One scrape: runs, times and isolates each collector, and renders the body in the notation that was asked for."""

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

GZIP_LEVEL = 1  # 0.2 ms instead of level 9's 3.7 for a thousand series, at 1.3 times the size
OPENMETRICS = "application/openmetrics-text"

Outcome = Mapping[str, tuple[bool, float]]
"""By collector: whether it delivered, and how many seconds it took."""


COLLECTOR = MetricTable[Outcome, Outcome]("rankscope_exporter_collector_", ("collector",), whole)
METRICS = (
    COLLECTOR.gauge(
        "success",
        "1 if the collector delivered in this scrape, 0 if it failed.",
        lambda outcome: {name: has_delivered for name, (has_delivered, _) in outcome.items()},
    ),
    COLLECTOR.gauge(
        "duration_seconds",
        "How long the collector took in this scrape.",
        lambda outcome: {name: seconds for name, (_, seconds) in outcome.items()},
    ),
)

logger = logging.getLogger(__name__)


class Form(NamedTuple):
    """What a body may be: there are four."""

    openmetrics: bool
    compressed: bool


class Scrape:
    """Asks every collector, and renders what they say."""

    def __init__(self, collectors: Sequence[Collector], clock: Callable[[], float] = time.perf_counter) -> None:
        self._collectors = collectors
        self._clock = clock
        self._cache = SampleCache(METRICS)
        self._failing: set[str] = set()
        self._lock = threading.Lock()  # the status page is made on another thread
        self._encoders = {openmetrics: Encoder(openmetrics=openmetrics) for openmetrics in (False, True)}

    def collect(self) -> list[Metric]:
        """Every collector's metrics, then how long each took and whether it succeeded."""
        collected: list[Metric] = []
        outcome: dict[str, tuple[bool, float]] = {}
        with self._lock:
            for collector in self._collectors:
                began = self._clock()
                delivered = self._run(collector)
                outcome[collector.name] = delivered is not None, self._clock() - began
                collected += delivered or []
            return [*collected, *families(METRICS, [self._cache.write(outcome)])]

    def render(self, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
        """Body and headers of an answer to these request headers."""
        form, headers = negotiated(accept, accept_encoding)
        return self.bodies([form])[form], headers

    def bodies(self, forms: Collection[Form]) -> dict[Form, bytes]:
        """What one look at all collectors gives, in each of these forms."""
        families = self.collect()
        plain = {kind: self._encoders[kind].render(families) for kind in {form.openmetrics for form in forms}}
        return {form: _packed(plain[form.openmetrics], form) for form in forms}

    def _run(self, collector: Collector) -> list[Metric] | None:
        """The collector's metrics, all or none; None if it raised. That is logged when it begins, not each time."""
        try:
            collected = list(collector.collect())
        except Exception as error:
            if collector.name not in self._failing:
                logger.exception("collector %s failed: %s", collector.name, error)
            self._failing.add(collector.name)
            return None
        if collector.name in self._failing:
            logger.info("collector %s works again", collector.name)
            self._failing.discard(collector.name)
        return collected


@lru_cache(maxsize=16)  # whoever scrapes asks for the same each time
def _negotiated(accept: str, accept_encoding: str) -> tuple[Form, str]:
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # it compares a version that is no number, or has thousands of digits, with one
        _, content_type = choose_encoder("")
    return Form(content_type.startswith(OPENMETRICS), _accepts_gzip(accept_encoding)), content_type


def negotiated(accept: str, accept_encoding: str) -> tuple[Form, dict[str, str]]:
    """What to answer to these request headers, and the answer's headers."""
    form, content_type = _negotiated(accept, accept_encoding)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    return form, {**headers, "Content-Encoding": "gzip"} if form.compressed else headers


def _packed(body: bytes, form: Form) -> bytes:
    return gzip.compress(body, GZIP_LEVEL) if form.compressed else body


def _accepts_gzip(accept_encoding: str) -> bool:
    codings = (coding.strip().lower().replace(" ", "") for coding in accept_encoding.split(","))
    return any(coding.split(";")[0] == "gzip" and not coding.endswith(";q=0") for coding in codings)
