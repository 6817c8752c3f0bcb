"""Memory errors and repairs are exported for GPUs that have them, soon after they occur and at low cost."""

from __future__ import annotations

import pynvml

from rankscope_exporter.gpu.collectors import ecc

PREFIX = "rankscope_gpu_"


def test_errors_are_counted_by_kind_and_location(watch):
    found = watch("{gpus: 1, timeline: {0: [{at: 0, ecc: {corrected_sram: 3, uncorrected_dram: 1}}]}}", ecc.COLLECTOR)
    errors = found.after(1)
    expected = {
        ("corrected", "dram"): 0,
        ("corrected", "sram"): 3,
        ("uncorrected", "dram"): 1,
        ("uncorrected", "sram"): 0,
    }
    assert errors[f"{PREFIX}ecc_errors_total"] == errors[f"{PREFIX}ecc_lifetime_errors_total"] == expected


def test_an_ampere_gpu_remaps_rows_and_retires_no_pages(watch):
    pending, failure = pynvml.NVML_FI_DEV_REMAPPED_PENDING, pynvml.NVML_FI_DEV_REMAPPED_FAILURE
    remapped = f"{pynvml.NVML_FI_DEV_REMAPPED_UNC}: 2, {pending}: 1, {failure}: 1"
    found = watch(
        f"{{gpus: 1, model: A100, timeline: {{0: [{{at: 0, fields: {{{remapped}}}}}]}}}}", ecc.COLLECTOR
    ).after(1)
    assert found[f"{PREFIX}remapped_rows_total"] == {"corrected": 0, "uncorrected": 2}
    assert found[f"{PREFIX}row_remapping_pending"] == found[f"{PREFIX}row_remapping_failed"] == {(): 1}
    assert found[f"{PREFIX}row_remapping_banks"] == {"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0}
    assert not [name for name in found if "page" in name]


def test_a_turing_gpu_retires_pages_and_remaps_no_rows(watch):
    retired = f"{pynvml.NVML_FI_DEV_RETIRED_DBE}: 4, {pynvml.NVML_FI_DEV_RETIRED_PENDING}: 1"
    found = watch(f"{{gpus: 1, model: T4, timeline: {{0: [{{at: 0, fields: {{{retired}}}}}]}}}}", ecc.COLLECTOR).after(
        1
    )
    assert found[f"{PREFIX}retired_pages_total"] == {"single_bit": 0, "double_bit": 4}
    assert found[f"{PREFIX}page_retirement_pending"] == {(): 1}
    assert not [name for name in found if "remap" in name]


def test_a_new_error_is_exported_within_the_interval_without_more_driver_calls(watch):
    gpu = watch("{gpus: 1, timeline: {0: [{at: 5, ecc: {uncorrected_dram: 1}}]}}", ecc.COLLECTOR)
    key = ("uncorrected", "dram")
    counts = [gpu.after(1)[f"{PREFIX}ecc_errors_total"][key] for _ in range(int(ecc.EVERY) + 1)]
    assert counts == [0] * int(ecc.EVERY) + [1]


def test_a_reopened_gpu_is_read_at_once(watch):
    gpu = watch("{gpus: 1, timeline: {0: [{at: 2, ecc: {uncorrected_dram: 1}}]}}", ecc.COLLECTOR)
    gpu.after(1)
    gpu.reopen()
    assert gpu.after(1)[f"{PREFIX}ecc_errors_total"]["uncorrected", "dram"] == 1
