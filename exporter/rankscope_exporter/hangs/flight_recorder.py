"""Read dumps of torch's flight recorder: one file for each rank, as pickle or JSON.

torch writes `<prefix><rank>` (TORCH_FR_DUMP_TEMP_FILE, else TORCH_NCCL_DEBUG_INFO_TEMP_FILE). The format is that of
`torch.distributed.flight_recorder`, versions 1.4 (torch 2.3) to 2.10 (torch 2.13).
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.waits import Operation, Position
from rankscope_exporter.hangs import plain_pickle
from rankscope_exporter.hangs.content import Content
from rankscope_exporter.hangs.entries import Entry, read_entries

SIZE_LIMIT = 64 * 2**20
"""The size limit of a file in bytes. 2,000 operations with their stacks take 10 MB at most."""
JSON_LIMIT = 4_000_000
"""The most values in JSON. One takes at most 100 bytes of memory; torch writes about 25 for an operation."""
RANKS_LIMIT = 2**17
"""The most ranks of a group."""
TEXT_OF_RANKS_LIMIT = 10 * RANKS_LIMIT
NUMBERS = re.compile(r"[0-9]{1,10}")
COUNTS = ("last_enqueued_collective", "last_completed_collective")
SAME_SIZE = re.compile(
    r"all_?reduce(_coalesced)?|broadcast|reduce|_?(all_gather|reduce_scatter)_?(base|single|.*_coalesced)?"
)
"""Operations whose input has the same number of elements on all ranks."""
EXCHANGE = re.compile(r"barrier|_?(all_?reduce|all_?gather|reduce_scatter|all_?to_?all)\w*")
"""Operations that a rank can complete only with the data of all others; a broadcast is none."""


class DumpError(Exception):
    """A dump cannot be read. The message names the file and the reason."""


@dataclass(frozen=True)
class Dump:
    """The dump of one rank."""

    rank: int
    groups: Mapping[str, Group]
    """The groups by a key, which is the same for all ranks of a group: their names, if no others have them."""
    entries: Sequence[Entry]
    status: Mapping[str, Status]
    """Torch's own counts by group, if the dump has them."""


class Status(NamedTuple):
    """The numbers of the newest issued and of the newest completed collective of a group."""

    issued: float
    completed: float


@dataclass(frozen=True)
class Group:
    """A process group. `ranks` are global ranks; empty if the dump does not name them."""

    name: str
    description: str
    ranks: Sequence[int]


def read_dumps(path: Path) -> tuple[list[Dump], list[DumpError]]:
    """Return the dumps ordered by rank, and the errors of those that cannot be read. Raise DumpError if none can be.

    `path` is their directory or the prefix given to torch, e.g. `/tmp/nccl_trace_rank_`. Only regular files whose names
    end in a number are dumps; if this process's user has any, only this user's. A rank that was killed while torch
    wrote its dump leaves a part of it.
    """
    directory, prefix = (path, "") if path.is_dir() else (path.parent, path.name)
    form = re.compile(rf"{re.escape(prefix)}{'' if prefix else '.*?'}(\d+)(?:\.(?:json|pkl|pickle))?")
    try:
        # Reading a pipe would block forever.
        files = [(file, file.stat().st_uid) for file in sorted(directory.iterdir()) if file.is_file()]
    except OSError as error:
        raise DumpError(f"{directory}: {error.strerror}") from error
    named = [(file, owner, int(match[1])) for file, owner in files if (match := form.fullmatch(file.name))]
    if not named:
        raise DumpError(f"{path}: no dump files found (such as nccl_trace_rank_0)")
    own = {file for file, owner, _ in named if owner == os.geteuid()}
    by_rank: dict[int, list[Path]] = defaultdict(list)
    for file, _, rank in named:
        if not own or file in own:
            by_rank[rank].append(file)
    found = [_read(candidates, rank) for rank, candidates in sorted(by_rank.items())]
    dumps = [one for one in found if isinstance(one, Dump)]
    errors = [one for one in found if isinstance(one, DumpError)]
    if not dumps:
        raise errors[0]
    if own:
        errors += [DumpError(f"{file}: belongs to another user") for file, _, _ in named if file not in own]
    return _without_old_batches(_separate(dumps)), errors


