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


def legend(shown: Sequence[Mapping[str, float]], width: int, *more: str, has_color: bool) -> Text:
    """Return the meaning of the colors or letters in these bars, and `more`, with line breaks only between them."""
    found = {phase for phases in shown for phase, ratio in _by_known_phase(phases).items() if ratio > 0.0}
    style, parts = "dim" if has_color else "", []
    for phase in filter(found.__contains__, LETTERS):
        sign = Text(BLOCK if has_color else LETTERS[phase], style=_color(phase) if has_color else "")
        parts.append(sign.append(f" {'own phases' if phase == OWN else phase}", style=style))
    text, column = Text(), 0
    for part in (*parts, *(Text(one, style="dim") for one in more)):
        is_next = column > 0 and column + len(part) > width
        text.append("\n" * is_next + "  " * (column > 0 and not is_next)).append_text(part)
        column = len(part) + (0 if is_next or not column else column + 2)
    return text


def _by_known_phase(phases: Mapping[str, float]) -> Mapping[str, float]:
    known = {phase: phases[phase] for phase in NAMES if phases.get(phase, 0.0) > 0.0}
    own = sum(ratio for phase, ratio in phases.items() if phase not in NAMES)
    return known | ({OWN: own} if own > 0.0 else {})


def _color(phase: str) -> str:
    return PHASE_COLORS.get(phase, OWN_COLOR)
