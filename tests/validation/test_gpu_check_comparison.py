"""gpu-check holds every metric against something, reads nvidia-smi as it is, and judges what differs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from validation.gpu_check import comparison, smi, table
from validation.gpu_check.effects import EFFECTS
from validation.gpu_check.exporter import Scrape
from validation.gpu_check.instead import INSTEAD
from validation.gpu_check.loaded import JUDGED_HERE
from validation.gpu_check.report import Check

from rankscope_exporter.registry import EXPORTER_METRICS, GPU_METRICS

DOCUMENTS = Path(__file__).parent / "nvidia_smi"
H100 = "GPU-00000000-0000-0000-0000-000000000001"
LOADED = {f"rankscope_gpu_{effect.metric}" for effect in EFFECTS} | JUDGED_HERE
COUNTED = {"rankscope_exporter_gpus_seen", "rankscope_exporter_gpus_expected"}  # by comparison.py


def document(name: str) -> ElementTree.Element:
    return ElementTree.parse(DOCUMENTS / f"{name}.xml").getroot()


def gpu(name: str) -> ElementTree.Element:
    found = document(name).find("gpu")
    assert found is not None
    return found


def expected(name: str) -> dict[tuple[str, ...], float | None]:
    """nvidia-smi's numbers by metric and label values."""
    numbers = table.expectations(gpu(name))
    return {(metric, *labels.values()): value[0] if value else None for metric, labels, value, _ in numbers}


def scrape(**values: float) -> Scrape:
    """One of the H100's series without more labels than those of every GPU."""
    labels = frozenset({("gpu", "0"), ("uuid", H100)})
    return Scrape(0.0, {(f"rankscope_gpu_{name}", labels): value for name, value in values.items()})


def checks(*scrapes: Scrape) -> dict[str, Check]:
    found = comparison.beside("nvidia-smi", scrapes, (DOCUMENTS / "h100.xml").read_text())
    return {check.about: check for check in found}


def test_every_metric_is_held_against_something() -> None:
    declared = {metric.name for metric in (*GPU_METRICS, *EXPORTER_METRICS)}
    assert table.TABLED | LOADED | set(INSTEAD) | COUNTED == declared


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("81559 MiB", 81559 * 2**20),
        ("68.57 W", 68.57),
        ("-8 C", -8),
        ("1980 MHz", 1.98e9),
        ("7015662857 us", 7015.662857),
        ("2559 bank(s)", 2559),
        ("16x", 16),
        ("P8", 8),
        ("Yes", 1),
        ("150", 150),
    ],
)
def test_what_nvidia_smi_prints_becomes_a_number_in_the_base_unit(printed: str, number: float) -> None:
    found = smi.quantity(printed)
    assert found is not None
    assert found[0] == pytest.approx(number)


@pytest.mark.parametrize("printed", [None, "N/A", "12 parsecs", "Requested functionality has been deprecated", "1.2.3"])
def test_what_is_no_number_with_a_known_unit_is_none(printed: str | None) -> None:
    assert smi.quantity(printed) is None


def test_a_new_driver_s_document_is_read_by_its_names() -> None:
    numbers = expected("h100")
    assert numbers["power_watts",] == 68.57
    assert numbers["ecc_errors_total", "uncorrected", "sram"] == 5
    assert numbers["row_remapping_failed",] == 1
    assert numbers["row_remapping_banks", "high"] == 1
    assert numbers["temperature_margin_threshold_celsius", "slowdown"] == -2
    assert numbers["temperature_threshold_celsius", "slowdown"] is None
    assert numbers["throttled_seconds_total", "sw_power_cap"] == pytest.approx(7015.662857)
    assert numbers["retired_pages_total", "double_bit"] is None
    assert numbers["processes",] == 2
    assert numbers["processes_memory_bytes",] == 1500 * 2**20
    assert numbers["process_memory_bytes", "4242"] == 2**30
    assert numbers["mig_instances",] is None


def test_an_old_driver_s_document_is_read_by_its_names() -> None:
    numbers = expected("t4")
    assert numbers["power_watts",] == 26.78
    assert numbers["power_limit_watts",] == 70
    assert numbers["ecc_errors_total", "uncorrected", "sram"] == 7
    assert numbers["retired_pages_total", "double_bit"] == 1
    assert numbers["page_retirement_pending",] == 0
    assert numbers["temperature_threshold_celsius", "shutdown"] == 96
    assert numbers["remapped_rows_total", "corrected"] is None
    assert numbers["throttled_seconds_total", "sw_power_cap"] is None


def test_mig_instances_are_read_each() -> None:
    numbers = expected("a100_mig")
    assert numbers["mig_instances",] == 1
    assert numbers["mig_info", "3", "0"] == 1
    assert numbers["mig_memory_total_bytes", "3"] == 19968 * 2**20


def test_a_value_within_what_was_scraped_around_it_is_ok() -> None:
    found = checks(scrape(temperature_celsius=20), scrape(temperature_celsius=40))
    assert found["temperature_celsius"].outcome == "ok"
    assert (found["temperature_celsius"].ours, found["temperature_celsius"].theirs) == ("20 … 40", "29")


def test_a_value_outside_differs_and_both_are_told() -> None:
    found = checks(scrape(memory_total_bytes=81559 * 2**30))["memory_total_bytes"]
    assert (found.outcome, found.ours, found.theirs) == ("differs", str(81559 * 2**30), str(81559 * 2**20))


def test_what_only_one_side_or_none_tells_is_told_apart() -> None:
    found = checks(scrape(page_retirement_pending=0))
    assert found["page_retirement_pending"].outcome == "only we"
    assert found["performance_state"].outcome == "only nvidia-smi"
    assert found["retired_pages_total double_bit"].outcome == "absent on both sides"


def test_words_are_compared_in_our_spelling() -> None:
    labels = {"gpu": "0", "uuid": H100, "persistence": "enabled", "compute": "prohibited", "mig": "disabled"}
    labels |= {"virtualization": "passthrough", "ecc": ""}
    found = checks(Scrape(0.0, {("rankscope_gpu_modes_info", frozenset(labels.items())): 1.0}))
    outcomes = {name: found[f"modes_info{{{name}}}"].outcome for name in ("persistence", "compute", "virtualization")}
    assert outcomes == {"persistence": "ok", "compute": "differs", "virtualization": "ok"}
    assert found["modes_info{ecc}"].outcome == "only nvidia-smi"


def test_a_label_value_that_nvidia_smi_has_no_element_for_is_told() -> None:
    labels = frozenset({("gpu", "0"), ("uuid", H100), ("reason", "reliability")})
    found = checks(Scrape(0.0, {("rankscope_gpu_throttled_seconds_total", labels): 3.0}))
    assert found["throttled_seconds_total reliability"].outcome == "only we"


def test_what_is_kept_of_a_document_has_no_serial_number() -> None:
    kept = smi.without_identity("<gpu>\n<serial>165</serial>\n<supported_clocks>\n1\n</supported_clocks></gpu>")
    assert kept == "<gpu></gpu>"


def test_the_attached_gpus_are_counted() -> None:
    found = checks(Scrape(0.0, {("rankscope_exporter_gpus_seen", frozenset()): 2.0}))
    assert found["rankscope_exporter_gpus_seen"].outcome == "differs"
