"""The groups of ranks that this rank synchronizes with: their names, indices in the record and sequence numbers.

A group is identified by its ranks. Two process groups of the same ranks (such as one for NCCL and one for gloo) share
an index, and their sequence numbers are added, which has the same result on every rank of the group. The group has the
descriptions of both: with two stages, Megatron's embedding group has the ranks of its pipeline group.

Sequence numbers are torch's own if the backend counts (gloo, NCCL, UCC): torch also counts collectives that DDP and
compiled code issue in C++, where no patch sees them. Gloo also counts operations between two ranks of a group. These
are subtracted; otherwise the ranks of a pipeline would never agree. torch's numbers are read once a step
(`Groups.read_numbers`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

from rankscope.guard import logger
from rankscope.process import identity
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.text import LABEL_LIMIT, replace_unprintable
from rankscope.record.writer import RankWriter
from rankscope.timeline.framework_groups import describe_by_framework

GROUP_COLLECTIVES = INDEX["group_collectives"]
GROUP_WAIT = INDEX["group_wait_seconds"]
NAME_LIMIT = 128  # characters: MAX_GROUPS such names fit into the info
DESCRIPTION_LIMIT = 48
UNDESCRIBED = ("", "undefined", "default_pg")  # torch's descriptions of a group without one, and of the default group
UNCOUNTED = layout.MAX_GROUPS  # the index of groups that do not fit into the record


class Group:
    """A process group: its index in the record, its last sequence number, its factors of bus bytes."""

    __slots__ = ("bus_factors", "index", "is_pairwise", "last", "number_slot", "reference", "sequence", "wait_slot")

    def __init__(self, index: int, ranks: int, sequence: Callable[[Any], int] | None) -> None:
        self.index = index
        is_counted = index != UNCOUNTED
        self.number_slot = GROUP_COLLECTIVES + index if is_counted else None  # of the record
        self.wait_slot = GROUP_WAIT + index if is_counted else None
        self.last = 0  # including collectives issued since torch's number was read
        self.sequence = sequence  # returns torch's number of a process group; None if the backend does not count
        self.bus_factors = bus_factors(ranks)
        self.reference: weakref.ref[Any] | None = None
        self.is_pairwise = False  # whether ranks of it send to each other


def bus_factors(ranks: int) -> tuple[float, ...]:
    """Return the bytes over each rank's link per byte of payload, by operation, in a group of `ranks`.

    As in NCCL-tests' PERFORMANCE.md (bus bandwidth; gather, scatter and all-to-all as in their .cu files). There the
    size of an all-gather, gather or scatter is that of the whole, of which a rank's payload is one part in `ranks`.
    """
    others = ranks - 1.0
    factors = {
        "all_reduce": 2 * others / ranks,
        "all_gather": others,
        "reduce_scatter": others / ranks,
        "broadcast": 1.0,
        "reduce": 1.0,
        "gather": others,
        "scatter": others,
        "all_to_all": others / ranks,
        "barrier": 0.0,
        "send": 1.0,
        "recv": 1.0,
        "ddp_all_reduce": 2 * others / ranks,
        "ddp_broadcast": 1.0,
    }
    return tuple(factors[op] for op in layout.OPS)


class Groups:
    """All process groups with a collective, and their slots. The default group has index 0."""

    def __init__(self, writer: RankWriter) -> None:
        self.names: list[str] = []
        self.descriptions: list[str] = []  # of each name, torch's descriptions of its process groups, with commas
        self.pairwise: list[str] = []  # indices of groups whose ranks send to each other, such as a pipeline's
        self.on_new: Callable[[], object] = lambda: None  # called when a name is added
        self.on_default: Callable[[bool], object] = lambda _: None  # called when the default group is made or destroyed
        self._writer = writer
        self.restart()

    def restart(self) -> None:
        """Forget the groups of the rank that this process or its parent was before."""
        self.names.clear()
        self.descriptions.clear()
        self.pairwise.clear()
        # By id and weakly: a destroyed process group must be freed, with its connections and threads.
        self._known: dict[int, Group] = {}
        self._is_full = False
        self.unread: set[Group] = set()  # groups with collectives issued since torch's numbers were read

    def describe_default(self, description: str) -> None:
        """Add a description of the group of all ranks."""
        self._index_of(identity.group_name(), replace_unprintable(description, DESCRIPTION_LIMIT))

    def find(self, process_group: Any) -> Group:
        """Return the group of a torch process group."""
        return self._known.get(id(process_group)) or self._add(process_group)

    def count_next(self, process_group: Any) -> Group:
        """Count a collective of the whole group before it is issued and may block.

        The number is the next one, without a call of torch. `read_numbers` makes one call for all of a step, which also
        counts what C++ code issued in between, in the same way on every rank.
        """
        group = self._known.get(id(process_group)) or self._add(process_group)
        if group.number_slot is not None:
            self._writer.slots[group.number_slot] += 1
        group.last += 1
        self.unread.add(group)
        return group

    def count_issued(self, process_group: Any) -> Group:
        """Count collectives of the whole group that C++ code has issued."""
        group = self._known.get(id(process_group)) or self._add(process_group)
        number = group.last + 1 if group.sequence is None else group.sequence(process_group)
        if group.number_slot is not None and number > group.last:  # less if the backend does not count one of ours
            self._writer.slots[group.number_slot] += number - group.last
        group.last = number
        self.unread.discard(group)
        return group

    def read_numbers(self) -> None:
        """Read torch's numbers of the groups with collectives since the last call. Called at a step's end."""
        unread, self.unread = self.unread, set()
        for group in unread:
            process_group = group.reference() if group.reference else None
            if process_group is not None and group.sequence is not None:
                try:
                    self.count_issued(process_group)
                except Exception:  # as above
                    group.sequence = None
                    logger.debug("rankscope: %s no longer counts collectives; counting them here", process_group)

    def catch_up(self, process_group: Any) -> Group:
        """Count collectives issued by C++ code, if the backend counts, and note the group as pairwise."""
        group = self.find(process_group)
        if not group.is_pairwise:
            self._note_pairs(group)
        return group if group.sequence is None else self.count_issued(process_group)

    def skip(self, group: Group, process_group: Any) -> None:
        """Do not count the last operation, which was not of the whole group, although the backend may have."""
        if group.sequence is not None:
            group.last = group.sequence(process_group)

    def _add(self, process_group: Any) -> Group:
        if not self.names and identity.is_distributed():
            self._index_of(identity.group_name())
        index = self._index_of(_name(process_group), _description(process_group))
        group = Group(index, _size(process_group), None)
        try:
            process_group._get_sequence_number_for_group()  # noqa: SLF001 - no public API
            # The class's function: a bound method would keep the process group alive.
            group.sequence = type(process_group)._get_sequence_number_for_group  # noqa: SLF001 - likewise
        except Exception:  # also of a process group that is written in Python
            logger.debug("rankscope: %s does not count collectives; counting them here", process_group)
        key, known = id(process_group), self._known
        group.reference = weakref.ref(process_group, lambda _: known.pop(key, None))
        known[key] = group
        return group

    def _note_pairs(self, group: Group) -> None:
        group.is_pairwise = True
        index = str(group.index)
        if group.index != UNCOUNTED and index not in self.pairwise:
            self.pairwise.append(index)
            self.on_new()

    def _index_of(self, name: str | None, description: str = "") -> int:
        if name is None:
            return UNCOUNTED
        if name in self.names:
            index = self.names.index(name)
            known = self.descriptions[index].split(",") if self.descriptions[index] else []
            joined = ",".join((*known, description))
            if description and description not in known and len(joined) <= LABEL_LIMIT:
                self.descriptions[index] = joined
                self.on_new()
            return index
        if len(self.names) == layout.MAX_GROUPS:
            if not self._is_full:
                logger.warning("rankscope: too many groups; not counting group %s and later ones", name)
            self._is_full = True
            return UNCOUNTED
        self.descriptions[len(self.names) :] = [description]  # again, if Ctrl-C came before the next line
        self.names.append(name)
        self.on_new()
        return len(self.names) - 1


def _name(process_group: Any) -> str | None:
    """Return the group's ranks, short enough for the info; None if torch.distributed does not know them."""
    try:
        name = identity.group_name(process_group) if identity.is_distributed() else None
    except Exception:  # not made by torch.distributed: its ranks have no global numbers
        return None
    if name is None or len(name) <= NAME_LIMIT:
        return name
    return f"{name[:NAME_LIMIT]}…{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _size(process_group: Any) -> int:
    """Return the number of ranks; 1, which has no traffic, if a process group written in Python does not say."""
    try:
        return int(process_group.size())
    except Exception:
        return 1


def _description(process_group: Any) -> str:
    """Return the group's description, such as `mesh_tp` or `PIPELINE_MODEL_PARALLEL_GROUP`; empty if it has none."""
    try:
        description = replace_unprintable(str(process_group.group_desc), DESCRIPTION_LIMIT)
    except Exception:  # an older torch, or a process group without a backend or written in Python
        description = ""
    return describe_by_framework(process_group) if description in UNDESCRIBED else description
