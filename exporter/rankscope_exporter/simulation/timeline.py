"""The timeline of one GPU in a scenario: its state at any time, and cumulative computing and waiting time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SimulatedProcess:
    """A process on a GPU, with its memory in bytes."""

    pid: int
    memory: int = 0
    contexts: tuple[str, ...] = ("compute",)


@dataclass(frozen=True)
class State:
    """State from one time of the timeline to the next."""

    busy: float = 0.0
    """Share of time computing: the GPU is utilized and draws power."""
    waiting: float = 0.0
    """Share of time in a collective's kernel: the GPU is utilized, but draws little power."""
    memory_used: int | None = None
    """Bytes; None for the sum of the processes."""
    ranks_busy: float = 1.0
    """Share of the ranks' computing and waiting in which a kernel runs: below 1 if the host is too slow."""
    ranks_memory: float = 0.6
    """Share of the memory that all ranks hold together; 0 removes their processes from the GPU."""
    temperature: float | None = None
    """Degrees Celsius; None for a value that follows the load."""
    throttle: tuple[str, ...] = ()
    speed: float = 1.0
    """Ratio of the model's SM clock at which it computes, without a reason that the driver reports."""
    pcie_generation: int | None = None
    """Generation of the PCIe link under load; None for the model's."""
    pcie_width: int | None = None
    """Lanes of the PCIe link; None for the model's."""
    persistence: bool = True
    processes: tuple[SimulatedProcess, ...] = ()
    ecc: Mapping[str, int] = field(default_factory=dict)
    """Memory errors by kind and location, such as uncorrected_dram."""
    fields: Mapping[int, int] = field(default_factory=dict)
    """Values of nvmlDeviceGetFieldValues by field, instead of the simulated ones."""
    nvlinks_down: int = 0
    lost: bool = False
    fails: Mapping[str, int] = field(default_factory=dict)
    """NVML's return code by symbol."""
    blocks: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a call blocks, by symbol."""


@dataclass(frozen=True)
class Seconds:
    """Utilized time since the scenario started, by use."""

    computing: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.computing + other.computing, self.waiting + other.waiting)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.computing - other.computing, self.waiting - other.waiting)

    @property
    def utilized(self) -> float:
        """Sum of computing and waiting time: NVML sees a running kernel in both."""
        return self.computing + self.waiting


class Timeline:
    """States by start time (seconds, ascending, first at 0), and XID errors by time."""

    def __init__(self, states: Sequence[tuple[float, State]], xids: Sequence[tuple[float, int]] = ()) -> None:
        # Each point has the time spent before it. The whole tuple is replaced, so readers need no lock.
        self._points: tuple[tuple[float, State, Seconds], ...] = ()
        self.xids: tuple[tuple[float, int], ...] = ()
        for at, state in states:
            self._append(at, state)
        self.xids = tuple(xids)

    @property
    def states(self) -> tuple[tuple[float, State], ...]:
        """All states with their start times."""
        return tuple((at, state) for at, state, _ in self._points)

    def change(self, at: float, state: State, xid: int | None = None) -> None:
        """Set the state from `at` on, and drop all later states and XIDs."""
        self._points = self._points[: self._index(at) + 1]
        self._append(at, state)
        self.xids = tuple(planned for planned in self.xids if planned[0] <= at)
        if xid is not None:
            self.xids = (*self.xids, (at, xid))

    def state(self, t: float) -> State:
        """Return the state at `t`."""
        return self._points[self._index(t)][1]

    def ranks_busy(self, t: float) -> float:
        """Return the share of the ranks' time in which a kernel runs at `t`."""
        return self.state(t).ranks_busy

    def seconds(self, t: float) -> Seconds:
        """Return the utilized time from 0 to `t`."""
        at, state, until = self._points[self._index(t)]
        return until + _spent(state, max(0.0, t - at))

    def seconds_while(self, t: float, condition: Callable[[State], bool]) -> float:
        """Return the seconds from 0 to `t` in which the condition was true."""
        points = self._points
        ends = [*(at for at, _, _ in points[1:]), float("inf")]
        spans = zip(points, ends, strict=True)
        return sum(max(0.0, min(end, t) - start) for (start, state, _), end in spans if condition(state))

    def _append(self, at: float, state: State) -> None:
        self._points = (*self._points, (at, state, self.seconds(at) if self._points else Seconds()))

    def _index(self, t: float) -> int:
        return max(0, bisect_right(self._points, t, key=lambda point: point[0]) - 1)


def _spent(state: State, duration: float) -> Seconds:
    if state.lost:
        return Seconds()
    return Seconds(state.busy * duration, state.waiting * duration)
