"""Read dumps of torch's flight recorder: one file for each rank, as pickle or JSON.

torch writes `<prefix><rank>` (TORCH_NCCL_DEBUG_INFO_TEMP_FILE, else TORCH_FR_DUMP_TEMP_FILE; by default
/tmp/nccl_trace_rank_). The format is that of `torch.distributed.flight_recorder`, versions 2.1 to 2.9. A pickle can run
code when it is loaded; this reader accepts only numbers, strings, lists and dictionaries.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rankscope_exporter.diagnosis.waits import Operation, Position

SIZE_LIMIT = 512 * 2**20
"""The size limit of a file in bytes. 2,000 operations with their stacks take about 10 MB."""
PEERS = re.compile(r"(\d+)(?:->|<-)(\d+)$")
"""The rank and its peer in the name of a send or receive, by their numbers within the group."""


class DumpError(Exception):
    """A dump cannot be read. The message names the file and the reason."""


@dataclass(frozen=True)
class Dump:
    """The dump of one rank."""

    rank: int
    groups: Mapping[str, Group]
    entries: Sequence[Mapping[str, Any]]
    status: Mapping[str, Mapping[str, float]]
    """Torch's own counts by group, if the dump has them."""


@dataclass(frozen=True)
class Group:
    """A process group. `ranks` are global ranks; empty if the dump does not name them."""

    name: str
    description: str
    ranks: Sequence[int]


def read_dumps(path: Path) -> list[Dump]:
    """Return the dumps ordered by rank. Raise DumpError if there is none, or two for the same rank.

    `path` is their directory or the prefix given to torch, e.g. `/tmp/nccl_trace_rank_`. Only regular files whose names
    end in a number are dumps.
    """
    directory, prefix = (path, "") if path.is_dir() else (path.parent, path.name)
    form = re.compile(rf"{re.escape(prefix)}{'' if prefix else '.*?'}(\d+)(?:\.json)?")
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
    return [read(file, rank) for rank, file in sorted(by_rank.items())]


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
    entries = [dict(entry) for entry in document["entries"]]
    groups = {
        str(name): Group(str(name), str(config.get("desc", "")), _numbers(config.get("ranks", "")))
        for name, config in dict(document.get("pg_config", {})).items()
        if name
    }
    for entry in entries:
        name, description = map(str, entry["process_group"])
        groups.setdefault(name, Group(name, description, ()))
    return Dump(rank, groups, entries, _status(document, groups, entries))


def _numbers(text: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(text))))


def _status(
    document: Any, groups: Mapping[str, Group], entries: Sequence[Mapping[str, Any]]
) -> Mapping[str, Mapping[str, float]]:
    """Return torch's counts by group name. The dump has them by an id that follows the order of creation."""
    status = {int(number): dict(counts) for number, counts in dict(document.get("pg_status", {})).items()}
    names = {int(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries}
    if len(status) == len(groups) and all(name.isdigit() for name in groups):
        in_order = dict(zip(sorted(status), sorted(groups, key=int), strict=True))
        names = in_order if in_order.items() >= names.items() else names
    return {names[number]: counts for number, counts in status.items() if number in names}


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
    """Yield pending collectives for which ranks of a group called different operations.

    Each has its group, its number and the ranks by operation.
    """
    groups = groups_of(dumps)
    called: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        for group, entries in _collectives(dump).items():
            for entry in entries:
                if not _has_completed(entry):
                    called[group, float(entry["collective_seq_id"])][_operation_name(entry)].append(dump.rank)
    for (group, number), by_name in sorted(called.items()):
        if len(by_name) > 1:
            yield groups[group], number, by_name


def positions(dumps: Sequence[Dump]) -> list[Position]:
    """Return the position of each rank."""
    groups = groups_of(dumps)
    # If a group has sends and receives, torch counts those, and they are not issued by all of its ranks.
    pairs = {
        str(entry["process_group"][0])
        for entry in chain.from_iterable(dump.entries for dump in dumps)
        if _is_point_to_point(entry)
    }
    return [_position(dump, groups, pairs) for dump in dumps]


def _position(dump: Dump, groups: Mapping[str, Group], pairs: set[str]) -> Position:
    issued: dict[str, float] = {}
    completed: dict[str, float] = {}
    for name, counts in dump.status.items():
        if name not in pairs:
            issued[name] = float(counts["last_enqueued_collective"])
            completed[name] = float(counts["last_completed_collective"])
    for name, entries in _collectives(dump).items():
        numbers = [float(entry["collective_seq_id"]) for entry in entries]
        pending = [float(one["collective_seq_id"]) for one in entries if not _has_completed(one)]
        issued[name] = max(issued.get(name, 0.0), *numbers)
        completed[name] = min(completed.get(name, max(numbers)), *(one - 1.0 for one in pending), max(numbers))
    waits_in = next(_pending_operations(dump, groups), None)
    return Position(dump.rank, issued, completed, waits_in)


def _collectives(dump: Dump) -> Mapping[str, list[Mapping[str, Any]]]:
    by_group: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in dump.entries:
        if not _is_point_to_point(entry):
            by_group[str(entry["process_group"][0])].append(entry)
    return by_group


def _operation_name(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _has_completed(entry: Mapping[str, Any]) -> bool:
    """Return whether torch has seen the operation end. With gloo it is only marked as retired."""
    return entry["state"] == "completed" or bool(entry.get("retired"))


def _is_point_to_point(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("is_p2p")) or PEERS.search(str(entry["profiling_name"])) is not None


def _pending_operations(dump: Dump, groups: Mapping[str, Group]) -> Iterator[Operation]:
    """Yield the operations that have not completed, the first one first. Coalesced sends have no peer: skip them."""
    for entry in sorted(dump.entries, key=lambda entry: int(entry["record_id"])):
        if _has_completed(entry):
            continue
        name, group = _operation_name(entry), str(entry["process_group"][0])
        if not _is_point_to_point(entry):
            yield Operation(name, group, float(entry["collective_seq_id"]))
        elif (match := PEERS.search(name)) and int(match[2]) < len(groups[group].ranks):
            yield Operation(name.split()[0], group, float(entry["p2p_seq_id"]), groups[group].ranks[int(match[2])])
