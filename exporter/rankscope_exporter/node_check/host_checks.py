"""The checks of the node itself: shared memory, limits, clock, disk and ports."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rankscope.record.quantities import count, size
from rankscope_exporter.diagnosis.ports import PortReading, Ports
from rankscope_exporter.node_check.result import Outcome, Result
from rankscope_exporter.node_check.selection import is_slurm_prolog
from rankscope_exporter.ranks.network_ports import SYSFS, read_adapters, read_hardware_interfaces

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - read only
SEGMENT = 9_637_888
"""Bytes of one of NCCL's shared segments, as its error names it. A batch of a loader worker is rarely smaller."""
NCCL_RECOMMENDS = 2**30
"""Bytes: `--shm-size=1g` in NCCL's documentation for containers."""
WORKERS = 4
"""Loader workers of a rank, if --workers is not given."""
DESCRIPTORS = 1024  # Linux's default: whoever set less did not think of training
LOCKED = 64 * 2**20  # bytes: Linux's default is 8 MiB; NCCL registers more with an adapter
DISK_FAILS, DISK_WARNS = 100 * 2**20, 2**30  # bytes
ENOUGH_UP = 3
"""Ports of a kind, and most of them, that must be up before one that is down counts: many ports have no cable."""
CAP_IPC_LOCK = 14
STA_UNSYNC = 0x40


@dataclass(frozen=True)
class Host:
    """The node's readings; None if unknown."""

    shared_memory: int | None = None
    """Free bytes in /dev/shm."""
    descriptors: int | None = None
    locked: int | None = None
    """Bytes that a process may lock; -1 is unlimited."""
    is_synchronized: bool | None = None
    disk: tuple[str, int, int] | None = None
    """A directory for temporary files, its free bytes and its free inodes."""
    adapters: Ports = field(default_factory=dict)
    """InfiniBand and RoCE ports."""
    interfaces: Ports = field(default_factory=dict)
    """Ethernet interfaces."""
    is_prolog: bool = False
    """True in Slurm's prolog, whose limits are slurmd's and not the job's."""


def read_host(environ: Mapping[str, str] = os.environ, sysfs: Path = SYSFS, shm: Path = SHARED_MEMORY) -> Host:
    """Read the node."""
    directory = environ.get("TMPDIR") or tempfile.gettempdir()
    disk, memory = _free(Path(directory)), _free(shm)
    return Host(
        shared_memory=memory[0] if memory else None,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=-1 if _may_lock() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        is_synchronized=_is_synchronized(),
        disk=(directory, *disk) if disk else None,
        adapters=read_adapters(sysfs),
        interfaces=read_hardware_interfaces(sysfs),
        is_prolog=is_slurm_prolog(environ),
    )


def check_host(host: Host, ranks: int, workers: int | None) -> Iterator[Result]:
    """Yield the results for a job with this many ranks on this node."""
    yield _shared_memory(host, ranks, WORKERS if workers is None else workers)
    yield _descriptors(host)
    yield _locked_memory(host)
    yield _clock(host)
    yield _disk(host)
    yield from _ports(host.adapters, host.interfaces)


def _shared_memory(host: Host, ranks: int, workers: int) -> Result:
    free = host.shared_memory
    if free is None:
        return Result("shared_memory", "not_run", f"{SHARED_MEMORY} cannot be read")
    # A ring of NCCL has two channels to each neighbor; each worker passes at least one batch at a time.
    needed = SEGMENT * ranks * ((4 if ranks > 1 else 0) + workers)
    outcome: Outcome = "failed" if free < needed else "warning" if free < NCCL_RECOMMENDS and ranks > 1 else "ok"
    least = needed if outcome == "failed" else NCCL_RECOMMENDS
    expected = f"at least {size(least)} for {count(ranks, 'rank')} with {count(workers, 'loader worker')} each"
    advice = "Remove files of ended jobs from /dev/shm, or give the container more: --shm-size=16g, a memory volume"
    return Result("shared_memory", outcome, f"{size(free)} free in /dev/shm", expected, advice)


def _descriptors(host: Host) -> Result:
    limit = host.descriptors
    if limit is None or host.is_prolog:
        return Result("file_descriptors", "not_run", "the job has limits of its own" if host.is_prolog else "unknown")
    is_enough = limit < 0 or limit >= DESCRIPTORS
    advice = f"Raise the limit: ulimit -n {DESCRIPTORS}"
    measured, expected = "unlimited" if limit < 0 else f"limit of {limit}", f"at least {DESCRIPTORS}"
    return Result("file_descriptors", "ok" if is_enough else "failed", measured, expected, advice)


