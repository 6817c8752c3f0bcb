"""Small drawings for the status page, as SVG: a line over ten minutes, and a bar of a rank's time by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rankscope.record.phases import NAMES
from rankscope.record.quantities import percent
from rankscope_exporter.report.rates import INTERVAL, KEPT_SECONDS, Point

FEWEST_POINTS = 6
HEIGHT = 100.0


def line(points: Sequence[Point], highest: float, label: str) -> str:
    """Return a chart of the rates between 0 and `highest`; empty with too few points. The label describes it."""
    if len(points) < FEWEST_POINTS or highest <= 0.0:
        return ""
    parts = "".join(f'<polyline points="{" ".join(_places(part, highest))}"/>' for part in _connected(points))
    box = f'viewBox="0 -4 {KEPT_SECONDS:.0f} {HEIGHT + 8:.0f}" preserveAspectRatio="none"'
    return f'<svg class="chart" {box} role="img" aria-label="{escape(label)}">{parts}</svg>'


def _connected(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Yield the parts without a gap."""
    part: list[Point] = []
    for point in points:
        if part and part[-1].age - point.age > 3 * INTERVAL:
            yield part
            part = []
        part.append(point)
    yield part


def _places(points: Sequence[Point], highest: float) -> Iterator[str]:
    for age, rate in points:
        yield f"{KEPT_SECONDS - age:.0f},{HEIGHT * (1.0 - rate / highest):.0f}"


def bar(phases: Mapping[str, float]) -> str:
    """Return a bar of a rank's time by phase, in the order of the record; custom phases come last."""
    ordered = sorted(phases, key=lambda phase: NAMES.index(phase) if phase in NAMES else len(NAMES))
    total, parts, begin = sum(phases.values()) or 1.0, [], 0.0
    for phase in ordered:
        width, name = 100.0 * phases[phase] / total, phase if phase in NAMES else "own"
        title = f"<title>{escape(phase)} {percent(phases[phase])}</title>"
        parts.append(f'<rect class="p-{name}" x="{begin:.1f}" width="{width:.1f}" height="1">{title}</rect>')
        begin += width
    label = escape(", ".join(f"{phase} {percent(phases[phase])}" for phase in ordered))
    box = 'viewBox="0 0 100 1" preserveAspectRatio="none"'
    return f'<svg class="bar" {box} role="img" aria-label="{label}">{"".join(parts)}</svg>' if parts else ""
