"""A rank's time by phase as a bar: colored blocks, or letters without color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from rankscope.record.phases import NAMES
from rankscope_exporter.report.colors import OWN_COLOR, PHASE_COLORS

OWN = "own"
LETTERS = {
    "other": ".",
    "startup": "s",
    "data_wait": "d",
    "h2d_copy": "h",
    "forward": "f",
    "backward": "b",
    "collective_wait": "w",
    "device_wait": "v",
    "optimizer": "o",
    "checkpoint": "c",
    "evaluation": "e",
    OWN: "+",
}
BLOCK = "█"


def bar(phases: Mapping[str, float], width: int, *, has_color: bool) -> Text:
    """Return the bar of a rank. The script's own phases are shown as one."""
    ratios = _by_known_phase(phases)
    total = sum(ratios.values())
    text, begin, end = Text(no_wrap=True), 0, 0.0
    for phase, ratio in ratios.items():
        end += width * ratio / total
        length = round(end) - begin
        begin = round(end)
        text.append((BLOCK if has_color else LETTERS[phase]) * length, style=_color(phase) if has_color else "")
    return text


def legend(shown: Sequence[Mapping[str, float]], *, has_color: bool) -> Text:
    """Return the meaning of the colors or letters in these bars."""
    found = {phase for phases in shown for phase, ratio in _by_known_phase(phases).items() if ratio > 0.0}
    text = Text()
    for phase in LETTERS:
        if phase in found:
            sign = BLOCK if has_color else LETTERS[phase]
            text.append(f"{sign} ", style=_color(phase) if has_color else "")
            text.append(f"{'own phases' if phase == OWN else phase}  ", style="dim" if has_color else "")
    return text


def _by_known_phase(phases: Mapping[str, float]) -> Mapping[str, float]:
    known = {phase: phases[phase] for phase in NAMES if phases.get(phase, 0.0) > 0.0}
    own = sum(ratio for phase, ratio in phases.items() if phase not in NAMES)
    return known | ({OWN: own} if own > 0.0 else {})


def _color(phase: str) -> str:
    return PHASE_COLORS.get(phase, OWN_COLOR)
