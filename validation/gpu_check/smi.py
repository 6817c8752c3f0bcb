"""`nvidia-smi -q -x`: run, and read in base units."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from xml.etree import ElementTree

WITHIN = 60.0  # seconds; a first call on a driver without persistence mode takes some
# To base units.
UNITS = {"": 1.0, "MiB": 2.0**20, "W": 1.0, "C": 1.0, "MHz": 1e6, "us": 1e-6, "x": 1.0}
# How much is lost in printing: whole MiB are cut off, watts rounded to a hundredth.
STEPS = {"MiB": 2.0**20, "W": 0.005, "us": 1e-6}
WORDS = {"Yes": 1.0, "No": 0.0}
_NUMBER = re.compile(r"P?(-?\d+(?:\.\d+)?) ?(\S*?)(?:bank\(s\))?")

_LEFT_OUT = re.compile(r"\s*<(supported_clocks|serial|pdi)>.*?</\1>", re.DOTALL)


def query() -> str:
    """Its XML. Raises OSError, SubprocessError."""
    command = ["nvidia-smi", "-q", "-x"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=WITHIN).stdout


def without_identity(xml: str) -> str:
    """Without serial numbers, and without the clocks that can be set, which are thousands of lines."""
    return _LEFT_OUT.sub("", xml)


def gpus(xml: str) -> Iterator[tuple[str, ElementTree.Element, ElementTree.Element]]:
    """UUID, element and the whole document, of each GPU. Raises ParseError."""
    log = ElementTree.fromstring(xml)  # of the driver's own tool
    for gpu in log.iterfind("gpu"):
        yield gpu.findtext("uuid", ""), gpu, log


def text(element: ElementTree.Element, path: str) -> str | None:
    """What stands there; None where it says that there is nothing: N/A, a deprecation, an error."""
    found = (element.findtext(path) or "").strip()
    silent = found in ("", "N/A") or found.startswith(("Requested functionality", "Unknown Error", "[", "GPU is lost"))
    return None if silent else found


def quantity(found: str | None) -> tuple[float, float] | None:
    """A number in its base unit and how exact it was printed; None for what is no number with a known unit."""
    if found in WORDS:
        return WORDS[found], 0.0
    match = _NUMBER.fullmatch(found or "")
    if match is None or match[2] not in UNITS:
        return None
    return float(match[1]) * UNITS[match[2]], STEPS.get(match[2], 0.0)


def look_up(element: ElementTree.Element, paths: str) -> tuple[float, float] | None:
    """By `a/b|c/d+c/e`: the first alternative of which every summand is there."""
    for alternative in paths.split("|"):
        summands = [quantity(text(element, path)) for path in alternative.split("+")]
        known = [summand for summand in summands if summand is not None]
        if len(known) == len(summands):
            return sum(value for value, _ in known), sum(step for _, step in known)
    return None
