"""The data of a job's report, independent of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISDIR

NO_RANK = "no_rank"
"""GPU time that Slurm has allocated to the job while no rank trained: its launch, its end, GPUs without a rank."""


class NoJobError(Exception):
    """There is nothing to report. The message names the reason."""


def check_directory(directory: Path, otherwise: str = "") -> None:
    """Raise NoJobError if it is not a directory that this user can look up; `otherwise` says what to give instead."""
    try:
        is_directory = S_ISDIR(directory.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_directory = False
    except OSError as error:
        raise NoJobError(f"{directory}: {error.strerror}{otherwise}") from error
    if not is_directory:
        raise NoJobError(f"{directory} is not a directory{otherwise}")


@dataclass(frozen=True)
class Gpu:
    """One GPU while the job used it. None is unknown."""

    node: str
    index: str
    busy_ratio: float | None = None
    memory: float | None = None
    """The peak of used memory, in bytes."""
    memory_total: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class JobFinding:
    """A finding of the job. `end` is None while it is open."""

    begin: float
    end: float | None
    kind: str
    severity: str
    ratio: float
    sentence: str
    advice: str = ""
    mean: float | None = None
    """The mean ratio while it was open; `ratio` is the largest. None is unknown."""


@dataclass(frozen=True)
class Allocation:
    """A job's allocation, from Slurm."""

    state: str
    seconds: float
    """The job's run time."""
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Job:
    """A run, or all runs of one Slurm job. Times are unix seconds; unknown values are None or empty."""

    runs: Sequence[str]
    owner: str
    user: str = ""
    slurm: Mapping[str, str] = field(default_factory=dict)
    """`job_id`, `job_name`, `account`, `partition`."""
    nodes: Sequence[str] = ()
    ranks: int = 0
    """The number of known ranks."""
    world_size: int = 0
    steps: float = 0.0
    began: float = 0.0
    ended: float | None = None
    at: float = 0.0
    """The time of the last data."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds by cause; `none` is useful compute."""
    gpus: Sequence[Gpu] = ()
    cpu_seconds: float | None = None
    cpus: int | None = None
    memory: float | None = None
    """The peak resident memory of the ranks' own processes, in bytes."""
    findings: Sequence[JobFinding] = ()
    captures: Sequence[str] = ()
    """The folders of its captures, the oldest first; from a Prometheus with their nodes: `node-a:/PATH`."""
    allocation: Allocation | None = None

    @property
    def end(self) -> float:
        """Return the time of its end, or of the last data."""
        return self.ended or self.at

    @property
    def seconds(self) -> float:
        """Return the run time: from Slurm, or else from the start of the first rank to the end of the last one."""
        return self.allocation.seconds if self.allocation else max(self.end - self.began, 0.0)

    @property
    def gpu_seconds(self) -> float:
        """Return the total GPU time of all causes."""
        return sum(self.causes.values())

    @property
    def ratios(self) -> Mapping[str, float]:
        """Return the ratios of its GPU time by cause, useful compute first, then the largest; they sum to 1."""
        whole = self.gpu_seconds
        parts = sorted(self.causes.items(), key=lambda item: (item[0] != "none", -item[1]))
        return {cause: seconds / whole for cause, seconds in parts if seconds > 0.0} if whole else {}

    @property
    def busy_ratios(self) -> Sequence[float]:
        """Return the busy ratios of its GPUs, as far as they are known."""
        return [gpu.busy_ratio for gpu in self.gpus if gpu.busy_ratio is not None]

    @property
    def memory_ratios(self) -> Sequence[float]:
        """Return the peaks of its GPUs' memory as ratios, as far as they are known."""
        return [gpu.memory / gpu.memory_total for gpu in self.gpus if gpu.memory is not None and gpu.memory_total]

    @property
    def cores(self) -> float | None:
        """Return the mean number of CPU cores in use."""
        return None if self.cpu_seconds is None or not self.seconds else self.cpu_seconds / self.seconds

    @property
    def kwh(self) -> float | None:
        """Return the energy of its GPUs, in kWh."""
        joules = [gpu.joules for gpu in self.gpus if gpu.joules is not None]
        return sum(joules) / 3.6e6 if joules else None

    @property
    def is_partial(self) -> bool:
        """Return whether it has ranks on other nodes, which are unknown here."""
        return self.ranks < self.world_size

    def with_allocation(self, allocation: Allocation, now: float) -> Job:
        """Return the job with its allocation. Allocated time without a rank is NO_RANK.

        If the job is running, the time since its state was saved is left out. If ranks share GPUs, their time is scaled
        to that of the GPUs.
        """
        unknown = max(now - self.at, 0.0) if self.ended is None else 0.0
        allocation = replace(allocation, seconds=max(allocation.seconds - unknown, 0.0))
        most = allocation.gpus * (self.end - self.began)
        part = min(most / self.gpu_seconds, 1.0) if most and self.gpu_seconds else 1.0
        causes = {cause: seconds * part for cause, seconds in self.causes.items()}
        rest = allocation.seconds * allocation.gpus - sum(causes.values())
        causes |= {NO_RANK: rest} if rest > 0.0 else {}
        return replace(self, allocation=allocation, causes=causes, cpus=allocation.cpus or self.cpus)


