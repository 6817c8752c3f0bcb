"""Every rank waits in collectives, the last to come too: transfer takes much of the time.

    transfer = what the rank waits in each step that waits least

Well-tuned jobs have up to `network_allowance` of it; where the run has had less, that is what it is compared with. The
cause is `link` if a GPU has fewer PCIe lanes or NVLinks than it can have, and then its rank is named, or if a network
port of a node is at fault (`diagnosis/ports.py`), and then that is named, or if the ranks of one group wait for each
other longer than those of groups of the same shape do (`diagnosis/groups.py`), and then the group is named; `network`
where steps were compared, so that late ranks are excluded; else `unknown`. What such a group waits beyond the others is
a loss whatever well-tuned jobs spend in transfer.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.diagnosis import groups
from rankscope_exporter.diagnosis.detectors import small_collectives
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, place, whole_run
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "network"


def measure(window: Window) -> Mapping[int | None, float]:
    """Return the transfer, or if it is more the allowance and what a slow group waits beyond the others."""
    if not any(one.lag is not None for one in window.run.ranks):
        return {}
    slow = groups.slowest(window.run)
    return whole_run(max(_transfer(window), slow.excess + window.thresholds.network_allowance if slow else 0.0))


def _transfer(window: Window) -> float:
    """Return the transfer without that of many small collectives: it is not the network's fault."""
    small = small_collectives.measure(window).get(None, 0.0)
    return max(window.lost.get("transfer", 0.0) - small, 0.0)


def explain(window: Window, _rank: int | None) -> Candidate | None:
    """Return the loss with the reduced link, the faulty port or the slow group, if there is one."""
    ratio = _transfer(window)
    ranks = window.run.ranks
    evidence = {"straggler": window.lost.get("straggler", 0.0)}
    for one in ranks:
        if one.now.gpu and one.now.gpu.is_link_reduced:
            return Candidate(KIND, ratio, "link", place(one), evidence)
    for one in ranks:
        if fault := one.now.port_fault:
            evidence[f"port_{fault.reason}"] = fault.value
            return Candidate(KIND, ratio, "link", Place(node=one.now.node, port=fault.port), evidence)
    slow = groups.slowest(window.run)
    if slow and slow.excess > window.thresholds.cause * ratio:
        evidence |= {"group_wait": slow.wait, "peers_wait": slow.peers_wait}
        return Candidate(KIND, ratio, "link", Place(group=slow.name), evidence)
    is_aligned = all(one.spent.aligned.steps > 0 for one in ranks)
    return Candidate(KIND, ratio, "network" if is_aligned else "unknown", evidence=evidence)


def allowance(thresholds: Thresholds, _ranks: int) -> float:
    """Return how much of the time well-tuned jobs spend in transfer."""
    return thresholds.network_allowance


DETECTOR = LossDetector(KIND, measure, explain, allowance)
