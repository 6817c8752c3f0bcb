"""Checks of readable records: records with values that no rank can have are refused."""

from __future__ import annotations

from itertools import chain

from rankscope.record.reader import UnreadableRecordError
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import LABEL_LIMIT, NUMBER, is_label
from rankscope_exporter.ranks.rank import is_alone

LABELS = (
    "run",
    "rank",
    "local_rank",
    "world_size",
    "group",
    "node",
    "pid",
    "uuid",
    "backend",
    "torch_version",
    "rankscope_version",
)
CLOCK_TOLERANCE = 60.0  # seconds; records are written with this machine's clock


def check_info(snapshot: RankSnapshot) -> None:
    """Raise UnreadableRecordError if labels or names are not printable, or contradict each other."""
    info = snapshot.info
    for label in LABELS:
        value = info.get(label)
        if not isinstance(value, str) or not is_label(value):
            detail = f"{label} is not printable text of up to {LABEL_LIMIT} characters"
            raise UnreadableRecordError("foreign", snapshot.path, detail)
    if not info["run"].strip():
        raise UnreadableRecordError("unnamed", snapshot.path, "the run has no name")
    if not (NUMBER.fullmatch(info["rank"]) and NUMBER.fullmatch(info["pid"])):
        raise UnreadableRecordError("foreign", snapshot.path, "rank or pid is not a number")
    described = info.get("group_descriptions", ()), info.get("pairwise", ())
    chosen = (info.get(name, {}).values() for name in ("settings", "slurm", "tracker_ids"))
    for text in chain(snapshot.groups, *described, *chosen, [info.get("rendezvous", "")]):
        if not is_label(text):
            raise UnreadableRecordError("foreign", snapshot.path, f"a name is not printable text: {text[:20]!r}")
    is_known = bool(NUMBER.fullmatch(info["world_size"])) and not is_alone(info)
    if is_known and int(info["rank"]) >= int(info["world_size"]):
        detail = f"rank {info['rank']} is not below the world size {info['world_size']}"
        raise UnreadableRecordError("impossible_rank", snapshot.path, detail)


def check_time(snapshot: RankSnapshot, now: float) -> None:
    """Raise UnreadableRecordError if the record starts in the future: it would be younger than all others."""
    if snapshot.unix_field("started_unix") > now + CLOCK_TOLERANCE:
        raise UnreadableRecordError("future_start", snapshot.path, "its start is in the future")
