"""Modes of a GPU as text, and the instances of a split GPU."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.collectors import load, mig, modes

PREFIX = "rankscope_gpu_"
SPLIT = "{gpus: 1, model: {like: A100, mig: [3g.20gb, 1g.5gb]}}"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("H100", ("enabled", "default", "none", "disabled", "enabled")),
        ("{like: A100, mig: [3g.20gb]}", ("enabled", "default", "none", "enabled", "enabled")),
        ("T4", ("enabled", "default", "none", "", "enabled")),
    ],
)
def test_modes_are_words_or_empty_if_there_is_no_such_mode(watch, model, words):
    assert watch(f"{{gpus: 1, model: {model}}}", modes.COLLECTOR).after(1)[f"{PREFIX}modes_info"] == {words: 1}


@pytest.mark.parametrize(("value", "word"), [(0, "none"), (1, "gpu_reset"), (7, "system_reboot"), (99, "99")])
def test_the_recovery_action_is_a_word_or_an_unknown_number(watch, value, word):
    field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    found = watch(f"{{gpus: 1, timeline: {{0: [{{at: 0, fields: {{{field}: {value}}}}}]}}}}", modes.COLLECTOR).after(1)
    assert found[f"{PREFIX}recovery_action_info"] == {word: 1}


def test_the_fabric_is_exported_if_there_is_one(watch):
    found = watch("gpus: 1", modes.COLLECTOR).after(1)
    assert found[f"{PREFIX}fabric_info"] == {("completed", "success", "00000000-0000-0000-0000-000000000000", "0"): 1}
    assert f"{PREFIX}fabric_info" not in watch("{gpus: 1, model: A100}", modes.COLLECTOR).after(1)


@pytest.mark.parametrize("model", ["H100", "T4"])
def test_a_gpu_that_is_not_split_has_no_instances(watch, model):
    assert watch(f"{{gpus: 1, model: {model}}}", mig.COLLECTOR).after(1) == {}


def test_a_split_gpu_reports_no_utilization(watch):
    assert watch(SPLIT, load.COLLECTOR).after(1) == {}