def merge_jobs(jobs: Sequence[Job]) -> Job:
    """Return the runs of one job, merged into one."""
    first, *others = sorted(jobs, key=lambda job: job.began)
    if not others:
        return first
    causes: dict[str, float] = {}
    for job in jobs:
        for cause, seconds in job.causes.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
    ends, cpu = [job.ended for job in jobs], [job.cpu_seconds for job in jobs if job.cpu_seconds is not None]
    return replace(
        first,
        runs=list(dict.fromkeys(run for job in (first, *others) for run in job.runs)),
        nodes=sorted({node for job in jobs for node in job.nodes}),
        ranks=max(job.ranks for job in jobs),
        world_size=max(job.world_size for job in jobs),
        steps=sum(job.steps for job in jobs),
        ended=None if None in ends else max(end for end in ends if end is not None),
        at=max(job.at for job in jobs),
        causes=causes,
        gpus=_same_gpus([gpu for job in jobs for gpu in job.gpus]),
        cpu_seconds=sum(cpu) if cpu else None,
        memory=max((job.memory for job in jobs if job.memory is not None), default=None),
        findings=sorted((one for job in jobs for one in job.findings), key=lambda one: one.begin),
        captures=[one for job in (first, *others) for one in job.captures],
    )


def merge_trainings(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs; runs of one rank with one name and owner that were running at the same time are one job."""
    found: dict[tuple[str, str], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.began):
        same = found.setdefault((job.runs[0], job.owner), [])
        if same and job.began < same[-1].end and same[-1].world_size == job.world_size == 1:
            same[-1] = replace(merge_jobs([same[-1], job]), ranks=same[-1].ranks + job.ranks)
        else:
            same.append(job)
    return [job for of_name in found.values() for job in of_name]


def _same_gpus(gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return each GPU once: its energy in all runs, its peak memory, and its busy ratio in the last run."""
    found: dict[tuple[str, str], Gpu] = {}
    for gpu in gpus:
        before = found.get((gpu.node, gpu.index))
        if before:
            joules = [one.joules for one in (before, gpu) if one.joules is not None]
            memory = [one.memory for one in (before, gpu) if one.memory is not None]
            gpu = replace(gpu, joules=sum(joules) if joules else None, memory=max(memory, default=None))
        found[gpu.node, gpu.index] = gpu
    return list(found.values())


def select_job(jobs: Sequence[Job], run: str | None, job_id: str | None, owner: str | None) -> Job:
    """Return the job that matches. Raise NoJobError if there is none, or if several owners have one."""
    matching = [job for job in jobs if run in (None, *job.runs) and job_id in (None, job.slurm.get("job_id"))]
    matching = [job for job in matching if owner in (None, job.owner) or not job.owner]
    asked = "".join(
        f"{word}{value}"
        for word, value in ((" of run ", run), (" of Slurm job ", job_id), (" of owner ", owner))
        if value is not None
    )
    if not matching:
        raise NoJobError(f"no data{asked}; known runs: {_list(jobs)}")
    if len({job.owner for job in matching}) > 1:  # another user's run with the same name must not be mixed in
        raise NoJobError(f"several users have runs{asked}; choose one with --owner: {_list(matching)}")
    if job_id is not None:
        return merge_jobs(matching)
    if run is None and len({name for job in matching for name in job.runs}) > 1:
        raise NoJobError(f"several runs found; choose one with --run or --slurm-job: {_list(matching)}")
    return max(matching, key=lambda job: job.began)


LISTED = 10


def _list(jobs: Sequence[Job]) -> str:
    newest = sorted(jobs, key=lambda job: -job.began)
    names = list(dict.fromkeys(f"{job.runs[0]} (owner {job.owner})" for job in newest))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) + more) or "none"
