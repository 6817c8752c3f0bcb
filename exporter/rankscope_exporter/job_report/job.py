"""A job as its report shows it, wherever that is known from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

NO_RANK = "no_rank"
"""GPU time that Slurm has given to the job and in which no rank trained: its launch, its end, GPUs without a rank."""


class NoJobError(Exception):
    """Why there is nothing to report."""


@dataclass(frozen=True)
class Gpu:
    """One GPU while it was the job's. None is not known."""

    node: str
    index: str
    busy_ratio: float | None = None
    memory: float | None = None
    """Bytes that were in use at most."""
    memory_total: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Found:
    """A finding of the job. `end` is None while it holds."""

    begin: float
    end: float | None
    kind: str
    severity: str
    ratio: float
    sentence: str
    advice: str = ""


@dataclass(frozen=True)
class Allocation:
    """What Slurm says of a job."""

    state: str
    seconds: float
    """That it has run."""
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Job:
    """A run, or all runs of one Slurm job. Times are unix seconds; what is not known is None or empty."""

    runs: Sequence[str]
    owner: str
    user: str = ""
    slurm: Mapping[str, str] = field(default_factory=dict)
    """`job_id`, `job_name`, `account`, `partition`."""
    nodes: Sequence[str] = ()
    ranks: int = 0
    """That are known of."""
    world_size: int = 0
    steps: float = 0.0
    began: float = 0.0
    ended: float | None = None
    at: float = 0.0
    """Until when it is known."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds; `none` is useful compute."""
    gpus: Sequence[Gpu] = ()
    cpu_seconds: float | None = None
    cpus: int | None = None
    memory: float | None = None
    """Bytes that the ranks' own processes had resident at most."""
    findings: Sequence[Found] = ()
    allocation: Allocation | None = None

    @property
    def seconds(self) -> float:
        """Return how long it ran: by Slurm, else from its first rank's begin to its last one's end."""
        return self.allocation.seconds if self.allocation else max((self.ended or self.at) - self.began, 0.0)

    @property
    def gpu_seconds(self) -> float:
        """Return the whole that the causes are parts of."""
        return sum(self.causes.values())

    @property
    def ratios(self) -> Mapping[str, float]:
        """Return the parts of its GPU time, useful compute first and then the largest; they sum to 1."""
        whole = self.gpu_seconds
        parts = sorted(self.causes.items(), key=lambda item: (item[0] != "none", -item[1]))
        return {cause: seconds / whole for cause, seconds in parts if seconds > 0.0} if whole else {}

    @property
    def kwh(self) -> float | None:
        """Return the energy of its GPUs."""
        joules = [gpu.joules for gpu in self.gpus if gpu.joules is not None]
        return sum(joules) / 3.6e6 if joules else None

    @property
    def is_partial(self) -> bool:
        """Return whether it has ranks that are not known here: those of other nodes."""
        return self.ranks < self.world_size

    def allocated(self, allocation: Allocation, now: float) -> Job:
        """Return it with the GPU time that Slurm has given it: what no rank trained in is NO_RANK.

        Of a job that runs, nothing is known yet of the time since it was saved.
        """
        unknown = max(now - self.at, 0.0) if self.ended is None else 0.0
        allocation = replace(allocation, seconds=max(allocation.seconds - unknown, 0.0))
        rest = allocation.seconds * allocation.gpus - self.gpu_seconds
        causes = {**self.causes, NO_RANK: rest} if rest > 0.0 else self.causes
        return replace(self, allocation=allocation, causes=causes, cpus=allocation.cpus or self.cpus)


def together(jobs: Sequence[Job]) -> Job:
    """Return the runs of one job as one."""
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
    )


def _same_gpus(gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return each GPU once: its energy in all runs, its memory at most, how busy it was in the last one."""
    found: dict[tuple[str, str], Gpu] = {}
    for gpu in gpus:
        before = found.get((gpu.node, gpu.index))
        if before:
            joules = [one.joules for one in (before, gpu) if one.joules is not None]
            memory = [one.memory for one in (before, gpu) if one.memory is not None]
            gpu = replace(gpu, joules=sum(joules) if joules else None, memory=max(memory, default=None))
        found[gpu.node, gpu.index] = gpu
    return list(found.values())


def chosen(jobs: Sequence[Job], run: str | None, job_id: str | None, owner: str | None) -> Job:
    """Return the job that is meant. Raises NoJobError if there is none, or one of several owners."""
    meant = [job for job in jobs if run in (None, *job.runs) and job_id in (None, job.slurm.get("job_id"))]
    meant = [job for job in meant if owner in (None, job.owner) or not job.owner]
    asked = "".join(
        f"{word}{value}"
        for word, value in ((" of run ", run), (" of Slurm job ", job_id), (" of owner ", owner))
        if value is not None
    )
    if not meant:
        raise NoJobError(f"nothing is known{asked}; known are: {_listed(jobs)}")
    if len({job.owner for job in meant}) > 1:  # whoever names his run alike must not be taken for its owner
        raise NoJobError(f"several users have runs{asked}, choose with --owner: {_listed(meant)}")
    if job_id is not None:
        return together(meant)
    if run is None and len({name for job in meant for name in job.runs}) > 1:
        raise NoJobError(f"several runs, choose with --run or --slurm-job: {_listed(meant)}")
    return max(meant, key=lambda job: job.began)


SHOWN = 10


def _listed(jobs: Sequence[Job]) -> str:
    newest = sorted(jobs, key=lambda job: -job.began)
    names = list(dict.fromkeys(f"{job.runs[0]} (owner {job.owner})" for job in newest))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or "none"
