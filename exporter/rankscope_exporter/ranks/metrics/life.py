"""A rank's identity, its state, and its end."""

from __future__ import annotations

from rankscope.record import layout
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.metric import RANK
from rankscope_exporter.ranks.parallelism import KINDS, coordinates
from rankscope_exporter.ranks.rank import Rank

MARKERS = ", ".join(f"`{marker}`" for marker in layout.STEP_MARKERS if marker)


def _info(rank: Rank) -> Values:
    info = {**rank.snapshot.info, "uuid": rank.uuid}
    return {(*(info[label] for label in LABELS[2:]), rank.user): 1}


def _settings(rank: Rank) -> Values:
    settings = rank.snapshot.info.get("settings")
    return {tuple(settings.get(name, "") for name in layout.SETTINGS): 1} if settings else None


def _labels(rank: Rank) -> Values:
    labels = rank.snapshot.info.get("labels")
    return {tuple(sorted(labels.items())): 1} if labels else None


def _trackers(rank: Rank) -> Values:
    ids = rank.snapshot.info.get("tracker_ids", {})
    urls = rank.snapshot.info.get("tracker_urls", {})
    return {(tracker, ids[tracker], urls.get(tracker, "")): 1 for tracker in ids} or None


def _has_ended(rank: Rank) -> bool:
    return bool(rank.snapshot.exit_reason and rank.exit_unix)


def _layout(rank: Rank) -> Values:
    found = coordinates(rank.snapshot)
    return {tuple(str(found.get(kind, "")) for kind in KINDS): 1} if found else None


METRICS = (
    RANK.gauge(
        "info",
        "The rank's identity and place. `uuid` is its GPU's (empty while the node has no such GPU or only other users' "
        "processes use it), `user` is its owner's name if this machine has one.",
        _info,
        *LABELS[2:],
        "user",
    ),
    RANK.naming(
        "labels_info",
        "The user's labels of the rank (`RANKSCOPE_LABELS=team=nlp,project=llama`), at most 10; absent without labels. "
        "Join them to other series: `* on (run, rank, owner) group_left (team) rankscope_rank_labels_info`.",
        _labels,
    ),
    RANK.gauge("up", "1 while the rank's process is alive.", lambda rank: float(rank.snapshot.alive)),
    RANK.gauge(
        "start_timestamp_seconds",
        "Start of the rank's record, in unix time.",
        lambda rank: rank.snapshot.unix_field("started_unix"),
    ),
    RANK.gauge(
        "exit_info",
        "How the rank ended: `finished` (normal exit of Python), `exception` (also `sys.exit` and `os._exit` with a "
        "status other than 0), `interrupted` (Ctrl-C), `sigterm` or `killed` (no recorded exit). Only after the end.",
        lambda rank: {rank.snapshot.exit_reason or "": 1} if _has_ended(rank) else None,
        "reason",
    ),
    RANK.gauge(
        "exit_timestamp_seconds",
        "End of the rank, in unix time: by its own clock, or for a killed rank when the exporter noticed it.",
        lambda rank: rank.exit_unix if _has_ended(rank) else None,
    ),
    RANK.gauge(
        "settings_info",
        "Settings of the run that may explain its speed; empty if unknown. `step_marker` is the event that marks a "
        f"step: {MARKERS} (`rankscope.step()`).",
        _settings,
        *layout.SETTINGS,
    ),
    RANK.gauge(
        "tracker_info",
        "The experiment tracker's run that the rank's process logs to: `tracker` is `wandb`, `mlflow` or `tensorboard` "
        "(whose `id` is the log directory). `url` is empty without a page, and has no user, password or query.",
        _trackers,
        "tracker",
        "id",
        "url",
    ),
    RANK.gauge(
        "layout_info",
        "The rank's place in each kind of parallelism: pipeline (stage), tensor, data, context, expert. Empty if "
        "unknown; absent if all are unknown.",
        _layout,
        *KINDS,
    ),
    RANK.gauge(
        "probes_disabled",
        "Probes of the rank that were switched off after an internal error.",
        lambda rank: len(rank.snapshot.info.get("probes_disabled", ())),
    ),
)
