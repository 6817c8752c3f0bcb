"""Holders of a GPU: one source's answer, and the labels that combine all sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from rankscope.record.text import is_label

# Best source first. Schedulers allocate GPUs; a process or a rank only shows that it uses one.
SOURCES = ("slurm", "kubernetes", "container", "user", "process", "rank")
MAX_VALUES = 16  # per label; "…" stands for the values beyond that


@dataclass(frozen=True)
class Holder:
    """One source's information about a holder; unknown fields are empty."""

    source: str
    """One of SOURCES."""
    slurm_job_id: str = ""
    """The job's number; its SLUID if only that is known."""
    slurm_job_name: str = ""
    """Reported by ranks of the job; a prolog does not get it."""
    slurm_account: str = ""
    slurm_partition: str = ""
    k8s_namespace: str = ""
    k8s_pod: str = ""
    k8s_container: str = ""
    container_id: str = ""
    user: str = ""
    run: str = ""
    rank: str = ""
    owner: str = ""
    """Owner of the run: the label of the rank's series."""
    uid: str = ""
    """User id of the job, the process or the rank's record."""
    sluid: str = ""
    """Slurm's second identifier of the job."""


KEY_FIELDS = ("uid", "sluid")
"""Fields that only match holders of the same job and are not exported."""
LABELS = tuple(field.name for field in fields(Holder) if field.name not in KEY_FIELDS)


def labels(holders: Collection[Holder]) -> dict[str, str]:
    """Return the labels of LABELS for a GPU with these holders, of which there must be at least one.

    There is one label set per GPU, so joining it to another series never multiplies that series. If several holders
    share the GPU, a label has each of their values once, sorted and separated by commas. `source` is the best source.
    `user` is the scheduler's user if it names one: in a container every user may be root.
    """
    found = {name: _joined(getattr(holder, name) for holder in holders) for name in LABELS}
    found["slurm_job_id"] = _joined(_job_ids(holders))
    found["slurm_job_name"] = _joined(_job_names(holders))
    found["source"] = min((holder.source for holder in holders), key=SOURCES.index)
    scheduled = _joined(holder.user for holder in holders if holder.source in ("slurm", "kubernetes"))
    return found | ({"user": scheduled} if scheduled else {})


def _job_ids(holders: Collection[Holder]) -> Collection[str]:
    """Return the jobs' numbers, and the SLUIDs of jobs whose number is unknown.

    A number without a SLUID from a prolog may belong to any of the SLUIDs, which are then omitted.
    """
    jobs = [holder for holder in holders if holder.source != "rank"]
    numbers = {holder.sluid: holder.slurm_job_id for holder in jobs if holder.sluid}
    found = {numbers.get(holder.slurm_job_id, holder.slurm_job_id) for holder in jobs}
    lone = {job for job in found.difference(numbers.values()) if job[:1].isdecimal()}
    return {job for job in found if job[:1].isdecimal()} if lone else found


def _job_names(holders: Collection[Holder]) -> Iterable[str]:
    """Return the jobs' names. Use a rank's job name only if Slurm or the kernel confirms the job's owner."""
    jobs = {key for one in holders if one.source != "rank" for key in _job_keys(one)}
    return (one.slurm_job_name for one in holders if one.source != "rank" or not jobs.isdisjoint(_job_keys(one)))


def _job_keys(holder: Holder) -> Collection[tuple[str, str]]:
    """Return pairs of the job's number or SLUID and its user id."""
    return [(job, holder.uid) for job in (holder.slurm_job_id, holder.sluid) if job and holder.uid]


def _joined(values: Iterable[str]) -> str:
    """Join sorted values, numbers by value (2,10). Omits values that are too long or not printable."""
    distinct = {value for value in values if value and is_label(value)}
    ordered = sorted(distinct, key=lambda value: (int(value) if value.isdecimal() else 0, value))
    return ",".join([*ordered[:MAX_VALUES], *(["…"] if len(ordered) > MAX_VALUES else [])])
