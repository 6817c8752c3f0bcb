"""The analyzer's own metrics: its targets, the runs that it judges, and how late it is."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.ranks.collectors import findings
from rankscope_exporter.ranks.judged_runs import Diagnosis
from rankscope_exporter.report.rates import INTERVAL, RecentRates

BUILD = Declaration(
    "gauge", "rankscope_analyzer_build_info", "Version of the analyzer and its Python.", ("version", "python_version")
)
TARGETS = Declaration(
    "gauge",
    "rankscope_analyzer_targets",
    "Exporters that the analyzer asks: `up` if the last answer could be used, else `failing`.",
    ("state",),
)
RUN_RANKS = Declaration(
    "gauge",
    "rankscope_analyzer_run_ranks",
    "Living ranks of a run that the analyzer judges, on all nodes; with those of nodes that do not answer.",
    ("run", "owner"),
)
NOT_JUDGED = Declaration(
    "gauge",
    "rankscope_analyzer_run_not_judged_info",
    "Living runs that span nodes and are not judged, or not fully, by `reason`: `node_missing` (late ranks and "
    "transfer are unknown while a node does not answer), or as in rankscope_exporter_runs_not_judged.",
    ("run", "owner", "reason", "node"),
)
LATE = Declaration("gauge", "rankscope_analyzer_lag_seconds", "Age of the last second that was judged.")
METRICS = (BUILD, TARGETS, RUN_RANKS, NOT_JUDGED, LATE)

logger = logging.getLogger(__name__)


class AnalyzerCollector:
    """Shows the last verdicts as an exporter's collector `findings` does, and the state of the analyzer."""

    name = "analyzer"

    def __init__(self, analyzer: Analyzer, targets: Callable[[], Mapping[str, str]]) -> None:
        """`targets` returns why each target did not answer; empty if it did."""
        self._analyzer = analyzer
        self.targets = targets
        self.rates = RecentRates()
        """How fast the runs were in the last minutes."""
        self._recorded_at = -INTERVAL
        self._found: list[Metric] = []
        self._texts = findings.FindingTexts()

    def poll(self) -> None:
        """Judge what is new."""
        if diagnosis := self._analyzer.update():
            self.show(diagnosis)

    def show(self, diagnosis: Diagnosis) -> None:
        """Show this result from now on."""
        if diagnosis.look.at - self._recorded_at >= INTERVAL:
            self.rates.record(diagnosis.look)
            self._recorded_at = diagnosis.look.at
        self._found = [*findings.families(diagnosis, self._texts, self.name), *self._of_runs(diagnosis)]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last poll."""
        yield BUILD.family({(__version__, platform.python_version()): 1.0})
        reasons = self.targets().values()
        failing = sum(map(bool, reasons))
        yield TARGETS.family({"up": len(reasons) - failing, "failing": failing})
        if look := self._analyzer.look:
            yield LATE.family(max(self._analyzer.now() - look.at, 0.0))
        yield from self._found

    def _of_runs(self, diagnosis: Diagnosis) -> Iterable[Metric]:
        look, missing = diagnosis.look, self._analyzer.missing
        living = {run: sum(one.ended is None for one in ranks) for run, ranks in look.readings.items()}
        judged = {verdict.run for verdict in look.judged.verdicts}
        yield RUN_RANKS.family({run[:2]: float(living.get(run, 0)) for run in judged})
        reasons = {(*run[:2], reason, ""): 1.0 for run, reason in look.not_judged().items()}
        for run, nodes in missing.items():
            reasons.update({(*run[:2], "node_missing", node): 1.0 for node in nodes if living.get(run)})
        yield NOT_JUDGED.family(reasons)
