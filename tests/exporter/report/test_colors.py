"""The colors differ for readers with normal sight and with deuteranopia, by CIEDE2000 (CIE 142-2001)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from rankscope.record import phases
from rankscope_exporter.gpu.allocation import idleness
from rankscope_exporter.ranks import judged_runs
from rankscope_exporter.report import colors

Rgb = Sequence[float]
"""Linear light, from 0 to 1."""
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)
# Machado, Oliveira and Fernandes (2009), severity 1.0.
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
DIFFERENT = 15.0
PHASES_DIFFER = 14.0
COMPUTING_AND_WAITING = ("forward", "backward", "collective_wait")


def multiplied(matrix: Sequence[Rgb], rgb: Rgb) -> list[float]:
    return [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in matrix]


def seen(color: str) -> Rgb:
    """Return a color, such as #ff0000, in linear light."""
    parts = (part / 255 for part in bytes.fromhex(color[1:]))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def seen_with_deuteranopia(color: str) -> Rgb:
    return [min(1.0, max(0.0, part)) for part in multiplied(DEUTERANOPIA, seen(color))]


def lab(rgb: Rgb) -> tuple[float, float, float]:
    parts = (part / white for part, white in zip(multiplied(TO_XYZ, rgb), WHITE, strict=True))
    x, y, z = (part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116 for part in parts)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def weight(chroma: float) -> float:
    return math.sqrt(chroma**7 / (chroma**7 + 25**7))


def difference(one: Rgb, other: Rgb) -> float:
    """Return CIEDE2000's difference of two colors, by the formulas of Sharma, Wu and Dalal (2005)."""
    (l1, a1, b1), (l2, a2, b2) = lab(one), lab(other)
    stretch = 1.5 - 0.5 * weight((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2)
    c1, c2 = math.hypot(a1 * stretch, b1), math.hypot(a2 * stretch, b2)
    h1 = math.degrees(math.atan2(b1, a1 * stretch)) % 360
    turn = (math.degrees(math.atan2(b2, a2 * stretch)) - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2
    light, chroma = ((l1 + l2) / 2 - 50) ** 2, (c1 + c2) / 2
    parts = ((30, -0.17, 1), (0, 0.24, 2), (-6, 0.32, 3), (63, -0.20, 4))
    tones = 1 + sum(factor * math.cos(math.radians(times * hue - shift)) for shift, factor, times in parts)
    by_light = (l2 - l1) / (1 + 0.015 * light / math.sqrt(20 + light))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * chroma * tones)
    rotation = -2 * weight(chroma) * math.sin(math.radians(60 * math.exp(-(((hue % 360 - 275) / 25) ** 2))))
    return math.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)


both_sights = pytest.mark.parametrize("sight", [seen, seen_with_deuteranopia])


def test_the_difference_is_ciede2000s() -> None:
    # Known values: of pure red and green, and of black and white.
    assert difference(seen("#ff0000"), seen("#00ff00")) == pytest.approx(86.6, abs=0.1)
    assert difference(seen("#000000"), seen("#ffffff")) == pytest.approx(100.0, abs=0.1)


@both_sights
def test_computing_and_waiting_differ_also_without_red_and_green(sight: Callable[[str], Rgb]) -> None:
    for one, other in combinations(COMPUTING_AND_WAITING, 2):
        shown = (colors.PHASE_COLORS[one], colors.PHASE_COLORS[other])
        assert difference(*map(sight, shown)) >= DIFFERENT, (one, other)


@both_sights
def test_all_phases_differ(sight: Callable[[str], Rgb]) -> None:
    for one, other in combinations({**colors.PHASE_COLORS, "own": colors.OWN_COLOR}.items(), 2):
        assert difference(sight(one[1]), sight(other[1])) >= PHASES_DIFFER, (one, other)


def test_ten_consecutive_ranks_have_different_colors() -> None:
    for one, other in combinations(colors.RANK_COLORS, 2):
        assert difference(seen(one), seen(other)) >= DIFFERENT, (one, other)


@pytest.mark.parametrize("severity", [colors.BAD, colors.CAUTION, colors.GOOD])
def test_the_color_of_a_rank_is_no_severity(severity: str) -> None:
    for rank in colors.RANK_COLORS:
        assert difference(seen(rank), seen(severity)) >= DIFFERENT, rank


def test_every_phase_and_every_cause_has_a_color() -> None:
    assert {*judged_runs.CAUSES, *judged_runs.NOT_LOST, *phases.NAMES} <= colors.CAUSE_COLORS.keys()


def test_every_state_of_a_gpu_has_a_color() -> None:
    assert tuple(colors.STATE_COLORS) == idleness.STATES
