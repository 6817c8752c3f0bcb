"""Ranks with the same Python stacks as one group, and one sentence about what differs.

The main thread counts, and threads that C++ started for it, such as autograd's. Threads that Python started, such as a
heartbeat, only count if no rank differs in those. Addresses, thread ids, folders, the order of the threads, and the
innermost calls of the standard library do not count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rankscope.cli.stack_text import Frame, Thread, read_threads
from rankscope.record.group_name import name_ranks

WAITING_FILES = ("distributed_c10d.py", "_functional_collectives.py")
"""Files of torch in which a rank that stands waits for another one."""
ADDRESS = re.compile(r"0x[0-9a-f]+")
DIFFERENT_NAMED = 3
"""The number of groups that the sentence names, in addition to the largest one."""
FRAMES_SHOWN = 64
THREADS_SHOWN = 16
NAMES_SHOWN = 8


@dataclass(frozen=True)
class StackGroup:
    """Ranks with the same stacks, or with the same reason for having none."""

    ranks: Sequence[int]
    verb: str
    """`stand`, `wait` in a collective, or `give` no stacks."""
    place: str
    """Where they are, such as `in dataset.py:31 in filter`, or why there are no stacks."""
    lines: Sequence[str] = ()
    """The stacks. Empty if there are none. As everything that comes from a process, they may contain any characters."""

    @property
    def title(self) -> str:
        """Return `Rank 3` or `Ranks 0-2,4-7 (7 ranks)`."""
        count = len(self.ranks)
        return f"{name_ranks(self.ranks)}{f' ({count} ranks)' * (count > 1)}"

    @property
    def predicate(self) -> str:
        """Return the rest of a sentence about these ranks."""
        return f"{self.verb}{'s' * (len(self.ranks) == 1)} {self.place}"


def group_stacks(
    texts: Mapping[int, str],
    absent: Mapping[int, str] | None = None,
    operations: Mapping[int, str] | None = None,
    states: Mapping[int, str] | None = None,
) -> list[StackGroup]:
    """Return the groups of ranks by their texts, those with the fewest ranks first.

    `absent` has the reason of ranks without a text, such as `stopped by a signal`. `operations` has the collective that
    a rank waits in by its record, and `states` has the same as `absent` of ranks with a text.
    """
    absent, operations, states = absent or {}, operations or {}, states or {}
    threads = {rank: read_threads(text) for rank, text in texts.items()}
    by_key = _by(texts, lambda rank: (_key(threads[rank], texts[rank], operations.get(rank)), states.get(rank)))
    common: frozenset[Hashable] = frozenset()
    if len(by_key) == 1:
        by_key = _by(texts, lambda rank: _keys(threads[rank]))
        common = frozenset[Hashable].intersection(*map(_keys, threads.values()))
    groups = [_group(ranks, texts, [threads[rank] for rank in ranks], common, operations) for ranks in by_key]
    groups = [_with_state(one, states.get(one.ranks[0])) for one in groups]
    groups += [StackGroup(ranks, "give", f"no stacks: {absent[ranks[0]]}") for ranks in _by(absent, absent.__getitem__)]
    return sorted(groups, key=lambda one: (len(one.ranks), one.verb == "wait", one.ranks[0]))


def describe_difference(groups: Sequence[StackGroup], name: Callable[[Sequence[int]], str] = name_ranks) -> str:
    """Return one sentence: where the ranks are that differ, then where most are. `name` names them."""
    *different, last = groups
    count, total = len(last.ranks), sum(len(one.ranks) for one in groups)
    if not different:
        subject = name(last.ranks) if count == 1 else "Both ranks" if count == 2 else f"All {count} ranks"
        return f"{subject} {last.predicate}."
    parts = [f"{name(one.ranks)} {one.predicate}" for one in different[:DIFFERENT_NAMED]]
    if rest := different[DIFFERENT_NAMED:]:
        parts.append(f"{sum(len(one.ranks) for one in rest)} in {len(rest)} more groups differ, too")
    subject = f"{count} others" if count > max(1, total / 2) else name(last.ranks)
    parts.append(f"{subject} {last.predicate}")
    return f"{'; '.join(one if place == 0 else f'{one[0].lower()}{one[1:]}' for place, one in enumerate(parts))}."


def _with_state(group: StackGroup, state: str | None) -> StackGroup:
    return replace(group, place=f"{group.place}, {state}") if state else group


def _by(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Return the sorted ranks of each key."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        found[key(rank)].append(rank)
    return [*found.values()]


def _key(threads: Sequence[Thread], text: str, operation: str | None) -> Hashable:
    if not threads:
        return text
    main, *others = threads
    started_by_c = _keys([one for one in others if not one.is_pythons])
    return operation, _key_of_thread(main), started_by_c


def _keys(threads: Sequence[Thread]) -> frozenset[Hashable]:
    """Return the keys of the threads that are not idle."""
    return frozenset(_key_of_thread(one) for one in threads if not one.is_idle)


def _key_of_thread(thread: Thread) -> Hashable:
    inner = next((place for place, frame in enumerate(thread.frames) if not frame.is_standard), 0)
    return tuple((frame.name, frame.line, ADDRESS.sub("0x", frame.function)) for frame in thread.frames[inner:])


def _group(
    ranks: Sequence[int],
    texts: Mapping[int, str],
    threads: Sequence[Sequence[Thread]],
    common: frozenset[Hashable],
    operations: Mapping[int, str],
) -> StackGroup:
    """Return a group; `common` are the threads of all groups, if these differ in threads of Python only."""
    first = threads[0]
    if not first:
        lines = [f"    {line}" for line in texts[ranks[0]].split("\n") if line.strip()]
        return StackGroup(ranks, "give", "an answer that has no stacks", lines[:FRAMES_SHOWN])
    lines = [*_lines(threads)]
    own = [one for one in first[1:] if common and not one.is_idle and _key_of_thread(one) not in common]
    if own:
        return StackGroup(ranks, "stand", f"{_place(own[0].frames)}, in the thread {own[0].task}", lines)
    started_by_c = [one for one in first[1:] if not one.is_pythons and one.frames]
    frames = [frame for one in (*started_by_c[:1], first[0]) for frame in one.frames]
    operation = operations.get(ranks[0])
    waiting = _notable(frames)
    if operation is None and waiting and waiting.name in WAITING_FILES:
        operation = waiting.function
    return StackGroup(ranks, "wait" if operation else "stand", _place(frames, operation), lines)


def _notable(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost call that is neither of the standard library nor of the hook."""
    return next((frame for frame in frames if not (frame.is_standard or frame.is_own)), None)


