"""Who holds a GPU: what one source says of it, and the one set of labels that all of them make together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from rankscope.record.text import is_label

# Who knows best comes first. Schedulers hand GPUs out; a process or a rank only shows that it uses one.
SOURCES = ("slurm", "kubernetes", "container", "user", "process", "rank")
MOST_VALUES = 16  # of one label; more shares than that of one GPU are named by "…"


@dataclass(frozen=True)
class Holder:
    """What one source says; empty is what it does not know."""

    source: str
    """One of SOURCES."""
    slurm_job_id: str = ""
    """Its number; the SLUID where only that is known."""
    slurm_job_name: str = ""
    """What a rank says of its own job; the prolog does not get it."""
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
    """Of the run: the label of the rank's series."""
    uid: str = ""
    """Of the job, the process or the rank's record."""
    sluid: str = ""
    """Slurm's other name of the job."""


NO_LABELS = ("uid", "sluid")
"""What serves to find out which holders are one."""
LABELS = tuple(field.name for field in fields(Holder) if field.name not in NO_LABELS)


def labels(holders: Collection[Holder]) -> dict[str, str]:
    """The labels of LABELS for a GPU with these holders, of whom there is at least one.

    One set a GPU, so that joining it to another series never multiplies that: where several share the GPU, a label
    has each of their values once, in order, with commas. `source` is the best of the sources. The user is the one that
    a scheduler names, if any does: in a container everybody is root.
    """
    found = {name: _joined(getattr(holder, name) for holder in holders) for name in LABELS}
    found["slurm_job_id"] = _joined(_job_ids(holders))
    found["slurm_job_name"] = _joined(_job_names(holders))
    found["source"] = min((holder.source for holder in holders), key=SOURCES.index)
    scheduled = _joined(holder.user for holder in holders if holder.source in ("slurm", "kubernetes"))
    return found | ({"user": scheduled} if scheduled else {})


def _job_ids(holders: Collection[Holder]) -> Collection[str]:
    """The jobs' numbers, and the SLUIDs of those whose number is not known.

    A number whose SLUID no prolog names may be that of any SLUID here.
    """
    jobs = [holder for holder in holders if holder.source != "rank"]
    numbers = {holder.sluid: holder.slurm_job_id for holder in jobs if holder.sluid}
    found = {numbers.get(holder.slurm_job_id, holder.slurm_job_id) for holder in jobs}
    lone = {job for job in found.difference(numbers.values()) if job[:1].isdecimal()}
    return {job for job in found if job[:1].isdecimal()} if lone else found


def _job_names(holders: Collection[Holder]) -> Iterable[str]:
    """The jobs' names. A rank names a job only if that is its owner's: Slurm or the kernel says whose it is."""
    jobs = {named for one in holders if one.source != "rank" for named in _named(one)}
    return (one.slurm_job_name for one in holders if one.source != "rank" or not jobs.isdisjoint(_named(one)))


def _named(holder: Holder) -> Collection[tuple[str, str]]:
    """The job, by its number and its SLUID, with its user."""
    return [(job, holder.uid) for job in (holder.slurm_job_id, holder.sluid) if job and holder.uid]


def _joined(values: Iterable[str]) -> str:
    """In order: numbers by their size, so that ranks read 2,10. What is too long or not printable is left out."""
    distinct = {value for value in values if value and is_label(value)}
    ordered = sorted(distinct, key=lambda value: (int(value) if value.isdecimal() else 0, value))
    return ",".join([*ordered[:MOST_VALUES], *(["…"] if len(ordered) > MOST_VALUES else [])])