def _read(candidates: Sequence[Path], rank: int) -> Dump | DumpError:
    """Return a rank's dump, or why it cannot be read, also if there are several."""
    path, *others = candidates
    if others:
        return DumpError(f"{path} and {others[0].name} are both dumps of rank {rank}")
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            return DumpError(f"{path}: larger than {SIZE_LIMIT} bytes")
        return _parse(_load(data), rank)
    except OSError as error:
        return DumpError(f"{path}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        return DumpError(f"{path}: not a dump of torch's flight recorder: {error}")


def _load(data: bytes) -> Any:
    if data[:1] not in b"{ \n":
        return plain_pickle.loads(data)
    if sum(map(data.count, (b",", b"[", b"{"))) > JSON_LIMIT:
        raise ValueError(f"more than {JSON_LIMIT} values")
    return json.loads(data)


def _parse(document: Any, rank: int) -> Dump:
    content = Content()
    document = content.mapping(document, "the dump")
    # In JSON, torch leaves out an empty list, as of a rank that does not wait if torch dumps only pending operations.
    none = () if "version" in document else None
    entries = read_entries(document.get("entries", none), content)
    groups = {
        name: _group(name, config, content)
        for name, config in _by_name(document.get("pg_config", {}), "pg_config", content)
        if name
    }
    for entry in entries:
        groups.setdefault(entry.group, Group(entry.group, entry.description, ()))
    return Dump(rank, groups, entries, _status(document.get("pg_status", {}), groups, entries, content))


def _by_name(value: object, name: str, content: Content) -> Iterator[tuple[str, Any]]:
    """Yield the items of a dictionary of groups. torch 2.3 has numbers as their names."""
    for key, item in content.mapping(value, name).items():
        yield content.text(str(key), name), item


def _group(name: str, config: object, content: Content) -> Group:
    """Return a group from its entry, which in version 1 only lists the ranks."""
    listed, description = config, ""
    if isinstance(config, dict):
        listed, description = config.get("ranks", ""), content.text(config.get("desc", ""), "desc")
    if isinstance(listed, str):
        listed = NUMBERS.findall(content.text(listed, "ranks", TEXT_OF_RANKS_LIMIT))
    ranks = tuple(content.number(rank, "ranks") for rank in content.sequence(listed, "ranks"))
    if len(ranks) > RANKS_LIMIT:
        raise ValueError(f"more than {RANKS_LIMIT} ranks")
    return Group(name, description, ranks)


def _status(
    listed: object, groups: Mapping[str, Group], entries: Sequence[Entry], content: Content
) -> Mapping[str, Status]:
    """Return torch's counts by group name. The dump has them by an id that follows the order of creation."""
    status = {}
    for number, counts in _by_name(listed, "pg_status", content):
        fields = content.mapping(counts, "pg_status")
        newest = (float(content.number(fields.get(name), name)) for name in COUNTS)
        status[content.number(number, "pg_status")] = Status(*newest)
    names = {entry.group_id: entry.group for entry in entries}
    if len(status) == len(groups) and all(name.isdecimal() for name in groups):
        in_order = dict(zip(sorted(status), sorted(groups, key=int), strict=True))
        names = in_order if in_order.items() >= names.items() else names
    return {names[number]: counts for number, counts in status.items() if number in names}


def _separate(dumps: Sequence[Dump]) -> list[Dump]:
    """Return the dumps with a key for each group: `split_group` of torch 2.5 to 2.8 gives all its parts one name."""
    named: dict[str, set[Sequence[int]]] = defaultdict(set)
    for dump in dumps:
        for name, group in dump.groups.items():
            named[name].add(group.ranks)
    shared = {name for name, each in named.items() if len(each - {()}) > 1}
    keys = [{name: f"{name} {dump.groups[name].ranks}" for name in shared & set(dump.groups)} for dump in dumps]
    return [_with_keys(dump, own) if own else dump for dump, own in zip(dumps, keys, strict=True)]


def _with_keys(dump: Dump, keys: Mapping[str, str]) -> Dump:
    groups = {keys.get(name, name): group for name, group in dump.groups.items()}
    entries = [replace(entry, group=keys.get(entry.group, entry.group)) for entry in dump.entries]
    return Dump(dump.rank, groups, entries, {keys.get(name, name): counts for name, counts in dump.status.items()})


def _without_old_batches(dumps: Sequence[Dump]) -> list[Dump]:
    """Return the dumps without operations of completed batches, if they have only operations that are not complete.

    Such a dump has the operations of a completed batch, which have no state, but not its end.
    """
    batched = {_kind(entry) for dump in dumps for entry in dump.entries if entry.is_batch}
    return [
        dump
        if any(entry.is_complete for entry in dump.entries)
        else replace(dump, entries=[one for one in dump.entries if not _is_old(one, dump, batched)])
        for dump in dumps
    ]


def _kind(entry: Entry) -> str:
    """Return what groups have in common that are used alike: their description, if they have one."""
    return entry.description or entry.group


def _is_old(entry: Entry, dump: Dump, batched: set[str]) -> bool:
    is_of_batch = entry.is_pairwise and not entry.has_end and _kind(entry) in batched
    # torch counts a batch when it ends: one that is being issued has a higher number.
    status = dump.status.get(entry.group)
    return is_of_batch and (status is None or entry.number <= status.issued)


def groups_of(dumps: Sequence[Dump]) -> Mapping[str, Group]:
    """Return all groups by name. If no dump names a group's ranks, they are the ranks whose dumps have the group."""
    found: dict[str, Group] = {}
    members: dict[str, list[int]] = defaultdict(list)
    for dump in dumps:
        for name, group in dump.groups.items():
            members[name].append(dump.rank)
            if name not in found or len(group.ranks) > len(found[name].ranks):
                found[name] = group
    return {
        name: group if group.ranks else Group(name, group.description, tuple(members[name]))
        for name, group in found.items()
    }


def find_disagreements(dumps: Sequence[Dump]) -> Iterator[tuple[Group, float, Mapping[str, Sequence[int]]]]:
    """Yield each group's first pending collective for which its ranks called different operations, or gave other sizes.

    Each has its group, its number and the ranks by operation.
    """
    groups = groups_of(dumps)
    called: dict[str, dict[float, list[tuple[int, Entry]]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        for entry in dump.entries:
            if not entry.is_pairwise:
                called[entry.group][entry.number].append((dump.rank, entry))
    for group, numbers in sorted(called.items()):
        for number, by_rank in sorted(numbers.items()):
            by_call = _by_call(by_rank)
            if len(by_call) > 1 and not all(entry.is_complete for _, entry in by_rank):
                yield groups[group], number, by_call
                break


def _by_call(by_rank: Sequence[tuple[int, Entry]]) -> Mapping[str, Sequence[int]]:
    """Return the ranks by the operation that they called; with its size if all of them called the same one."""
    name = _sized if len({entry.name for _, entry in by_rank}) == 1 else lambda entry: entry.name
    found: dict[str, list[int]] = defaultdict(list)
    for rank, entry in by_rank:
        found[name(entry)].append(rank)
    return found


def _sized(entry: Entry) -> str:
    """Return the operation with its size, if that has to be the same on all ranks."""
    if entry.elements is None or not SAME_SIZE.fullmatch(entry.name):
        return entry.name
    return f"{entry.name} of {entry.elements} elements"


def positions(dumps: Sequence[Dump]) -> list[Position]:
    """Return the position of each rank."""
    groups = groups_of(dumps)
    # If a group has sends and receives, torch counts those, and they are not issued by all of its ranks.
    pairs = {entry.group for dump in dumps for entry in dump.entries if entry.is_pairwise}
    collectives = [entry for dump in dumps for entry in dump.entries if not entry.is_pairwise]
    started = {(entry.group, entry.number) for entry in collectives if entry.has_started}
    found = [_counts(dump, pairs) for dump in dumps]
    completed: dict[str, float] = {}
    for one in found:
        for name, number in one.completed.items():
            completed[name] = max(completed.get(name, number), number)
    return [
        replace(one, waits_in=_waits_in([*_pending_operations(dump, groups, started)], completed))
        for dump, one in zip(dumps, found, strict=True)
    ]


def _waits_in(pending: Sequence[Operation], completed: Mapping[str, float]) -> Operation | None:
    """Return the operation that a rank waits in: one that another rank has completed, or else the first one.

    `completed` has the newest collective of each group that any rank has completed. If it needs the data of all ranks,
    this rank's device has begun it, and so it is not an earlier send or receive that stops this device.
    """
    began = (one for one in pending if EXCHANGE.fullmatch(one.name) and one.number <= completed.get(one.group, 0.0))
    return next(began, None) or next(iter(pending), None)


def _counts(dump: Dump, pairs: set[str]) -> Position:
    """Return the numbers of the collectives that a rank has issued and completed. `pairs` are groups with sends."""
    issued: dict[str, float] = {}
    completed: dict[str, float] = {}
    for name, counts in dump.status.items():
        if name not in pairs:
            issued[name], completed[name] = counts
    for name, entries in _collectives(dump).items():
        newest = max(entry.number for entry in entries)
        pending = [entry.number - 1.0 for entry in entries if not entry.is_complete]
        issued[name] = max(issued.get(name, 0.0), newest)
        completed[name] = min(completed.get(name, newest), *pending, newest)
    return Position(dump.rank, issued, completed)


def _collectives(dump: Dump) -> Mapping[str, list[Entry]]:
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for entry in dump.entries:
        if not entry.is_pairwise:
            by_group[entry.group].append(entry)
    return by_group


def _pending_operations(
    dump: Dump, groups: Mapping[str, Group], started: set[tuple[str, float]]
) -> Iterator[Operation]:
    """Yield the operations that have not completed, the first one first, without sends to unknown ranks.

    `started` are the groups and numbers of operations that any rank's device has started.
    """
    for entry in dump.entries:
        if entry.is_complete:
            continue
        if not entry.is_pairwise:
            has_started = entry.has_started or (entry.group, entry.number) not in started
            yield Operation(entry.name, entry.group, entry.number, has_started=has_started)
            continue
        ranks = groups[entry.group].ranks
        peers = [ranks[peer] for peer in entry.peers if peer < len(ranks)]
        if peers:
            yield Operation(entry.name, entry.group, entry.number, peers[0], tuple(peers[1:]))
