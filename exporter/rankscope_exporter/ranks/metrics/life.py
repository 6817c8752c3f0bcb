"""Who a rank is, whether it lives and how it ended."""

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
        "What the rank is and where it runs; `uuid` is that of its GPU (empty while the node has no such GPU or only "
        "other users' processes are on it), `user` its owner's name where this machine knows one.",
        _info,
        *LABELS[2:],
        "user",
    ),
    RANK.naming(
        "labels_info",
        "The labels that the user has given the rank (`RANKSCOPE_LABELS=team=nlp,project=llama`), at most 10; absent "
        "without one. Other series get them by a join: `* on (run, rank, owner) group_left (team) "
        "rankscope_rank_labels_info`.",
        _labels,
    ),
    RANK.gauge("up", "1 while the rank's process lives.", lambda rank: float(rank.snapshot.alive)),
    RANK.gauge(
        "start_timestamp_seconds",
        "When the rank's record began, in unix time.",
        lambda rank: rank.snapshot.unix_field("started_unix"),
    ),
    RANK.gauge(
        "exit_info",
        "Only after the end: how the rank ended: `finished` (left Python in order), `exception` (also `sys.exit` "
        "and `os._exit` with another status than 0), `interrupted` (Ctrl-C), `sigterm` or `killed` (without a word).",
        lambda rank: {rank.snapshot.exit_reason or "": 1} if _has_ended(rank) else None,
        "reason",
    ),
    RANK.gauge(
        "exit_timestamp_seconds",
        "When the rank ended, in unix time: by its own clock, and for a killed one when the exporter noticed.",
        lambda rank: rank.exit_unix if _has_ended(rank) else None,
    ),
    RANK.gauge(
        "settings_info",
        "What was chosen for the run and may explain its speed; empty where it is not known. `step_marker` is what "
        f"marks the steps: {MARKERS} (`rankscope.step()`).",
        _settings,
        *layout.SETTINGS,
    ),
    RANK.gauge(
        "tracker_info",
        "The run of an experiment tracker that the rank's process logs to: `tracker` is `wandb`, `mlflow` or "
        "`tensorboard` (whose `id` is the log directory). `url` is empty where there is no page; it has no user, "
        "password or query.",
        _trackers,
        "tracker",
        "id",
        "url",
    ),
    RANK.gauge(
        "layout_info",
        "Its place in each kind of parallelism: pipeline (its stage), tensor, data, context, expert. Empty where "
        "that is not known; absent where none is.",
        _layout,
        *KINDS,
    ),
    RANK.gauge(
        "probes_disabled",
        "Probes switched off in the rank after an error of their own.",
        lambda rank: len(rank.snapshot.info.get("probes_disabled", ())),
    ),
)
