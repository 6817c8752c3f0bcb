"""The checks of GPUs, on readings: peers of one model, one GPU alone, and what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope_exporter.node_check.gpu_checks import CHECKS, check_gpus, in_use
from rankscope_exporter.node_check.readings import Facts, Gpu, Load, Sample
from rankscope_exporter.node_check.result import Result

CLOCK = 1980e6
RATES = {"matmul": 990e12, "memory_bandwidth": 3000e9}

About = dict[str, object]


def facts(index: int, name: str = "H100", **values: object) -> Facts:
    known = Facts(
        index, f"GPU-{index}", name, f"0000:{index:02x}:00.0", clock_max=CLOCK, bandwidth_max=3350e9, link_max=(5, 16),
        power_limit=700.0, temperature_max=87.0, nvlinks=(True,) * 18, fabric=("completed", "success"), pids=(),
        persistence="enabled", compute_mode="default", recovery_action="none", uncorrected=0.0,
        is_remapping_pending=0.0, is_remapping_failed=0.0, memory_used=0.0, has_gpm=True,
    )  # fmt: skip
    return replace(known, **values)  # type: ignore[arg-type]


def sample(at: float, **values: object) -> Sample:
    return replace(Sample(at, CLOCK, (), (5.0, 16.0), 60.0, 20.0, (7,)), **values)  # type: ignore[arg-type]


def gpu(index: int, name: str = "H100", rate: float = 1.0, about: About | None = None, **loaded: object) -> Gpu:
    """Return a GPU with four samples under load, which the keywords change."""
    load = Load({work: value * rate for work, value in RATES.items()}, [(0.0, 10.0)])
    return Gpu(facts(index, name, **(about or {})), load, [sample(at, **loaded) for at in (1.0, 2.0, 3.0, 4.0)])


def wrong(*gpus: Gpu) -> dict[tuple[int | None, str], Result]:
    """Return the results that are neither ok nor not run, by GPU and check."""
    return {(r.gpu, r.check): r for r in check_gpus(gpus) if r.outcome not in ("ok", "not_run")}


def outcome(name: str, *gpus: Gpu) -> str:
    """Return the outcome of a check for the last GPU."""
    return [result.outcome for result in check_gpus(gpus) if result.check == name][-1]


HEALTHY = [gpu(index) for index in range(3)]


def test_healthy_gpus_have_no_result_that_is_wrong() -> None:
    assert wrong(*HEALTHY, gpu(3)) == {}
    assert {result.check for result in check_gpus(HEALTHY)} == set(CHECKS)


def test_a_gpu_that_is_slower_than_its_peers_fails_with_both_numbers() -> None:
    found = wrong(*HEALTHY, gpu(3, rate=0.7))
    assert set(found) == {(3, "matmul"), (3, "memory_bandwidth")}
    line = found[3, "matmul"].line
    assert "GPU 3 (GPU-3): matmul: 693 TFLOP/s, 70% of the median; expected: at least 842 TFLOP/s, 85% of" in line


LATER = [sample(at) for at in (2.0, 3.0, 4.0)]
BEFORE = [sample(-1.0, clock=345e6, link=(1.0, 16.0), reasons=("gpu_idle",)) for _ in range(9)]
NO_FAULTS = {
    "healthy GPUs differ by less": [gpu(0, rate=1.04), gpu(1, rate=0.98), gpu(2), gpu(3, rate=0.92)],
    "one moment of a low clock": [*HEALTHY, Gpu(facts(3), HEALTHY[0].load, [sample(1.0, clock=345e6), *LATER])],
    "idle before the load": [*HEALTHY, replace(gpu(3), samples=[*BEFORE, *gpu(3).samples])],
    "another model": [*HEALTHY, *(gpu(i, "T4", rate=0.1, about={"bandwidth_max": None}) for i in (3, 4, 5))],
    "a link is judged at its best": [Gpu(facts(0), HEALTHY[0].load, [sample(1.0, link=(1.0, 16.0)), sample(2.0)])],
}


@pytest.mark.parametrize("gpus", NO_FAULTS.values(), ids=NO_FAULTS)
def test_what_healthy_gpus_do_is_no_fault(gpus: list[Gpu]) -> None:
    assert wrong(*gpus) == {}


def test_a_low_clock_fails_unless_something_explains_it() -> None:
    assert set(wrong(*HEALTHY, gpu(3, clock=1200e6))) == {(3, "sm_clock")}
    assert outcome("sm_clock", gpu(0, clock=1300e6, reasons=("sw_power_cap",))) == "not_run"
    assert outcome("sm_clock", gpu(0, clock=1200e6, reasons=("applications_clocks_setting",))) == "warning"


@pytest.mark.parametrize("others", [0, 1])
def test_one_or_two_gpus_are_compared_with_what_the_driver_reports(others: int) -> None:
    healthy = HEALTHY[:others]
    assert outcome("sm_clock", *healthy, gpu(3, clock=1200e6)) == "failed"
    assert outcome("memory_bandwidth", *healthy, gpu(3, rate=0.5)) == "failed"
    assert outcome("matmul", *healthy, gpu(3, rate=0.5)) == "not_run"
    assert wrong(*healthy, gpu(3)) == {}


@pytest.mark.parametrize(
    "reason", ["hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "hw_slowdown"]
)
def test_throttling_fails_if_it_lasts_and_warns_if_not(reason: str) -> None:
    assert outcome("throttling", gpu(0, reasons=(reason,))) == "failed"
    once = Gpu(facts(0), HEALTHY[0].load, [sample(1.0, reasons=(reason,)), *LATER])
    assert outcome("throttling", once) == "warning"


@pytest.mark.parametrize("reason", ["sw_power_cap", "gpu_idle", "sync_boost", "reliability"])
def test_reasons_that_a_healthy_gpu_has_under_load_are_no_throttling(reason: str) -> None:
    assert outcome("throttling", gpu(0, reasons=(reason,))) in ("ok", "not_run")


@pytest.mark.parametrize("link", [(1.0, 16.0), (5.0, 8.0), (5.0, 1.0)])
def test_a_link_below_its_maximum_under_load_fails(link: tuple[float, float]) -> None:
    assert set(wrong(*HEALTHY, gpu(3, link=link))) == {(3, "pcie")}
    assert set(wrong(gpu(3, link=link))) == {(3, "pcie")}


def test_links_that_are_low_on_every_gpu_are_how_the_node_is_built() -> None:
    found = wrong(*(gpu(index, link=(5.0, 8.0)) for index in range(4)))
    assert {result.outcome for result in found.values()} == {"warning"}


def test_an_idle_gpu_with_a_low_link_and_clock_is_healthy() -> None:
    idle = [sample(at, clock=345e6, link=(1.0, 16.0), reasons=("gpu_idle",)) for at in (1.0, 2.0)]
    gpus = [Gpu(facts(index), Load(not_run="torch is missing"), idle) for index in range(8)]
    assert wrong(*gpus) == {}
    assert outcome("pcie", *gpus) == "not_run"


def test_in_a_fabric_every_nvlink_must_be_up() -> None:
    down = gpu(3, about={"nvlinks": (True,) * 16 + (False,) * 2})
    (result,) = wrong(down).values()
    assert result.measured == "16 of 18 links are up (down: 16, 17)"


def test_without_a_fabric_a_gpu_has_as_many_nvlinks_as_its_peers() -> None:
    bridged = [gpu(i, about={"fabric": (), "nvlinks": (True,) * 12 + (False,) * 6}) for i in range(2)]
    assert wrong(*bridged) == {}
    assert wrong(*(gpu(i, about={"fabric": (), "nvlinks": (False,) * 12}) for i in range(2))) == {}
    fewer = gpu(2, about={"fabric": (), "nvlinks": (True,) * 8 + (False,) * 10})
    assert set(wrong(*bridged, fewer)) == {(2, "nvlink")}


@pytest.mark.parametrize(
    ("about", "check"),
    [
        ({"is_remapping_pending": 1.0}, "row_remapping"),
        ({"is_remapping_failed": 1.0}, "row_remapping"),
        ({"is_remapping_pending": None, "is_retirement_pending": 1.0}, "row_remapping"),
        ({"uncorrected": 2.0}, "ecc"),
        ({"retired_pages": 60.0}, "ecc"),
        ({"recovery_action": "gpu_reset"}, "recovery_action"),
        ({"compute_mode": "prohibited"}, "compute_mode"),
        ({"temperature_max": 60.0}, "temperature"),
    ],
)
def test_what_the_driver_reports_of_a_broken_gpu_fails(about: About, check: str) -> None:
    found = wrong(*HEALTHY, gpu(3, about=about))
    assert {key: result.outcome for key, result in found.items()} == {(3, check): "failed"}
    assert found[3, check].advice


def test_one_error_is_named_in_the_singular() -> None:
    assert "ecc: 1 uncorrected error since" in wrong(gpu(0, about={"uncorrected": 1.0}))[0, "ecc"].line


def test_settings_that_only_cost_time_warn() -> None:
    found = wrong(*HEALTHY, gpu(3, about={"persistence": "disabled", "power_limit": 500.0}))
    assert {key: r.outcome for key, r in found.items()} == {
        (3, "persistence_mode"): "warning",
        (3, "power_limit"): "warning",
    }


@pytest.mark.parametrize(
    ("load", "expected"), [(Load(not_run="torch is missing"), "failed"), (HEALTHY[0].load, "warning")]
)
def test_a_fabric_that_is_not_ready_fails_unless_cuda_works_without_it(load: Load, expected: str) -> None:
    assert outcome("fabric", Gpu(facts(0, fabric=("in_progress", "success")), load)) == expected


def test_a_lost_gpu_has_one_result() -> None:
    (result,) = check_gpus([Gpu(Facts(3, error="GPU is lost"))])
    assert (result.outcome, result.place) == ("failed", "GPU 3")


def test_a_gpu_of_which_nothing_is_known_fails_nothing() -> None:
    results = [*check_gpus([Gpu(Facts(0)), Gpu(Facts(1, unreadable="no permission"))])]
    assert {result.outcome for result in results} <= {"ok", "not_run"}


def test_a_gpu_is_in_use_by_a_process_or_by_memory_without_one() -> None:
    assert in_use(Gpu(facts(0, pids=(12, 7)))) == "used by processes 7, 12"
    assert "not visible" in in_use(Gpu(facts(0, memory_used=20 * 2.0**30)))
    assert in_use(Gpu(facts(0, memory_used=600 * 2.0**20))) == ""
    assert in_use(Gpu(facts(0, is_mig=True, pids=(7,)))) == ""  # its instances belong to several jobs
