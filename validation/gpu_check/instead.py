"""Metrics that neither nvidia-smi shows nor the load moves in a known way: what is held of them instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from validation.gpu_check.exporter import Scrape, Series
from validation.gpu_check.report import Check, span

PART = "held at every scrape"
Rule = tuple[str, Callable[[Sequence[float]], bool]]

ALWAYS_1: Rule = ("is 1", lambda seen: set(seen) == {1.0})
ALWAYS_0: Rule = ("is 0", lambda seen: set(seen) == {0.0})
NEVER_FALLS: Rule = ("never falls", lambda seen: all(a <= b for a, b in itertools.pairwise(seen)))
RISES: Rule = ("rises at every scrape", lambda seen: all(a < b for a, b in itertools.pairwise(seen)))
NEVER_CHANGES: Rule = ("does not change", lambda seen: len(set(seen)) == 1)
# A scrape takes what was read and asks no driver; on a crowded machine it may wait for a processor.
BRIEF: Rule = ("is below 0.5", lambda seen: max(seen) < 0.5)

INSTEAD: Mapping[str, Rule] = {
    "rankscope_gpu_up": ALWAYS_1,
    "rankscope_gpu_encoder_busy_seconds_total": NEVER_CHANGES,
    "rankscope_gpu_decoder_busy_seconds_total": NEVER_CHANGES,
    "rankscope_gpu_gpm_nvlink_bytes_total": NEVER_FALLS,
    "rankscope_gpu_nvlink_links": NEVER_CHANGES,
    "rankscope_gpu_nvlink_links_active": NEVER_CHANGES,
    "rankscope_gpu_nvlink_bytes_total": NEVER_FALLS,
    "rankscope_gpu_nvlink_errors_total": NEVER_CHANGES,
    "rankscope_gpu_xid_errors_total": NEVER_CHANGES,
    "rankscope_gpu_xid_last_timestamp_seconds": NEVER_CHANGES,
    "rankscope_gpu_allocation_info": ALWAYS_1,
    "rankscope_gpu_state_info": ALWAYS_1,
    "rankscope_exporter_build_info": ALWAYS_1,
    "rankscope_exporter_nvml_up": ALWAYS_1,
    "rankscope_exporter_gpus_released": ALWAYS_0,
    "rankscope_exporter_time_seconds": RISES,
    "rankscope_exporter_collector_success": ALWAYS_1,
    "rankscope_exporter_collector_duration_seconds": BRIEF,
    "rankscope_exporter_rank_files_skipped": ALWAYS_0,
    "rankscope_exporter_rank_gpus_contradicted": ALWAYS_0,
}


def judge_rules(scrapes: Sequence[Scrape]) -> Iterator[Check]:
    """Each rule, for every series of its metric."""
    for metric, (text, holds) in INSTEAD.items():
        histories = _histories(scrapes, metric)
        if not histories:
            yield Check(PART, metric, "absent on both sides", note=text)
        broken = {series: seen for series, seen in histories.items() if not holds(seen)}
        for series, seen in broken.items():
            yield Check(PART, f"{metric} {dict(series[1])}", "differs", span(seen), note=text)
        if histories and not broken:
            ours = span([value for seen in histories.values() for value in seen])
            yield Check(PART, metric, "ok", ours, note=f"{text}; {len(histories)} series")


def _histories(scrapes: Sequence[Scrape], metric: str) -> dict[Series, list[float]]:
    histories: dict[Series, list[float]] = {}
    for scrape in scrapes:
        for series, value in scrape.select(metric).items():
            histories.setdefault(series, []).append(value)
    return histories
