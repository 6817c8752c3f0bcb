"""Busy time is counted from samples, for any clock of their stamps and any behavior of the ring."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.gpu.busy_meter import BusyMeter, Load
from rankscope_exporter.gpu.collector import Tick
from rankscope_exporter.gpu.nvml.device import UtilizationSample

UNIX = 1_800_000_000.0
PERIODS = (0.02, 1 / 6, 0.5, 1.0)
SINCE_1970, SINCE_BOOT, SINCE_LOADED = UNIX, 86_400.0, 0.0


@dataclass
class Driver:
    """A driver that samples a busy function into a ring, configured by a test. It acts as the meter's device."""

    busy: list[bool]
    """State of each sampling period."""
    period: float
    epoch: float = SINCE_1970
    depth: int = 120
    skips_idle: bool = False
    """True if idle periods have no samples."""
    empties: bool = False
    """True if the ring is empty after each idle period."""
    repeats: int = 1
    """Number of copies of each sample in the ring."""
    clock_steps: dict[int, float] = field(default_factory=dict)
    """Seconds by which the stamps' clock is set, by number of the period."""
    stands_still: frozenset[int] = frozenset()
    """Periods whose samples have the previous sample's stamp."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.gaps = 1  # times unknown to the meter: first the start of the first sample after the first reading
        self._taken = 0
        self._last_stamp = 0
        self._seen: set[int] = set()
        self._ring: deque[tuple[int, UtilizationSample]] = deque(maxlen=self.depth)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self._taken < min(len(self.busy), int(self.now / self.period + 1e-9)):
            self._take_sample()

    def _take_sample(self) -> None:
        number, self._taken = self._taken, self._taken + 1
        if step := self.clock_steps.get(number):
            self.epoch += step
            self.gaps += 1
        if self.empties and not self.busy[number]:
            self._ring.clear()
        if (self.empties or self.skips_idle) and not self.busy[number]:
            self.gaps += bool(number) and self.busy[number - 1]
            return
        if number not in self.stands_still:
            self._last_stamp = round((self.epoch + self._taken * self.period) * 1e6)
        sample = UtilizationSample(self._last_stamp, 100.0 * self.busy[number])
        self._ring.extend([(number, sample)] * self.repeats)

    def supports_gpm(self) -> bool:
        return False

    def samples_utilization(self, _engine: str = "gpu") -> bool:
        return True

    def utilization_samples(self, _engine: str = "gpu") -> Iterator[UtilizationSample]:
        return iter([sample for _, sample in reversed(self._ring)])

    def record_ring(self) -> None:
        """Record the ring's current samples."""
        numbers = {number for number, _ in self._ring}
        if self._seen and numbers and min(numbers) > max(self._seen) + 1:
            self.gaps += 1
        self._seen |= numbers

    def truth(self, since: int) -> float:
        """Return the busy seconds of the visible periods from `since` on."""
        return sum(self.period for number in self._seen if number >= since and self.busy[number])


def read(driver: Driver, meter: BusyMeter, elapsed: float, unix_error: float = 0.0) -> Load:
    driver.advance(elapsed)
    driver.record_ring()
    load = meter(driver, Tick(UNIX + driver.now + unix_error, elapsed, driver.now))
    assert load is not None
    return load


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    stretches = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), min_size=1, max_size=8))
    busy = [is_busy for is_busy, length in stretches for _ in range(length)]
    periods = st.integers(0, len(busy) - 1)
    return Driver(
        busy,
        draw(st.sampled_from(PERIODS)),
        epoch=draw(st.sampled_from([SINCE_1970, SINCE_BOOT, SINCE_LOADED])) + 1e6,  # stamps are unsigned
        depth=draw(st.sampled_from([20, 120])),
        skips_idle=draw(st.booleans()),
        empties=draw(st.booleans()),
        clock_steps=draw(st.dictionaries(periods, st.floats(-1e5, 1e5), max_size=3)),
    )


@given(drivers(), st.lists(st.floats(0.3, 40.0), min_size=2, max_size=40))
def test_each_sample_of_the_ring_is_counted_once(driver: Driver, intervals: list[float]) -> None:
    meter = BusyMeter()
    read(driver, meter, intervals[0])
    before = driver._taken
    for interval in intervals[1:]:
        load = read(driver, meter, interval)
    assert load.busy_seconds == pytest.approx(driver.truth(before), abs=driver.period * driver.gaps + 1e-6)
    assert load.busy_seconds <= sum(intervals[1:]) + driver.period


