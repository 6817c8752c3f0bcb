"""`rankscope hang DIR` reads dumps of torch's flight recorder; `rankscope hang --run NAME` reads rank records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankscope.cli.printable import printable
from rankscope_exporter.hangs import flight_recorder, records
from rankscope_exporter.hangs.flight_recorder import DumpError
from rankscope_exporter.hangs.words import Coverage, describe_disagreement, lines

DUMPS = Coverage(
    world_size=0,
    ended={},
    reasons=("it has no readable dump", "they have no readable dumps"),
    advice="Put the dumps of all nodes into one directory.",
)
UNREADABLE_SHOWN = 20
"""The number of dumps that cannot be read of which the reason is shown."""


def show(dumps: Path | None, run: str | None, run_dirs: Sequence[Path]) -> int:
    """Print the ranks that block the run. Return the exit status: 2 if there is nothing to read."""
    try:
        found = [*(explain_dumps(dumps) if dumps else records.explain_records(run, run_dirs))]
    except (DumpError, records.NoRanksError) as error:
        print(f"rankscope hang: {printable(str(error))}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    sys.stdout.writelines(f"{printable(line)}\n" for line in found)
    return 0


def explain_dumps(path: Path) -> Iterator[str]:
    """Yield the result for the dumps in a directory or with a prefix. Raise DumpError."""
    dumps, unreadable = flight_recorder.read_dumps(path)
    found = [*lines(flight_recorder.positions(dumps), flight_recorder.groups_of(dumps), DUMPS)]
    found += [describe_disagreement(*one) for one in flight_recorder.find_disagreements(dumps)]
    yield from dict.fromkeys(found)
    for error in unreadable[:UNREADABLE_SHOWN]:
        yield f"{error}. Its rank counts as missing."
    if len(unreadable) > UNREADABLE_SHOWN:
        yield f"{len(unreadable) - UNREADABLE_SHOWN} more files could not be read."
