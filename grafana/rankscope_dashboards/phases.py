"""The ranks' time by phase."""

from __future__ import annotations

from rankscope.record import phases
from rankscope_dashboards.selectors import LIVE_RANKS, RANKS, average, by_rank, rate

HOST, DEVICE = "rankscope_rank_phase_seconds_total", "rankscope_rank_device_seconds_total"
PLANNED = "|".join(phases.PLANNED)
UNPLANNED = f',phase!~"{PLANNED}"'


def phase_ratios(ranks: str, more: str = "", *, window: str = "$__rate_interval", by: str = "rank") -> str:
    """Return the query of each rank's time by phase, as ratios of its time.

    It is the GPU's time where it is measured, otherwise the host's, like in the exporter's diagnosis. The GPU is
    measured in some steps only, so its phases divide the time that the host has spent outside of planned phases, and
    planned phases are the host's. `ranks` are matchers of ranks, and `more` of the host's phases.
    """

    def rates(metric: str, matchers: str) -> str:
        return f"max by ({by}, phase) (rate({metric}{{{ranks}{matchers}}}[{window}]))"

    device = rates(DEVICE, UNPLANNED)
    scale = f"sum by ({by}) ({rates(HOST, UNPLANNED)}) / (sum by ({by}) ({device}) > 0)"
    return f"({device} * on ({by}) group_left () ({scale}) or {rates(HOST, more)})"


# A rank's counter loses its last, open phase when the rank is killed. Prometheus takes that for a reset.
PHASE_RATIOS = f"({phase_ratios(RANKS)} and on (rank) {LIVE_RANKS})"


def mean_time_by_phase(ranks: str, *, window: str, by: str = "", excluded: str = "") -> str:
    """Return the query of the mean time of ranks by phase, as ratios.

    Unlike `phase_ratios`, it sums before it divides, for runs of 1,024 ranks. If only the GPUs of some ranks are
    measured, it is the time of these.
    """

    def total(metric: str, matchers: str, labels: str) -> str:
        return f"sum by ({labels}) (rate({metric}{{{ranks}{matchers}}}[{window}]))"

    phase = f"{by}, phase" if by else "phase"
    device, kept = UNPLANNED, f',phase!="{excluded}"' if excluded else ""
    host = total(HOST, kept, by)
    planned = total(HOST, f'{kept},phase=~"{PLANNED}"', by)
    measured = f"{total(DEVICE, device, phase)} / on ({by}) group_left () ({total(DEVICE, device, by)} > 0)"
    unplanned = f"{measured} * on ({by}) group_left () (1 - {planned} / ({host} > 0))"
    return f"{unplanned} or on ({phase}) {total(HOST, kept, phase)} / on ({by}) group_left () ({host} > 0)"


HOST_BY_PHASE = average(rate(HOST), "phase")
TIME_BY_PHASE = mean_time_by_phase(RANKS, window="$__rate_interval")

_WAIT = ',phase="collective_wait"'
_MEASURED = f"(sum by (rank) (max by (rank, phase) ({rate(DEVICE, UNPLANNED)})) > 0)"
DEVICE_WAITS = f"{by_rank(rate(DEVICE, _WAIT))} / {_MEASURED}"
WAITS = f"({DEVICE_WAITS} or on (rank) {by_rank(rate(HOST, _WAIT))} and on (rank) {LIVE_RANKS})"
"""The query of each rank's wait in collectives, as a ratio of its GPU's measured time or of the host's time."""
