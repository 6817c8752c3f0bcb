"""What a scenario makes one GPU do: its state at any time, and how long it has computed and waited until then."""

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
    """What holds from one moment of the timeline to the next."""

    busy: float = 0.0
    """Share of the time spent computing: the GPU is utilized and draws power."""
    waiting: float = 0.0
    """Share of the time spent in a collective's kernel: the GPU is utilized all the same, but draws little."""
    memory_used: int | None = None
    """Bytes; None is what the processes hold."""
    ranks_busy: float = 1.0
    """Share of the ranks' computing and waiting in which a kernel runs: below 1 where the host cannot keep up."""
    ranks_memory: float = 0.6
    """Share of the memory that the ranks hold together; at 0 they have no process on the GPU."""
    temperature: float | None = None
    """Degrees Celsius; None follows the load."""
    throttle: tuple[str, ...] = ()
    processes: tuple[SimulatedProcess, ...] = ()
    ecc: Mapping[str, int] = field(default_factory=dict)
    """Memory errors by kind and location, such as uncorrected_dram."""
    fields: Mapping[int, int] = field(default_factory=dict)
    """What nvmlDeviceGetFieldValues says, by field, instead of what it would."""
    nvlinks_down: int = 0
    lost: bool = False
    fails: Mapping[str, int] = field(default_factory=dict)
    """NVML's return code by symbol."""
    blocks: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a call blocks, by symbol."""


@dataclass(frozen=True)
class Seconds:
    """Time since the scenario's beginning in which a GPU was utilized, by what for."""

    computing: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.computing + other.computing, self.waiting + other.waiting)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.computing - other.computing, self.waiting - other.waiting)

    @property
    def utilized(self) -> float:
        """Computing and waiting alike: NVML sees a kernel run."""
        return self.computing + self.waiting


class Timeline:
    """States from given times on (seconds, ascending, the first at 0), and XID errors at given times."""

    def __init__(self, states: Sequence[tuple[float, State]], xids: Sequence[tuple[float, int]] = ()) -> None:
        # Each with the time spent until it began. Replaced as a whole, so that its readers need no lock.
        self._points: tuple[tuple[float, State, Seconds], ...] = ()
        self.xids: tuple[tuple[float, int], ...] = ()
        for at, state in states:
            self._append(at, state)
        self.xids = tuple(xids)

    @property
    def states(self) -> tuple[tuple[float, State], ...]:
        """All of them, with the time from which each holds."""
        return tuple((at, state) for at, state, _ in self._points)

    def change(self, at: float, state: State, xid: int | None = None) -> None:
        """From `at` on this holds, and nothing of what was planned for later."""
        self._points = self._points[: self._index(at) + 1]
        self._append(at, state)
        self.xids = tuple(planned for planned in self.xids if planned[0] <= at)
        if xid is not None:
            self.xids = (*self.xids, (at, xid))

    def state(self, t: float) -> State:
        """What holds at `t`."""
        return self._points[self._index(t)][1]

    def seconds(self, t: float) -> Seconds:
        """Utilized time from 0 to `t`."""
        at, state, until = self._points[self._index(t)]
        return until + _spent(state, max(0.0, t - at))

    def held(self, t: float, condition: Callable[[State], bool]) -> float:
        """For how many of the seconds from 0 to `t` a condition held."""
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
