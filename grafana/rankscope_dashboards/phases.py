"""The ranks' time by phase."""

from __future__ import annotations

from rankscope.record import phases
from rankscope_dashboards.selectors import LIVE_RANKS, RANKS, by_rank, live, rate

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
HOST_RATIOS = live(rate(HOST))

_WAIT = ',phase="collective_wait"'
_MEASURED = f"(sum by (rank) (max by (rank, phase) ({rate(DEVICE, UNPLANNED)})) > 0)"
DEVICE_WAITS = f"{by_rank(rate(DEVICE, _WAIT))} / {_MEASURED}"
WAITS = f"({DEVICE_WAITS} or on (rank) {by_rank(rate(HOST, _WAIT))} and on (rank) {LIVE_RANKS})"
"""The query of each rank's wait in collectives, as a ratio of its GPU's measured time or of the host's time."""