def _place(frames: Sequence[Frame], operation: str | None = None) -> str:
    """Return the innermost notable call, and the user's one that led to it."""
    if not frames:
        return "in no Python code"
    notable = _notable(frames) or frames[0]
    users = next((frame for frame in frames if frame.is_users), notable)
    place = f"{operation} ({notable.name}:{notable.line})" if operation else f"{notable}"
    return f"in {place}" if users is notable else f"in {place}, called from {users}"


def _lines(threads: Sequence[Sequence[Thread]]) -> Iterator[str]:
    """Yield the threads that all ranks of a group have, and a line each for the idle ones and those that differ."""
    main, *others = threads[0]
    yield from _frames(main)
    keys = frozenset[Hashable].intersection(*map(_keys, threads))
    shared = [one for one in others if _key_of_thread(one) in keys]
    for one in shared[:THREADS_SHOWN]:
        yield f"  thread {one.name or one.task}:"
        yield from _frames(one)
    if len(shared) > THREADS_SHOWN:
        yield f"  {len(shared) - THREADS_SHOWN} more threads"
    every = [one for of_rank in threads for one in of_rank[1:]]
    yield from _folded("idle", [one for one in every if one.is_idle])
    yield from _folded("different", [one for one in every if not one.is_idle and _key_of_thread(one) not in keys])


def _frames(thread: Thread) -> Iterator[str]:
    for frame in thread.frames[:FRAMES_SHOWN]:
        yield f"    {frame.file}:{frame.line} in {frame.function}"
    if len(thread.frames) > FRAMES_SHOWN:
        yield f"    {len(thread.frames) - FRAMES_SHOWN} more calls"


def _folded(kind: str, threads: Sequence[Thread]) -> Iterator[str]:
    """Yield one line with the tasks of these threads of all ranks of a group."""
    tasks = sorted({one.task for one in threads})
    if tasks:
        yield f"  {kind} threads: {', '.join(tasks[:NAMES_SHOWN])}{', ...' * (len(tasks) > NAMES_SHOWN)}"
