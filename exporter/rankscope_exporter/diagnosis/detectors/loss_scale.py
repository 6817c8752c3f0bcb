"""The loss scale of mixed precision has collapsed: the run computes, but skips its steps and learns nothing.

That is so if at least `amp_skips` steps were skipped in the last minutes, and the scale is below 1 or below 1% of its
highest value in that time.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate

KIND = "loss_scale_collapse"
COLLAPSED = 0.01  # ratio to the highest scale of the last minutes


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the collapse. A healthy scaler skips one step in thousands, and a few in a row when training starts."""
    scales = [one.now.amp_scale for one in window.run.ranks if one.now.amp_scale is not None]
    if not scales or past.amp_skips < window.thresholds.amp_skips:
        return
    scale = min(scales)
    if scale < 1.0 or scale < COLLAPSED * past.highest_amp_scale:
        yield Candidate(KIND, 1.0, evidence={"scale": scale, "skipped_steps": past.amp_skips}, lasted=0.0)


DETECTORS = (StateDetector(KIND, detect, is_critical=True),)