def _locked_memory(host: Host) -> Result:
    has_adapter = any(port.is_up for port in host.adapters.values())
    if not has_adapter:
        return Result("locked_memory", "ok", "not needed: no InfiniBand or RoCE port is up")
    if host.locked is None or host.is_prolog:
        return Result("locked_memory", "not_run", "the job has limits of its own" if host.is_prolog else "unknown")
    is_enough = host.locked < 0 or host.locked >= LOCKED
    measured = "unlimited" if host.locked < 0 else f"limit of {size(host.locked)}"
    advice = "Raise the limit: ulimit -l unlimited, or --ulimit memlock=-1 for a container"
    return Result("locked_memory", "ok" if is_enough else "warning", measured, "unlimited, for RDMA", advice)


def _clock(host: Host) -> Result:
    if host.is_synchronized is None:
        return Result("clock_synchronization", "not_run", "the kernel does not report it")
    # Virtual machines may get their time from the host, which the kernel does not know.
    outcome: Outcome = "ok" if host.is_synchronized else "warning"
    measured = "synchronized" if host.is_synchronized else "the kernel's clock is not synchronized"
    advice = "Start chronyd, ntpd or systemd-timesyncd"
    return Result("clock_synchronization", outcome, measured, "synchronized", advice)


def _disk(host: Host) -> Result:
    if host.disk is None:
        return Result("temporary_files", "not_run", "the directory for temporary files cannot be read")
    directory, free, inodes = host.disk
    outcome: Outcome = "failed" if free < DISK_FAILS or not inodes else "warning" if free < DISK_WARNS else "ok"
    measured = f"{size(free)}{'' if inodes else ' and no inodes'} free in {directory}"
    return Result("temporary_files", outcome, measured, f"at least {size(DISK_WARNS)}", "Remove files there")


def _ports(adapters: Ports, interfaces: Ports) -> Iterator[Result]:
    """Compare each port with those of the same kind."""
    kinds: dict[str, dict[str, PortReading]] = defaultdict(dict)
    for name, port in {**interfaces, **adapters}.items():
        if port.is_up is not None:
            kinds[port.kind][name] = port
    if not kinds:
        yield Result("ports", "not_run", "no network port is visible")
    for kind in kinds.values():
        for name in kind:
            yield _port(name, kind, is_adapter=name in adapters)


def _port(name: str, kind: Mapping[str, PortReading], *, is_adapter: bool) -> Result:
    """Compare a port with the others. One that had a link, or an adapter that alone has none, is broken.

    Others may have no cable, and a slower one may be for storage.
    """
    port, up = kind[name], [other for other in kind.values() if other.is_up]
    advice = "Check cable, transceiver and switch port"
    if len(up) < ENOUGH_UP or len(up) * 2 <= len(kind):
        return Result("ports", "ok" if port.is_up else "not_run", f"{name} is {'up' if port.is_up else 'down'}")
    if not port.is_up:
        is_alone = is_adapter and len(up) == len(kind) - 1
        outcome: Outcome = "failed" if port.link_downs or is_alone else "warning" if is_adapter else "not_run"
        return Result("ports", outcome, f"{name} is down", f"up, as {len(up)} of {len(kind)} ports of its kind", advice)
    usual = median(other.rate for other in up if other.rate is not None) if port.rate is not None else None
    if usual is not None and port.rate is not None and port.rate < usual:
        expected = f"{_rate(usual)}, as most ports of its kind"
        return Result("ports", "warning", f"{name} runs at {_rate(port.rate)}", expected, advice)
    return Result("ports", "ok", f"{name} is up")


def _rate(bytes_per_second: float) -> str:
    return f"{8 * bytes_per_second / 1e9:g} Gb/s"


def _free(directory: Path) -> tuple[int, int] | None:
    """Return free bytes and inodes for an ordinary user; a file system that counts no inodes has some."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize, status.f_favail or int(status.f_files == 0)


def _may_lock() -> bool:
    """Return whether this process may lock any memory: the limit does not count with CAP_IPC_LOCK."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1 for line in lines if line.startswith("CapEff:"))


class _Timex(ctypes.Structure):
    """The begin of struct timex in the kernel's include/uapi/linux/timex.h, with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def _is_synchronized() -> bool | None:
    """Return the kernel's answer to adjtimex, which changes nothing without modes; None if it is not allowed."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not timex.status & STA_UNSYNC
