"""All ranks wait in collectives, even the last one to arrive: data transfer takes much of the time.

    transfer = the least wait of any rank in each step

Well-tuned jobs spend up to `network_allowance` on transfer. If the run has had less, it is compared with that. Causes:

- `link`: a GPU has fewer PCIe lanes or NVLinks than it supports (the finding names its rank), a network port of a node
  has a fault (the finding names the port; `diagnosis/ports.py`), or the ranks of one group wait for each other longer
  than the ranks of other groups of the same shape (the finding names the group; `diagnosis/groups.py`)
- `network`: steps were compared between ranks, so late ranks are excluded as the cause
- `unknown`: steps were not compared

If a group has a slow link, the run is compared with what it would spend if that group were like its peers.
"""

from __future__ import annotations

from rankscope_exporter.diagnosis import groups
from rankscope_exporter.diagnosis.detectors import small_collectives
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, place
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.late_set import Ranks

KIND = "network"


def measure(window: Window) -> float | None:
    """Return the transfer time, without that of many small collectives, which the network does not cause."""
    if not any(one.lag is not None for one in window.run.ranks):
        return None
    return max(window.lost.get("transfer", 0.0) - small_collectives.measure(window), 0.0)


def explain(window: Window, _ranks: Ranks) -> Candidate | None:
    """Return the loss with the rank whose link is reduced, the faulty port or the slow group, if any."""
    ratio = measure(window) or 0.0
    ranks = window.run.ranks
    evidence = {"straggler": window.lost.get("straggler", 0.0)}
    for one in ranks:
        if one.now.gpu and one.now.gpu.is_link_reduced:
            return Candidate(KIND, ratio, "link", place(one.now), evidence)
    for one in ranks:
        if fault := one.now.port_fault:
            evidence[f"port_{fault.reason}"] = fault.value
            return Candidate(KIND, ratio, "link", Place(node=one.now.node, port=fault.port), evidence)
    slow = groups.slowest(window.run)
    if slow and slow.excess > window.thresholds.cause * ratio:
        evidence |= {"link_wait": slow.wait, "peers_wait": slow.peers_wait}
        return Candidate(KIND, ratio, "link", Place(group=slow.name), evidence)
    is_aligned = all(one.spent.aligned.steps > 0 for one in ranks)
    return Candidate(KIND, ratio, "network" if is_aligned else "unknown", evidence=evidence)


def allowance(window: Window) -> float:
    """Return the transfer of well-tuned jobs, or of this run if its slow group were like its peers, if that is less."""
    slow, usual = groups.slowest(window.run), window.thresholds.network_allowance
    if slow is None or slow.excess <= window.thresholds.loss:
        return usual
    return min(usual, max((measure(window) or 0.0) - slow.excess, 0.0))


# Data that a rank aggregates uses the network as well.
DETECTORS = (
    LossDetector(
        KIND,
        measure,
        explain,
        allowance,
        is_one_per_run=True,
        explained_by_cause=(("", ("straggler", "aggregation")),),
    ),
)
