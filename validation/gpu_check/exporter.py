"""The exporter as a process, and its scrapes."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from testing.servers import Server, free_port

from rankscope_exporter.registry import GPU_COLLECTORS

EVERY = 0.5  # seconds between scrapes; the exporter reads its GPUs once a second

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Scrape:
    """All series at a unix time, and the seconds of the scrape."""

    at: float
    series: Mapping[Series, float]
    seconds: float = 0.0

    def select(self, metric: str, *label_values: str) -> dict[Series, float]:
        """Return the series of a metric of the exporter or the first GPU, with these values of other labels."""
        wanted = set(label_values)
        found = {key: value for key, value in self.series.items() if key[0] == f"rankscope_{metric}"}
        of_others = {key for key in found if dict(key[1]).get("gpu", "0") != "0"}
        return {key: found[key] for key in found.keys() - of_others if wanted <= set(dict(key[1]).values())}


def values(scrapes: Sequence[Scrape], metric: str, *label_values: str) -> list[float]:
    """Return a metric's values over time, summed if several series match."""
    found = (scrape.select(metric, *label_values) for scrape in scrapes)
    return [sum(series.values()) for series in found if series]


def scrape(exporter: Server) -> Scrape:
    """Return all series. Raises OSError."""
    at = time.time()
    with urllib.request.urlopen(f"{exporter.url}/metrics", timeout=10) as answer:
        body = answer.read().decode()
    seconds = time.time() - at
    samples = (sample for family in text_string_to_metric_families(body) for sample in family.samples)
    return Scrape(at, {(one.name, frozenset(one.labels.items())): one.value for one in samples}, seconds)


EVERYTHING = [f"--collector.{collector.name}" for collector in GPU_COLLECTORS]


@contextmanager
def running(flags: Sequence[str] = EVERYTHING) -> Iterator[tuple[Server, Path]]:
    """Run an exporter, and yield it and its run directory, which is empty. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name:
        address, run_dir = f"127.0.0.1:{free_port()}", Path(name, "run")
        run_dir.mkdir()
        command = [sys.executable, "-m", "rankscope_exporter", f"--web.listen-address={address}"]
        arguments = [*command, f"--run-dir={run_dir}", *flags]
        with Server("exporter", arguments, f"http://{address}", Path(name, "log")) as exporter:
            yield exporter, run_dir


@contextmanager
def recorded(exporter: Server) -> Iterator[list[Scrape]]:
    """Scrape in a thread, and yield the list of the scrapes."""
    scrapes: list[Scrape] = []
    stop = threading.Event()

    def record() -> None:
        while not stop.wait(EVERY):
            with suppress(OSError):
                scrapes.append(scrape(exporter))

    thread = threading.Thread(target=record, name="recorder")
    thread.start()
    try:
        yield scrapes
    finally:
        stop.set()
        thread.join()
