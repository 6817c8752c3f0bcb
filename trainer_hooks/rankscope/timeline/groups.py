"""The groups of ranks that this rank synchronizes with: their names, indices in the record and sequence numbers.

A group is its ranks. Two process groups of the same ranks (a second one for gloo beside NCCL's) share an index, and
their sequence numbers are summed: on every rank of the group alike.

Sequence numbers are torch's own where the backend counts (gloo, NCCL, UCC): DDP and compiled code issue collectives
in C++, past every patch, and torch counts them too. Gloo also counts what only two of a group's ranks do, so these are
taken out again; else the ranks of a pipeline would never agree. Torch is asked once a step (`Groups.ask`).
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
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import RankWriter

GROUP_COLLECTIVES = INDEX["group_collectives"]
GROUP_WAIT = INDEX["group_wait_seconds"]
NAME_LIMIT = 128  # characters: MAX_GROUPS such names fit into the info
DESCRIPTION_LIMIT = 48
UNDESCRIBED = (
    "undefined",
    "default_pg",
)  # torch's own words for a group that was given none, and for the default group
UNCOUNTED = layout.MAX_GROUPS  # the index of a group for which none is left


class Group:
    """One process group: its index in the record, its last sequence number, the factors of its bus bytes."""

    __slots__ = ("bus_factors", "index", "is_pairwise", "last", "number_slot", "reference", "sequence", "wait_slot")

    def __init__(self, index: int, ranks: int, sequence: Callable[[Any], int] | None) -> None:
        self.index = index
        is_counted = index != UNCOUNTED
        self.number_slot = GROUP_COLLECTIVES + index if is_counted else None  # of the record
        self.wait_slot = GROUP_WAIT + index if is_counted else None
        self.last = 0  # with what was issued since torch was asked
        self.sequence = sequence  # torch's number of a process group; None where the backend does not count
        self.bus_factors = bus_factors(ranks)
        self.reference: weakref.ref[Any] | None = None
        self.is_pairwise = False  # whether two of its ranks have sent something to each other


def bus_factors(ranks: int) -> tuple[float, ...]:
    """By operation: bytes over each rank's link for a byte of payload, in a group of `ranks`.

    After NCCL-tests' PERFORMANCE.md (bus bandwidth; gather, scatter and all-to-all from their .cu files). There the
    size of an all-gather or gather is that of the whole result, of which a rank's payload is one part in `ranks`; the
    same with what scatter gives to a rank.
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
    """Every process group that took part in a collective, and their slots. The default group has index 0."""

    def __init__(self, writer: RankWriter) -> None:
        self.names: list[str] = []
        self.descriptions: list[str] = []  # of each name what the script or framework calls it, as torch has it
        self.pairwise: list[str] = []  # indices of those in which ranks send to each other, as stages of a pipeline do
        self.on_new: Callable[[], None] | None = None  # called when a name was added
        self.on_default: Callable[[bool], object] = lambda _: None  # called when the default group is made or destroyed
        self._writer = writer
        self.restart()

    def restart(self) -> None:
        """Forget the groups of the rank that this process was before, or that it was forked from."""
        self.names.clear()
        self.descriptions.clear()
        self.pairwise.clear()
        # By id and weakly: a process group that the script destroys must go, with its connections and threads.
        self._known: dict[int, Group] = {}
        self._is_full = False
        self.unasked: set[Group] = set()  # those of which collectives were issued since torch was asked for its numbers

    def notice_default(self, exists: bool) -> None:
        """Pass on that the default group was made, or destroyed."""
        self.on_default(exists)

    def of(self, process_group: Any) -> Group:
        """The group of a torch process group. Only the first call for each costs anything."""
        return self._known.get(id(process_group)) or self._meet(process_group)

    def issuing(self, process_group: Any) -> Group:
        """A collective of the whole group is about to be issued: its number is in the record before it blocks.

        It is taken for the next one without a call into torch: `ask` makes one for all of a step, so that what C++ code
        issued in between counts by then. On every rank alike.
        """
        group = self._known.get(id(process_group)) or self._meet(process_group)
        if group.number_slot is not None:
            self._writer.slots[group.number_slot] += 1
        group.last += 1
        self.unasked.add(group)
        return group

    def issued(self, process_group: Any) -> Group:
        """C++ code has issued collectives of the whole group."""
        group = self._known.get(id(process_group)) or self._meet(process_group)
        number = group.last + 1 if group.sequence is None else group.sequence(process_group)
        if group.number_slot is not None and number > group.last:  # less, if one of ours is none to the backend
            self._writer.slots[group.number_slot] += number - group.last
        group.last = number
        self.unasked.discard(group)
        return group

    def ask(self) -> None:
        """At a step's end: torch's own numbers of the groups of which collectives were issued since."""
        unasked, self.unasked = self.unasked, set()
        for group in unasked:
            process_group = group.reference() if group.reference else None
            if process_group is not None and group.sequence is not None:
                try:
                    self.issued(process_group)
                except RuntimeError:
                    group.sequence = None
                    logger.debug("rankscope: %s no longer counts collectives; Rankscope does", process_group)

    def catch_up(self, process_group: Any) -> Group:
        """Count what was issued past us, if the backend did."""
        group = self.of(process_group)
        if not group.is_pairwise:
            self._note_pairs(group)
        return group if group.sequence is None else self.issued(process_group)

    def skip(self, group: Group, process_group: Any) -> None:
        """What was issued last was not for the whole group: the backend may have counted it all the same."""
        if group.sequence is not None:
            group.last = group.sequence(process_group)

    def _meet(self, process_group: Any) -> Group:
        if not self.names and identity.is_distributed():
            self._index_of(identity.group_name())
        index = self._index_of(_name(process_group), _description(process_group))
        group = Group(index, process_group.size(), None)
        try:
            process_group._get_sequence_number_for_group()  # noqa: SLF001 - torch has no public one
            # Of the class: a bound method would keep the process group.
            group.sequence = type(process_group)._get_sequence_number_for_group  # noqa: SLF001 - likewise
        except RuntimeError:
            logger.debug("rankscope: %s counts no collectives; Rankscope does", process_group)
        key, known = id(process_group), self._known
        group.reference = weakref.ref(process_group, lambda _: known.pop(key, None))
        known[key] = group
        return group

    def _note_pairs(self, group: Group) -> None:
        group.is_pairwise = True
        index = str(group.index)
        if group.index != UNCOUNTED and index not in self.pairwise:
            self.pairwise.append(index)
            self._announce()

    def _index_of(self, name: str | None, description: str = "") -> int:
        if name is None:
            return UNCOUNTED
        if name in self.names:
            index = self.names.index(name)
            if description and not self.descriptions[index]:
                self.descriptions[index] = description
                self._announce()
            return index
        if len(self.names) == layout.MAX_GROUPS:
            if not self._is_full:
                logger.warning("rankscope: group %s and further ones are not counted by group: too many", name)
            self._is_full = True
            return UNCOUNTED
        self.names.append(name)
        self.descriptions.append(description)
        self._announce()
        return len(self.names) - 1

    def _announce(self) -> None:
        if self.on_new is not None:
            self.on_new()


def _name(process_group: Any) -> str | None:
    """The group's ranks, short enough for the info; None if torch.distributed does not know them."""
    try:
        name = identity.group_name(process_group) if identity.is_distributed() else None
    except (KeyError, ValueError):  # made past torch.distributed: its ranks have no global numbers
        return None
    if name is None or len(name) <= NAME_LIMIT:
        return name
    return f"{name[:NAME_LIMIT]}…{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _description(process_group: Any) -> str:
    """What it was called when it was made, such as `mesh_tp` or `PIPELINE_MODEL_PARALLEL_GROUP`; empty if nothing."""
    try:
        description = replace_unprintable(str(process_group.group_desc), DESCRIPTION_LIMIT)
    except (AttributeError, RuntimeError):  # an older torch, or a process group without a backend
        return ""
    return "" if description in UNDESCRIBED else description
