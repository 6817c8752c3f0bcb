"""A reading of RAS' answer: the processes and ranks that are dead, missing, failing or behind, one line for each.

The forms are those of rasClientRunInit and rasClientRunComms in NCCL's src/ras/client_support.cc: 2.24 and 2.25 count
all collectives of a communicator, later releases those of each operation. Ranks are those of the communicator, which
are the run's only if it has as many: the line names the process, too, by the pid in the job's own pid namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rankscope.record.group_name import format_ranges

LINES_LIMIT = 40
"""The most lines of a reading."""
READ_LIMIT = 20_000
"""The most lines that are read. RAS writes one for each rank of an outlier."""
RANKS_LIMIT = 2**17
ROW = re.compile(r" *(\d{1,9}) +(\d{1,9}) +\d+ +[\d-]+ +(\d{1,9}) +\d+ +[A-Z]+ +([A-Z,]+)")
"""A group of communicators of one size: group, communicators, ranks of each, and errors."""
PROCESS = re.compile(r"  (Process \d+ on node \S+ managing GPUs? .+)")
COMMUNICATOR = re.compile(r"#(\d{1,9})-(\d{1,9}) \([0-9a-f]+\) ([A-Z]+)")
MISSING = re.compile(r"  Missing communicator data from (\d{1,9}) ranks?")
MISSING_RANKS = re.compile(r"  The (?:missing|unknown) ranks?: ([\d,]+)")
COUNTS = re.compile(r"  Communicator ranks have different (.+?) counts")
SEVERAL = re.compile(r"  (\d{1,9}) ranks (?:have )?(.+)")
RANK = re.compile(r"  Rank (\d{1,9})(?: (?:has )?(.+))?")
PLACE = re.compile(r"managed by (process \d{1,10} on node [0-9a-fA-F.:%]{1,64}\w*)$")
LAUNCHED = re.compile(r"launched up to operation (\d{1,18})")
ERRORS = {"INCOMPLETE": "does not answer RAS", "DEAD": "is dead for RAS: it cannot be reached"}


@dataclass
class _Part:
    """Ranks of a communicator in one state."""

    state: str
    count: int = 0
    ranks: list[int] = field(default_factory=list)
    place: str = ""
    """The process and its node, if it is one rank."""

    def name(self, communicator: str) -> str:
        """Return the ranks as the subject of a sentence."""
        several = "s" if self.count > 1 else ""
        named = f"Rank{several} {format_ranges(self.ranks)}" if self.ranks else f"{self.count} rank{several}"
        return f"{named} of {communicator}{f' ({self.place})' if self.place else ''}"

    @property
    def verb(self) -> str:
        return "are" if self.count > 1 else "is"

    @property
    def launched(self) -> int:
        found = LAUNCHED.fullmatch(self.state)
        return int(found[1]) if found else 0


@dataclass
class _Block:
    """The lines about one communicator under one of RAS' headings."""

    heading: str
    operation: str = ""
    parts: list[_Part] = field(default_factory=list)


def describe_answer(lines: Sequence[str]) -> Iterator[str]:
    """Yield the reading of an answer. The first line is about all of it."""
    lines = lines[:READ_LIMIT]
    rows = [row for line in lines if (row := ROW.fullmatch(line))]
    sizes = {row[1]: row[3] for row in rows}
    found = [*_processes(lines), *_communicators(lines, sizes)]
    if not rows:
        yield "NCCL's RAS names no communicator."
    elif not found:
        total = sum(int(row[2]) for row in rows)
        yield f"NCCL's RAS reports no error in {total} communicator{'s' * (total != 1)}."
    yield from found[:LINES_LIMIT]
    if len(found) > LINES_LIMIT:
        yield f"{len(found) - LINES_LIMIT} more lines are in the answer below."


def _processes(lines: Sequence[str]) -> Iterator[str]:
    heading = ""
    for line in lines:
        if not line.startswith(" "):
            heading = line
        elif heading in ERRORS and (process := PROCESS.fullmatch(line)):
            yield f"{process[1]} {ERRORS[heading]}."


def _communicators(lines: Sequence[str], sizes: dict[str, str]) -> Iterator[str]:
    name, block = "", _Block("")
    for line in lines:
        if not line.startswith(" "):
            if heading := COMMUNICATOR.fullmatch(line):
                yield from _describe(block, name)
                size = sizes.get(heading[1])
                name = f"communicator #{heading[1]}-{heading[2]}{f' ({size} ranks)' if size else ''}"
                block = _Block(heading[3])
            elif line:
                yield from _describe(block, name)
                block = _Block("")
        elif block.heading:
            if counts := COUNTS.fullmatch(line):
                yield from _describe(block, name)
                block = _Block(block.heading, operation=counts[1].removesuffix(" operation"))
            else:
                _add(block, line)
    yield from _describe(block, name)


def _add(block: _Block, line: str) -> None:
    """Add a line of RAS to a block."""
    if missing := MISSING.fullmatch(line):
        block.parts.append(_Part("missing", int(missing[1])))
    elif (named := MISSING_RANKS.fullmatch(line)) and block.parts:
        block.parts[-1].ranks = [int(one) for one in named[1].split(",") if 0 < len(one) < 10]
    elif several := SEVERAL.fullmatch(line):
        block.parts.append(_Part(several[2], int(several[1])))
    elif rank := RANK.fullmatch(line.partition(" -- ")[0]):
        managed = PLACE.search(line)
        place = managed[1] if managed else ""
        if rank[2]:
            block.parts.append(_Part(rank[2], 1, [int(rank[1])], place))
        elif block.parts and len(block.parts[-1].ranks) < RANKS_LIMIT:
            part = block.parts[-1]
            part.ranks.append(int(rank[1]))
            part.place = place if part.count == 1 else ""


def _describe(block: _Block, name: str) -> Iterator[str]:
    """Yield the lines of a block."""
    if block.operation:
        yield from _behind(block, name)
        return
    for part in block.parts:
        if part.state == "missing":
            yield f"{part.name(name)} {part.verb} missing: no data about {'them' if part.count > 1 else 'it'}."
        elif part.state.startswith("reported "):
            yield f"{part.name(name)} {part.state}."
    states = [part for part in block.parts if part.state.startswith("status ")]
    common = max(states, key=lambda part: part.count) if states else None
    for part in states:
        if common and part is not common:
            yield f"{part.name(name)} {'have' if part.count > 1 else 'has'} {part.state}, most have {common.state}."


def _behind(block: _Block, name: str) -> Iterator[str]:
    """Yield the ranks that have launched fewer operations than the others; if RAS does not name them, the others."""
    newest = max((part.launched for part in block.parts), default=0)
    first = [part for part in block.parts if part.launched == newest]
    operation = block.operation
    for part in sorted((one for one in block.parts if one.launched < newest), key=lambda one: one.launched):
        has = f"launched {part.launched} of {newest}" if part.launched else f"launched none of {newest}"
        ahead = "" if part.ranks or not first[0].ranks else f"; {first[0].name(name)} {first[0].verb} ahead"
        yield f"{part.name(name)} {part.verb} behind: {has} ({operation}){ahead}."
