"""The facts of the last minutes: each second is encoded and compressed once, whoever asks for it, and how often.

A run that spans nodes has no judge here: one process, the analyzer, asks the exporters of all its nodes. What is whole
on this node is not sent.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from math import inf
from pathlib import Path
from typing import NamedTuple

from rankscope.record.clock import boot_id
from rankscope.record.sampling import is_sampled
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.node_facts.wire import (
    GPUS_LIMIT,
    MOMENTS_LIMIT,
    RANKS_LIMIT,
    ROW_LIMIT,
    STEPS_LIMIT,
    VERSION,
    Moment,
    SentGpu,
    SentRank,
    checked,
    row_of,
)
from rankscope_exporter.ranks.chosen_steps import level_of
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.step_alignment import StepReader, clock_of

FOR_OTHERS = frozenset({"ranks_elsewhere", "gpus_unknown"})
"""The reasons for which this node does not judge a run and the analyzer does."""
KEPT_MOMENTS, KEPT_BYTES = 90, 4 * 2**20
MOST_STEPS, LEAST_STEPS, STEPS_OF_ALL = 8.0, 2.0, 512.0
"""The most and the fewest steps of a rank that are sent per second, and between them those of all ranks of a run. All
nodes choose the same ones, by their numbers."""
GZIP_LEVEL = 1


HEADER, LAST_BLOCK = gzip.compress(b"")[:10], b"\x03\x00"
"""The header of a gzip file, and an empty block that ends one."""


class Part(NamedTuple):
    """A part of an answer, and the same as blocks of a gzip file that refer to no others."""

    plain: bytes
    packed: bytes


def part(content: bytes) -> Part:
    """Compress a part."""
    made = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return Part(content, made.compress(content) + made.flush(zlib.Z_FULL_FLUSH))


class Checksum(NamedTuple):
    """The checksum and size of content, at the end of a gzip file."""

    crc: int = 0
    size: int = 0

    def after(self, content: bytes) -> Checksum:
        """Return the checksum of this content followed by another one."""
        return Checksum(zlib.crc32(content, self.crc), (self.size + len(content)) & 0xFFFFFFFF)


COMMA = part(b",")


def begin(node: str, boot: str) -> Part:
    """Return the beginning of a node's answers."""
    head = {"version": VERSION, "node": node, "boot": boot, "moments": []}
    return part(json.dumps(head).encode().removesuffix(b"]}"))


def separated(moments: Sequence[Part]) -> list[Part]:
    """Return the moments with a comma between two of them."""
    return [one for moment in moments for one in (COMMA, moment)][1:]


def plain(parts: Sequence[Part], now: float) -> list[bytes]:
    """Return an answer that was begun with these parts."""
    return [*(one.plain for one in parts), _end(now)]


def packed(parts: Sequence[Part], checksum: Checksum, now: float) -> list[bytes]:
    """Return the same as a gzip file. The checksum is that of the parts."""
    end = part(_end(now))
    last = struct.pack("<II", *checksum.after(end.plain))
    return [HEADER, *(one.packed for one in parts), end.packed, LAST_BLOCK, last]


def checksum_of(parts: Iterable[Part]) -> Checksum:
    """Return the checksum of these parts."""
    return reduce(lambda before, one: before.after(one.plain), parts, Checksum())


def _end(now: float) -> bytes:
    return f'],"now":{now!r}}}'.encode()


class NodeFacts:
    """The ring of moments. One thread records; any thread may ask for an answer."""

    def __init__(self, node: str, boot: str = "") -> None:
        """Set the node's name, and the ID of its boot instead of this machine's."""
        self._head = begin(node, boot or boot_id())
        self._checksums: dict[tuple[float, float], Checksum] = {}
        """By the first and the last moment, of the answers since the last second."""
        self._readers: dict[tuple[Path, float], StepReader] = {}
        self._kept: deque[tuple[float, Part]] = deque(maxlen=KEPT_MOMENTS)

    def record(self, look: Look) -> None:
        """Add one second."""
        moment = self._moment(look)
        self._kept.append((look.at, part(moment.model_dump_json(exclude_defaults=True).encode())))
        self._checksums = {}
        while len(self._kept) > 1 and sum(len(one.plain) + len(one.packed) for _, one in self._kept) > KEPT_BYTES:
            self._kept.popleft()

    def answer(self, after: float | None, now: float, *, is_packed: bool) -> list[bytes]:
        """Return the answer with the moments after the cursor; without one, with the newest moment.

        Its parts are shared by all answers: a client that does not read has no copy of them.
        """
        kept, checksums = list(self._kept), self._checksums
        found = kept[-1:] if after is None else [one for one in kept if one[0] > after][:MOMENTS_LIMIT]
        parts = [self._head, *separated([moment for _, moment in found])]
        if not is_packed:
            return plain(parts, now)
        key = (found[0][0], found[-1][0]) if found else (inf, inf)
        if key not in checksums:
            checksums[key] = checksum_of(parts)
        return packed(parts, checksums[key], now)

    def _moment(self, look: Look) -> Moment:
        sent = {run for run, reason in look.judged.not_judged.items() if reason in FOR_OTHERS}
        readings = {(run, one.rank): one for run in sent for one in look.readings[run]}
        before, self._readers = self._readers, {}
        ranks = list(islice(self._ranks(look, readings, before), RANKS_LIMIT))
        used = {rank.uuid for rank in look.scan.ranks if rank.snapshot.alive}
        others = ((uuid, gpu) for uuid, gpu in look.gpus.items() if uuid not in used)
        gpus = {
            uuid: SentGpu.model_construct(reading=gpu.reading, counters=gpu.counters)
            for uuid, gpu in islice(others, GPUS_LIMIT)
        }
        return Moment.model_construct(at=look.at, ranks=ranks, gpus=gpus)

    def _ranks(
        self,
        look: Look,
        readings: dict[tuple[Run, int], RankReading],
        before: dict[tuple[Path, float], StepReader],
    ) -> Iterator[SentRank]:
        for rank in look.scan.ranks:
            reading = readings.get((rank.run, int(rank.key[1])))
            # The times of another boot are of no use to other machines.
            if reading is None or rank.snapshot.info.get("boot_id", "") not in ("", boot_id()):
                continue
            try:
                checked(reading)  # one forged record must not make the analyzer refuse all ranks of this node
            except ValueError:
                continue
            identity = rank.snapshot.path, rank.snapshot["started_monotonic"]
            reader = self._readers[identity] = before.get(identity) or StepReader()
            reader.use(clock_of([rank.snapshot]))
            gpu, info = look.gpus.get(rank.uuid), rank.snapshot.info
            yield SentRank.model_construct(
                run=[str(info["run"]), *rank.run[1:]],
                reading=reading,
                training=rank.training,
                job=str(info.get("slurm", {}).get("job_id", "")),
                namespace=gpu.namespace if gpu else "",
                rendezvous=str(info.get("rendezvous", "")),
                clock=reader.clock,
                steps=_steps(rank, reader, reading.world_size),
            )


def _steps(rank: Rank, reader: StepReader, world_size: int) -> list[list[int]]:
    """Return the new steps that are sent: a sample of them if they are short."""
    per_second = min(MOST_STEPS, max(LEAST_STEPS, STEPS_OF_ALL / max(world_size, 1)))
    level = level_of(rank.snapshot, 1.0 / per_second)
    chosen = [step for step in reader.new_steps(rank.snapshot) if is_sampled(step.number, level)]
    rows = map(row_of, chosen[-STEPS_LIMIT:])
    return [row for row in rows if min(row) >= 0 and max(row) <= ROW_LIMIT]
