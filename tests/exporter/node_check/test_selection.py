"""Selection of the GPUs that are checked: asked for, the job's, or all."""

from __future__ import annotations

import pytest

from rankscope_exporter.node_check.readings import Facts
from rankscope_exporter.node_check.selection import SelectionError, select, wanted

GPUS = [Facts(index, f"GPU-{index}000") for index in range(4)]
SPLIT = [Facts(0, "GPU-0000", is_mig=True), *GPUS[1:]]
PROLOG = {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd", "SLURM_JOB_ID": "7"}


def selected(option: str | None = None, gpus: list[Facts] = GPUS, **environ: str) -> tuple[list[int], list[str]]:
    found, missing = select(wanted(option, environ)[1], gpus)
    return [facts.index for facts in found], missing


def test_all_gpus_are_checked_without_a_job() -> None:
    assert selected() == selected("all", CUDA_VISIBLE_DEVICES="1") == ([0, 1, 2, 3], [])


def test_indices_and_uuids_select_and_missing_ones_are_named() -> None:
    assert selected("2, 0") == ([0, 2], [])
    assert selected("GPU-3") == ([3], [])
    assert selected("1,7") == ([1], ["7"])


def test_a_range_selects_all_its_indices() -> None:
    assert selected("0-2") == ([0, 1, 2], [])
    assert selected(**PROLOG, SLURM_JOB_GPUS="0-1,3") == ([0, 1, 3], [])
    for invalid in ("3-0", "0-", "-1", "0-9999", "0-1-2"):
        with pytest.raises(SelectionError, match="no index"):
            wanted(invalid, {})


def test_the_option_has_priority_over_the_job() -> None:
    assert selected("2", CUDA_VISIBLE_DEVICES="0") == ([2], [])


@pytest.mark.parametrize(
    ("visible", "indices"), [("1,3", [1, 3]), ("GPU-2", [2]), ("", []), ("-1", []), ("NoDevFiles", []), ("1,-1,2", [1])]
)
def test_the_job_s_devices_are_those_that_cuda_shows(visible: str, indices: list[int]) -> None:
    assert selected(CUDA_VISIBLE_DEVICES=visible)[0] == indices


def test_a_prolog_uses_the_node_s_numbers_and_checks_no_gpu_without_any() -> None:
    assert selected(**PROLOG, SLURM_JOB_GPUS="2,3", CUDA_VISIBLE_DEVICES="0,1") == ([2, 3], [])
    assert selected(**PROLOG, SLURM_JOB_GPUS="2,3") == ([2, 3], [])
    assert selected(**PROLOG, SLURM_JOB_GPUS="0", CUDA_VISIBLE_DEVICES="GPU-3") == ([3], [])
    assert selected(**PROLOG) == ([], [])


def test_in_a_job_its_own_numbers_count() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert selected(**job) == selected(**job, SLURM_SCRIPT_CONTEXT="prolog_task") == ([0, 1], [])


def test_a_mig_device_selects_its_gpu() -> None:
    assert selected(gpus=SPLIT, CUDA_VISIBLE_DEVICES="MIG-GPU-0000/3/0") == ([0], [])
    assert selected(gpus=SPLIT, CUDA_VISIBLE_DEVICES="MIG-1234") == ([0], [])


def test_a_name_that_is_none_is_an_error() -> None:
    with pytest.raises(SelectionError, match=r"--gpus: 'first' is no index or UUID"):
        wanted("first", {})
