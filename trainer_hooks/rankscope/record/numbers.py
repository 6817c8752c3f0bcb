"""The numbers that a reader accepts in a rank record. The writer checks numbers from scripts before writing them."""

from __future__ import annotations

LARGEST_NUMBER = 2.0**128  # written to one slot, or added to it: a loss scale (float32) is not larger
LARGEST = 2.0**200  # for the sum of all slots, which stays finite


def as_number(value: object) -> float | None:
    """Return the value as a float if it is finite, not negative and at most LARGEST_NUMBER; else None.

    The value may be of any type.
    """
    try:
        number = float(value)  # type: ignore[arg-type]  # of any type
    except Exception:  # a type of the script may raise anything
        return None
    return number if 0.0 <= number <= LARGEST_NUMBER else None
