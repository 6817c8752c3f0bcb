"""Choose which files of the run directories are read.

A user who fills a directory displaces no other user's ranks. The records of ranks that are shown are read first, and
where there are too many other files each owner has the same share. The owner is the one thing about a file that its
author cannot forge.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from rankscope.record.layout import SIZE
from rankscope.record.listing import RankFile, take_turns

OWNER_FILES_LIMIT = 256  # of one owner that are read in a scan: 15 ms


def fair_share(
    files: Iterable[RankFile],
    limit: int,
    known: Collection[Path] = frozenset(),
    unreadable: Collection[tuple[int, int, int]] = frozenset(),
    owner_limit: int = OWNER_FILES_LIMIT,
) -> list[RankFile]:
    """Return at most `limit` of the files: the newest of each owner, then the second newest of each, and so on.

    The files in `known`, which hold ranks that are shown, come first. Files that have not the length of a record, or
    whose stamp is in `unreadable`, come last. So a new file is read soon, even if there are more owners than files are
    read.
    """

    def priority(file: RankFile) -> int:
        if file.path in known:
            return 0
        return 2 if file.size != SIZE or file.stamp in unreadable else 1

    # Owners come in random order: a user with many accounts can choose everything else about a file.
    order: dict[int, float] = defaultdict(random.random)
    by_owner = sorted(files, key=lambda file: (order[file.owner], priority(file), -file.modified, file.name))
    return sorted(take_turns(by_owner, owner_limit), key=priority)[:limit]


def each_once(files: Iterable[RankFile], known: Collection[Path]) -> list[RankFile]:
    """Return one name of each file, the known one if there is one: else hard links would use up their owner's share."""
    found: dict[tuple[int, int, int], RankFile] = {}
    for file in files:
        if file.stamp not in found or file.path in known:
            found[file.stamp] = file
    return list(found.values())
