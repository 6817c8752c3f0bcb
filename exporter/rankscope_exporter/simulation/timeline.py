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
    """Share of the time spent computing: the GPU is utilised and draws power."""
    waiting: float = 0.0
    """Share of the time spent in a collective's kernel: the GPU is utilised all the same, but draws little."""
    memory_used: int | None = None
    """Bytes; None is what the processes hold."""
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
    """Time since the scenario's beginning in which a GPU was utilised, by what for."""

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
        self._times = [at for at, _ in states]
        self._states = [state for _, state in states]
        self._until = [Seconds()]
        for (start, state), end in zip(states, self._times[1:], strict=False):
            self._until.append(self._until[-1] + _spent(state, end - start))
        self.states = tuple(states)
        self.xids = tuple(xids)

    def state(self, t: float) -> State:
        """What holds at `t`."""
        return self._states[self._place(t)]

    def seconds(self, t: float) -> Seconds:
        """Utilised time from 0 to `t`."""
        place = self._place(t)
        return self._until[place] + _spent(self._states[place], max(0.0, t - self._times[place]))

    def held(self, t: float, condition: Callable[[State], bool]) -> float:
        """For how many of the seconds from 0 to `t` a condition held."""
        ends = [*self._times[1:], float("inf")]
        spans = zip(self._times, ends, self._states, strict=True)
        return sum(max(0.0, min(end, t) - start) for start, end, state in spans if condition(state))

    def _place(self, t: float) -> int:
        return max(0, bisect_right(self._times, t) - 1)


def _spent(state: State, duration: float) -> Seconds:
    if state.lost:
        return Seconds()
    return Seconds(state.busy * duration, state.waiting * duration)
