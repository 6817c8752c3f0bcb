"""One simulated GPU: every quantity as a function of time, derived from its computing and waiting time.

Times are seconds since the scenario started. All quantities derive from the same two cumulative curves, so the sample
ring, utilization, power and energy are consistent with each other, as on a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rankscope_exporter.simulation import simulated_uuid
from rankscope_exporter.simulation.models import GpuModel
from rankscope_exporter.simulation.ranks import RankHistory
from rankscope_exporter.simulation.timeline import Seconds, SimulatedProcess, State, Timeline

SAMPLE_PERIOD = 1 / 6  # seconds, the shortest that NVML documents for utilization
RING_DEPTH = 120
POWER_WINDOW = 1.0  # seconds: nvmlDeviceGetPowerUsage averages the last second on most products since Ampere
HEAT_WINDOW = 20.0  # seconds
RESERVED_SHARE = 1 / 128  # of the memory; 640 MiB of 80 GiB

# Shares of the range between idle and maximum power. Their ratio matters: a deadlocked collective also shows 100%
# utilization, and only power distinguishes it from work.
COMPUTING_POWER = 0.9
WAITING_POWER = 0.2
IDLE_TEMPERATURE, FULL_LOAD_HEATING = 32.0, 45.0  # °C
IDLE_SM_CLOCK = 345.0  # MHz
THROTTLED_CLOCK = 0.6
PCIE_RATE, NVLINK_RATE = 2e9, 100e9  # bytes per second of computing, in each direction
NO_THROTTLING = frozenset({"gpu_idle", "applications_clocks_setting"})


class SimulatedGpu:
    """A pure function of time, except for external ranks and processes."""

    def __init__(
        self,
        index: int,
        model: GpuModel,
        timeline: Timeline,
        start_unix: float,
        ranks: RankHistory | None = None,
        holders: Callable[[int], Iterable[SimulatedProcess]] = lambda _: (),
        machine: int = 0,
    ) -> None:
        self.index = index
        self.uuid = simulated_uuid(index, machine)
        self.name = f"Simulated {model.name}"
        self.pci_bus_id = f"00000000:{0x10 + index:02X}:00.0"
        self.model = model
        self.timeline = timeline
        self.start_unix = start_unix
        self._ranks = ranks
        self._holders = holders
        self._samples: dict[float, int] = {}  # percent by end of period

    def state(self, t: float) -> State:
        """Return the scenario's state at `t`."""
        return self.timeline.state(t)

    def seconds(self, t: float) -> Seconds:
        """Return the utilized seconds until `t`."""
        followed = self._ranks.seconds(t) if self._ranks else Seconds()
        return self.timeline.seconds(t) + followed

    def samples(self, t: float, since: float) -> list[tuple[float, int]]:
        """Return the ring's samples after `since`: end of each period and percent utilized."""
        known = min(t, self._ranks.known_until) if self._ranks else t
        last = int(known / SAMPLE_PERIOD + 1e-6)
        first = max(1, last - RING_DEPTH + 1, int(since / SAMPLE_PERIOD))
        ends = [number * SAMPLE_PERIOD for number in range(first, last + 1)]
        return [(end, self._sample(end)) for end in ends if end > since]

    def utilization(self, t: float) -> int:
        """Return the percent utilized in the last sample period."""
        samples = self.samples(t, t - 1)
        return samples[-1][1] if samples else 0

    def power(self, t: float) -> float:
        """Return the mean watts of the last second."""
        window = min(POWER_WINDOW, t)
        return (self.energy(t) - self.energy(t - window)) / window if window > 0 else self.model.power_idle

    def energy(self, t: float) -> float:
        """Return the joules since the scenario started."""
        spent = self.seconds(t)
        load = COMPUTING_POWER * spent.computing + WAITING_POWER * spent.waiting
        return self.model.power_idle * t + (self.model.power_max - self.model.power_idle) * load

    def temperature(self, t: float) -> float:
        """Return degrees Celsius: the scenario's value if it has one, otherwise from the recent mean load."""
        given = self.state(t).temperature
        if given is not None:
            return given
        window = max(1.0, min(HEAT_WINDOW, t))
        watts = (self.energy(t) - self.energy(max(0.0, t - window))) / window
        load = (watts - self.model.power_idle) / (self.model.power_max - self.model.power_idle)
        return IDLE_TEMPERATURE + FULL_LOAD_HEATING * min(1.0, max(0.0, load))

    def sm_clock(self, t: float) -> float:
        """Return the SM clock in MHz. It is lower while idle or throttled."""
        reasons = self.reasons(t)
        if "gpu_idle" in reasons:
            return IDLE_SM_CLOCK
        return self.model.sm_clock * self.state(t).speed * (THROTTLED_CLOCK if reasons - NO_THROTTLING else 1)

    def pcie_bytes(self, t: float) -> float:
        """Return the bytes since the scenario started, in each direction."""
        return PCIE_RATE * self.seconds(t).computing

    def nvlink_bytes(self, t: float) -> float:
        """Return the bytes of all NVLinks since the scenario started, in each direction."""
        return NVLINK_RATE * self.seconds(t).computing

    def is_idle(self, t: float) -> bool:
        """Return whether nothing ran in the last second."""
        return self.seconds(t).utilized - self.seconds(max(0.0, t - POWER_WINDOW)).utilized <= 0

    def reasons(self, t: float) -> frozenset[str]:
        """Return the reasons why the clocks are below their maximum."""
        return frozenset(self.state(t).throttle) | ({"gpu_idle"} if self.is_idle(t) else frozenset())

    def processes(self, t: float) -> list[SimulatedProcess]:
        """Return the processes of the scenario, the ranks, and announced processes."""
        state = self.state(t)
        pids = self._ranks.pids if self._ranks and state.ranks_memory else ()
        share = int(self.model.memory * state.ranks_memory) // max(1, len(pids))
        ranks = [SimulatedProcess(pid, share) for pid in pids]
        return [*state.processes, *ranks, *self._holders(self.index)]

    @property
    def memory_reserved(self) -> int:
        """Bytes reserved by the driver."""
        return int(self.model.memory * RESERVED_SHARE)

    def memory_used(self, t: float) -> int:
        """Return the bytes used by processes. The scenario's `memory_used` replaces the sum of its own processes."""
        state, processes = self.state(t), self.processes(t)
        used = sum(process.memory for process in processes)
        if state.memory_used is not None:
            used += state.memory_used - sum(process.memory for process in state.processes)
        return min(used, self.model.memory - self.memory_reserved)

    def _sample(self, end: float) -> int:
        """Return the percent of the period that ended at `end`. Values are cached because they never change."""
        if end not in self._samples:
            while len(self._samples) >= RING_DEPTH:
                self._samples.pop(next(iter(self._samples)), None)
            self._samples[end] = self._percent(end - SAMPLE_PERIOD, end)
        return self._samples[end]

    def _percent(self, start: float, end: float) -> int:
        spent = (self.seconds(end) - self.seconds(start)).utilized
        return min(100, round(100 * spent / (end - start)))