@given(st.integers(0, 10_000), st.sampled_from(PERIODS), st.integers(1, 3), st.floats(0, 0.3))
def test_duplicate_samples_and_stopped_clocks_lose_no_time(
    seed: int, period: float, repeats: int, share: float
) -> None:
    randomly = random.Random(seed)
    busy = [randomly.random() < 0.5 for _ in range(400)]
    # The clock runs again at the last sample read, which then accounts for the samples taken while it stood still.
    stops = [number for number in range(20, 389) if randomly.random() < share]
    still = frozenset(stops) if repeats == 1 else frozenset()
    driver, meter = Driver(busy, period, repeats=repeats, stands_still=still), BusyMeter()
    read(driver, meter, 10 * period)
    for _ in range(380 // 5):
        load = read(driver, meter, 5 * period)
    assert load.busy_seconds == pytest.approx(driver.truth(10), abs=2 * period)


@pytest.mark.parametrize("epoch", [SINCE_1970, SINCE_BOOT, SINCE_LOADED])
@pytest.mark.parametrize("period", PERIODS)
def test_a_busy_gpu_is_busy_now_for_any_clock_of_the_stamps(epoch: float, period: float) -> None:
    driver, meter = Driver([True] * round(80 / period), period, epoch), BusyMeter()
    for _ in range(75):
        load = read(driver, meter, 1.0)
    assert load.last_busy == pytest.approx(UNIX + driver.now, abs=1.0)
    assert load.idle_for <= 1.0
    assert load.busy_seconds == pytest.approx(74, abs=period)


@pytest.mark.parametrize("behavior", [{}, {"skips_idle": True}, {"empties": True}])
@pytest.mark.parametrize("burst", [0.2, 1.0, 6.0])
def test_bursts_count_with_their_duration_if_idle_gpus_have_no_samples(behavior: dict[str, bool], burst: float) -> None:
    period = 0.1
    busy = [number * period % 20 < burst - 1e-9 for number in range(round(200 / period))]
    driver, meter = Driver(busy, period, **behavior), BusyMeter()
    read(driver, meter, 10.0)
    for _ in range(185):
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(driver.truth(100), abs=9 * period + 1e-6)
    assert load.idle_for == pytest.approx((driver.now - burst) % 20, abs=1.0) or load.busy_seconds == 0


@pytest.mark.parametrize("step", [3600.0, -3600.0, 2.0, -0.5, -0.05])
def test_setting_the_clock_loses_at_most_one_period(step: float) -> None:
    driver, meter = Driver([True, False] * 100, 1 / 6, clock_steps={60: step}), BusyMeter()
    for _ in range(30):
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(14.5, abs=1 / 6)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_the_last_busy_time_follows_the_nodes_clock(step: float) -> None:
    driver, meter = Driver([True] * 60 + [False] * 240, 1 / 6), BusyMeter()
    for _ in range(20):
        load = read(driver, meter, 1.0)
    assert load.last_busy == pytest.approx(UNIX + 10, abs=0.2)
    load = read(driver, meter, 1.0, unix_error=step)
    assert load.last_busy == pytest.approx(UNIX + 10 + step, abs=0.2)
    assert load.idle_for == pytest.approx(11, abs=0.2)


def test_the_last_busy_time_of_an_idle_gpu_is_constant() -> None:
    driver, meter = Driver([True] * 6 + [False] * 200, 1 / 6), BusyMeter()
    read(driver, meter, 1.0)
    assert len({read(driver, meter, 0.1, unix_error=0.001 * n).last_busy for n in range(50)}) == 1


def test_a_ring_that_appears_later_adds_at_most_the_time_since_the_last_reading() -> None:
    class Late(Driver):
        has_ring = False

        def samples_utilization(self, _engine: str = "gpu") -> bool:
            return self.has_ring

        def utilization(self, _engine: str = "gpu") -> float:
            return 0.5

    driver, meter = Late([True] * 600, 1 / 6), BusyMeter()
    for second in range(60):
        driver.has_ring = second >= 30
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(30 * 0.5 + 30, abs=0.5 + 1 / 6)


def test_periods_of_uneven_length_are_all_counted() -> None:
    class Uneven(Driver):
        def utilization_samples(self, _engine: str = "gpu") -> Iterator[UtilizationSample]:
            for sample in super().utilization_samples():
                yield UtilizationSample(
                    sample.timestamp_us + sample.timestamp_us // 200_000 % 2 * 30_000, sample.percent
                )

    driver, meter = Uneven([True] * 600, 0.2), BusyMeter()
    for _ in range(60):
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(59, abs=0.5)


def test_samples_that_the_driver_adds_late_are_all_counted() -> None:
    class Late(Driver):
        def advance(self, seconds: float) -> None:
            self.now += seconds
            if round(self.now) % 3 == 0:
                super().advance(0.0)

    driver, meter = Late([True] * 600, 1 / 6), BusyMeter()
    for _ in range(63):
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(62, abs=0.2)
    assert load.last_busy == pytest.approx(UNIX + driver.now)


def test_a_failed_reading_loses_no_samples() -> None:
    class Failing(Driver):
        fails = False

        def samples_utilization(self, _engine: str = "gpu") -> bool:
            if self.fails:
                raise OSError
            return True

    driver, meter = Failing([True] * 600, 1 / 6), BusyMeter()
    for second in range(30):
        driver.fails = second % 3 == 1
        try:
            load = read(driver, meter, 1.0)
        except OSError:
            continue
    assert load.busy_seconds == pytest.approx(29, abs=1 / 6)


@pytest.mark.parametrize("hidden", [1, 2, 5])
def test_a_sample_that_the_driver_returns_only_after_later_ones_is_counted_once(hidden: int) -> None:
    class Omitting(Driver):
        def utilization_samples(self, _engine: str = "gpu") -> Iterator[UtilizationSample]:
            newest, *others = super().utilization_samples()
            return iter([newest, *others[hidden:]])

    driver, meter = Omitting([number < 60 or 240 <= number < 243 for number in range(600)], 1 / 6), BusyMeter()
    read(driver, meter, 11.0)
    for _ in range(85):
        load = read(driver, meter, 1.0)
    assert load.busy_seconds == pytest.approx(0.5, abs=0.1)
    assert load.idle_for == pytest.approx(driver.now - 243 / 6, abs=1.0 + hidden / 6)
