"""Numbers in a rank record: which ones its reader accepts, for its writer to check before it writes them."""

from __future__ import annotations

LARGEST_NUMBER = 2.0**128  # of one slot, or added to it at once: a loss scale (float32) is no larger
LARGEST = 2.0**200  # of all slots together; their sum stays finite


def as_number(value: object) -> float | None:
    """Return the value as a float if it is finite, not negative and at most LARGEST_NUMBER; else None.

    The value may be of any type: what `float` refuses is no number.
    """
    try:
        number = float(value)  # type: ignore[arg-type]  # that is the question
    except Exception:  # a type of the script's may raise anything
        return None
    return number if 0.0 <= number <= LARGEST_NUMBER else None
