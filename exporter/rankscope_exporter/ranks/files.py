"""Choose the files of the run directories that are read.

A user who fills a directory displaces no other user's ranks. The records of shown ranks are read first. If there are
too many other files, each owner has the same share: the owner is the only property of a file that its author cannot
forge.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable

from rankscope.record.layout import SIZE
from rankscope.record.listing import RankFile, take_turns
from rankscope_exporter.ranks.principals import principal

OWNER_FILES_LIMIT = 256  # files of one owner per scan, which take 15 ms


def fair_share(
    files: Iterable[RankFile],
    limit: int,
    unreadable: Collection[tuple[int, int, int]] = frozenset(),
    owner_limit: int = OWNER_FILES_LIMIT,
) -> list[RankFile]:
    """Return at most `limit` of the files: the newest of each owner, then the second newest of each, and so on.

    Known files, which hold shown ranks, come first. Files with another length than a record, or whose stamp is in
    `unreadable`, come last. A new file is therefore read soon, even if there are more owners than files to read.
    """

    def priority(file: RankFile) -> int:
        if file.is_known:
            return 0
        return 2 if file.size != SIZE or file.stamp in unreadable else 1

    # Owners come in random order, since a user with many accounts can choose all other properties of a file.
    order: dict[int, float] = defaultdict(random.random)
    by_owner = sorted(files, key=lambda file: (order[principal(file.owner)], priority(file), -file.modified, file.name))
    return sorted(take_turns(by_owner, owner_limit, principal=principal), key=priority)[:limit]


def each_once(files: Iterable[RankFile]) -> list[RankFile]:
    """Return one name of each file, preferably a known one. Hard links do not use up their owner's share."""
    found: dict[tuple[int, int, int], RankFile] = {}
    for file in files:
        if file.stamp not in found or file.is_known:
            found[file.stamp] = file
    return list(found.values())
