"""What a readable record has to be to be shown: what no rank can say of itself is refused."""

from __future__ import annotations

from itertools import chain

from rankscope.record.reader import UnreadableRecordError
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import LABEL_LIMIT, NUMBER, is_label

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
CLOCKS_APART = 60.0  # seconds: a record is written on this machine, by its clock


def check_info(snapshot: RankSnapshot) -> None:
    """Raises UnreadableRecordError if labels and names are not what Prometheus and people take, or contradict."""
    info = snapshot.info
    for label in LABELS:
        value = info.get(label)
        if not isinstance(value, str) or not is_label(value):
            raise UnreadableRecordError(
                "foreign", snapshot.path, f"its {label} is no printable text of ≤ {LABEL_LIMIT}"
            )
    if not info["run"].strip():
        raise UnreadableRecordError("unnamed", snapshot.path, "its run has no name")
    if not (NUMBER.fullmatch(info["rank"]) and NUMBER.fullmatch(info["pid"])):
        raise UnreadableRecordError("foreign", snapshot.path, "its rank or pid is no number")
    described = info.get("group_descriptions", ()), info.get("pairwise", ())
    chosen = (info.get(name, {}).values() for name in ("settings", "slurm", "tracker_ids"))
    for text in chain(snapshot.groups, *described, *chosen):
        if not is_label(text):
            raise UnreadableRecordError("foreign", snapshot.path, f"a name in it is no printable text: {text[:20]!r}")
    if NUMBER.fullmatch(info["world_size"]) and int(info["rank"]) >= int(info["world_size"]):
        detail = f"it says to be rank {info['rank']} of a run of {info['world_size']}"
        raise UnreadableRecordError("impossible_rank", snapshot.path, detail)


def check_time(snapshot: RankSnapshot, now: float) -> None:
    """Raises UnreadableRecordError if it began in the future: it would be younger than every other."""
    if snapshot.unix_field("started_unix") > now + CLOCKS_APART:
        raise UnreadableRecordError("future_start", snapshot.path, "it says to have begun in the future")
