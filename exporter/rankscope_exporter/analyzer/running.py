"""The analyzer's threads: one asks the targets, another one judges once a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankscope_exporter.analyzer.metrics import AnalyzerCollector
from rankscope_exporter.analyzer.puller import Puller
from rankscope_exporter.analyzer.service import SECOND, Analyzer
from rankscope_exporter.analyzer.settings import AnalyzerFlags
from rankscope_exporter.analyzer.targets import Targets
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from rankscope_exporter.worker import Worker


class Readiness:
    """What the web server asks about the GPUs of an exporter: the analyzer has none."""

    is_released = False

    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    @property
    def is_ready(self) -> bool:
        """Whether any target has answered."""
        return self._puller.counts()["up"] > 0

    def release(self, seconds: float) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""


@contextmanager
def running(flags: AnalyzerFlags, settings: FindingFlags) -> Iterator[tuple[AnalyzerCollector, Readiness]]:
    """Ask the targets and judge until the context ends; then save the state."""
    analyzer = Analyzer(settings)
    puller = Puller(Targets(flags.analyze), analyzer)
    collector = AnalyzerCollector(analyzer, puller.counts)
    judging = Worker("judge", SECOND, collector.poll, "cannot judge the runs", analyzer.close)
    with puller, judging:
        yield collector, Readiness(puller)
