"""The name of a group of ranks in a record: `0-3`, `0-6:2`, or numbers with commas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

FORM = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?|\d{1,9}(?:,\d{1,9})*")
LARGEST = 100_000  # ranks of a group


def compact(ranks: list[int]) -> str:
    """Return sorted ranks as `first-last`, `first-last:stride`, or a list with commas if there is no single stride."""
    if len(ranks) == 1:
        return str(ranks[0])
    stride = ranks[1] - ranks[0]
    if ranks == list(range(ranks[0], ranks[-1] + 1, stride)) and (len(ranks) > 2 or stride == 1):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    return ",".join(map(str, ranks))


def members(name: str) -> Sequence[int]:
    """Return the sorted ranks of a name. Empty if it was cut off or is not as a rank writes it.

    A range stays one: any process can write names of many ranks into its record, and readers read them each second.
    """
    match = FORM.fullmatch(name)
    if match is None:
        return ()
    if match[2] is None:
        return tuple(sorted(map(int, name.split(","))))
    ranks = range(int(match[1]), int(match[2]) + 1, int(match[3] or 1) or 1)
    return ranks if len(ranks) <= LARGEST else ()


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `Rank 3`, or for several ranks `Ranks 0-2,5`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers in short form, such as `0-2,5`."""
    consecutive = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in consecutive]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
