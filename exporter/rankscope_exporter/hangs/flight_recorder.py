"""Read dumps of torch's flight recorder: one file for each rank, as pickle or JSON.

torch writes `<prefix><rank>` (TORCH_FR_DUMP_TEMP_FILE, else TORCH_NCCL_DEBUG_INFO_TEMP_FILE). The format is that of
`torch.distributed.flight_recorder`, versions 1.4 (torch 2.3) to 2.10 (torch 2.13). A pickle can run code when it is
loaded; this reader accepts only numbers, strings, lists and dictionaries.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankscope_exporter.diagnosis.waits import Operation, Position
from rankscope_exporter.hangs.entries import Entry, read_entries

SIZE_LIMIT = 512 * 2**20
"""The size limit of a file in bytes. 2,000 operations with their stacks take about 10 MB."""
SAME_SIZE = re.compile(
    r"all_?reduce(_coalesced)?|broadcast|reduce|_?(all_gather|reduce_scatter)_?(base|single|.*_coalesced)?"
)
"""Operations whose input has the same number of elements on all ranks."""


class DumpError(Exception):
    """A dump cannot be read. The message names the file and the reason."""


@dataclass(frozen=True)
class Dump:
    """The dump of one rank."""

    rank: int
    groups: Mapping[str, Group]
    """The groups by a key, which is the same for all ranks of a group: their names, if no others have them."""
    entries: Sequence[Entry]
    status: Mapping[str, Mapping[str, float]]
    """Torch's own counts by group, if the dump has them."""


@dataclass(frozen=True)
class Group:
    """A process group. `ranks` are global ranks; empty if the dump does not name them."""

    name: str
    description: str
    ranks: Sequence[int]


def read_dumps(path: Path, unreadable: list[DumpError] | None = None) -> list[Dump]:
    """Return the dumps ordered by rank. Raise DumpError if there is none, or two for the same rank.

    `path` is their directory or the prefix given to torch, e.g. `/tmp/nccl_trace_rank_`. Only regular files whose names
    end in a number are dumps. The errors of those that cannot be read are added to `unreadable`; without it, or if none
    can be read, the first one is raised. A rank that was killed while torch wrote its dump leaves a part of it.
    """
    directory, prefix = (path, "") if path.is_dir() else (path.parent, path.name)
    form = re.compile(rf"{re.escape(prefix)}{'' if prefix else '.*?'}(\d+)(?:\.(?:json|pkl|pickle))?")
    try:
        # Reading a pipe would block forever.
        files = [path for path in directory.iterdir() if path.is_file()]
    except OSError as error:
        raise DumpError(f"{directory}: {error.strerror}") from error
    named = [(file, match) for file in files if (match := form.fullmatch(file.name))]
    by_rank: dict[int, Path] = {}
    for file, match in sorted(named):
        rank = int(match[1])
        if rank in by_rank:
            raise DumpError(f"{path}: {by_rank[rank].name} and {file.name} are both dumps of rank {rank}")
        by_rank[rank] = file
    if not by_rank:
        raise DumpError(f"{path}: no dump files found (such as nccl_trace_rank_0)")
    found = [_try_read(file, rank) for rank, file in sorted(by_rank.items())]
    dumps = [one for one in found if isinstance(one, Dump)]
    errors = [one for one in found if isinstance(one, DumpError)]
    if errors and (unreadable is None or not dumps):
        raise errors[0]
    if unreadable is not None:
        unreadable += errors
    return _without_old_batches(_separate(dumps))


def _try_read(path: Path, rank: int) -> Dump | DumpError:
    try:
        return read(path, rank)
    except DumpError as error:
        return error


def read(path: Path, rank: int) -> Dump:
    """Return one dump. Raise DumpError if it cannot be read."""
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise DumpError(f"{path}: larger than {SIZE_LIMIT} bytes")
        return _parse(_load(path), rank)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DumpError(f"{path}: not a dump of torch's flight recorder: {error!r}") from error


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it contains a {module}.{name}")


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(1) in b"{ \n":
            return json.loads(path.read_text())
        file.seek(0)
        try:
            return _PlainUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, IndexError, MemoryError, OverflowError) as error:
            raise ValueError(str(error)) from error


def _parse(document: Any, rank: int) -> Dump:
    entries = read_entries(document["entries"])
    groups = {
        str(name): _group(str(name), config)
        for name, config in dict(document.get("pg_config", {})).items()
        if name != ""
    }
    for entry in entries:
        groups.setdefault(entry.group, Group(entry.group, entry.description, ()))
    return Dump(rank, groups, entries, _status(document, groups, entries))


def _group(name: str, config: Any) -> Group:
    """Return a group from its entry, which in version 1 only lists the ranks."""
    if isinstance(config, list):
        return Group(name, "", tuple(map(int, config)))
    return Group(name, str(config.get("desc", "")), _numbers(config.get("ranks", "")))


def _numbers(text: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(text))))


def _status(document: Any, groups: Mapping[str, Group], entries: Sequence[Entry]) -> Mapping[str, Mapping[str, float]]:
    """Return torch's counts by group name. The dump has them by an id that follows the order of creation."""
    status = {int(number): dict(counts) for number, counts in dict(document.get("pg_status", {})).items()}
    names = {entry.group_id: entry.group for entry in entries}
    if len(status) == len(groups) and all(name.isdigit() for name in groups):
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
    issued = dump.status.get(entry.group, {}).get("last_enqueued_collective", entry.number)
    return is_of_batch and entry.number <= float(issued)


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
    called: dict[str, dict[float, list[tuple[int, Entry]]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        for entry in dump.entries:
            if not entry.is_pairwise:
                called[entry.group][entry.number].append((dump.rank, entry))
    for group, numbers in sorted(called.items()):
        for number, by_rank in sorted(numbers.items()):
            by_call = _by_call(by_rank)
            if len(by_call) > 1 and not all(entry.is_complete for _, entry in by_rank):
                yield groups_of(dumps)[group], number, by_call
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
    return [_position(dump, groups, pairs, started) for dump in dumps]


def _position(dump: Dump, groups: Mapping[str, Group], pairs: set[str], started: set[tuple[str, float]]) -> Position:
    issued: dict[str, float] = {}
    completed: dict[str, float] = {}
    for name, counts in dump.status.items():
        if name not in pairs:
            issued[name] = float(counts["last_enqueued_collective"])
            completed[name] = float(counts["last_completed_collective"])
    for name, entries in _collectives(dump).items():
        newest = max(entry.number for entry in entries)
        pending = [entry.number - 1.0 for entry in entries if not entry.is_complete]
        issued[name] = max(issued.get(name, 0.0), newest)
        completed[name] = min(completed.get(name, newest), *pending, newest)
    waits_in = next(_pending_operations(dump, groups, started), None)
    return Position(dump.rank, issued, completed, waits_in)


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
