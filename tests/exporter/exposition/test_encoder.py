"""prometheus_client parses the rendered metrics correctly in both formats. Lines are rewritten only on changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rankscope_exporter.exposition.encoder import Encoder
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.gpu.collector import Gpu, GpuMetrics

PARSERS: dict[bool, Callable[[str], Iterable[Metric]]] = {False: parse_text, True: parse_openmetrics}
NUMBERS = [0, 1, True, -1.5, 0.1, 123456.0, 1234567.0, 8589934592, 1.7e9 + 0.25, 1e300, 2.5e-9, math.inf, -math.inf]
LABELS = ["", "plain", 'quo"ted', "back\\slash", "new\nline", "ümläut", "{}", 'all "\\\n', "last"]

GAUGE = Declaration("gauge", "rankscope_watts", 'Help with "quotes", a \\ and\na line.', ("uuid", "gpu"))
COUNTER = Declaration("counter", "rankscope_seconds_total", "A counter.", ("phase",))
ALONE = Declaration("gauge", "rankscope_alone", "No labels.")
EMPTY = Declaration("gauge", "rankscope_empty", "No samples.", ("gpu",))

Reading = Mapping[str, float]
TABLE = GpuMetrics[Reading]()
BY_LABEL = TABLE.gauge("by_label", "One per label.", lambda reading: reading, "label")
DOWN = TABLE.gauge("up", "Up.", lambda _: 1, without=0)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_number_and_label_is_parsed_back(openmetrics: bool) -> None:
    numbers = {(f"GPU-{index}", str(index)): number for index, number in enumerate(NUMBERS)}
    labels = dict(zip(LABELS, range(len(LABELS)), strict=True))
    body = Encoder(openmetrics=openmetrics).render(
        [GAUGE.family(numbers), COUNTER.family(labels), ALONE.family(7), EMPTY.family({})]
    )
    watts, seconds, alone, empty = PARSERS[openmetrics](body.decode())
    assert {(s.labels["uuid"], s.labels["gpu"]): s.value for s in watts.samples} == numbers
    assert {s.labels["phase"]: s.value for s in seconds.samples} == labels
    assert [(s.labels, s.value) for s in alone.samples] == [({}, 7)]
    assert (empty.name, empty.samples) == ("rankscope_empty", [])
    assert [family.type for family in (watts, seconds, alone)] == ["gauge", "counter", "gauge"]
    assert watts.documentation == GAUGE.help


def test_a_family_has_the_samples_of_its_lines() -> None:
    family = COUNTER.family({label: index for index, label in enumerate(LABELS)})
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("rankscope_seconds_total", {"phase": label}, index) for index, label in enumerate(LABELS)
    ]


def test_a_counter_with_a_foreign_name_keeps_it_and_is_valid_in_both_formats() -> None:
    family = Declaration("counter", "DCGM_FI_ENERGY", "Energy.", ("gpu",)).family({"0": 7})
    text, openmetrics = (Encoder(openmetrics=kind).render([family]).decode() for kind in (False, True))
    assert text == '# HELP DCGM_FI_ENERGY Energy.\n# TYPE DCGM_FI_ENERGY counter\nDCGM_FI_ENERGY{gpu="0"} 7.0\n'
    (parsed,) = parse_openmetrics(openmetrics)
    assert (parsed.name, parsed.type, parsed.samples[0].name) == ("DCGM_FI_ENERGY", "unknown", "DCGM_FI_ENERGY")


def test_values_with_too_few_labels_raise_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        GAUGE.family({"0": 1})


def test_lines_follow_their_values() -> None:
    cache = SampleCache((BY_LABEL, DOWN), Gpu(0, "GPU-0").values())

    def text(reading: Reading | None) -> str:
        return b"".join(cache.write(reading)).decode()

    one = 'rankscope_gpu_by_label{gpu="0",label="a",uuid="GPU-0"} 1.0\n'
    two = 'rankscope_gpu_by_label{gpu="0",label="b",uuid="GPU-0"} 2.0\n'
    up = 'rankscope_gpu_up{gpu="0",uuid="GPU-0"} %s.0\n'
    assert text({"a": 1}) == one + up % 1
    assert text({"a": 1, "b": 2}) == one + two + up % 1
    assert text({"b": 2}) == two + up % 1
    assert text(None) == up % 0
    assert text({"a": 1}) == one + up % 1


def test_unchanged_values_are_not_rewritten() -> None:
    cache = SampleCache((BY_LABEL,), Gpu(0, "GPU-0").values())
    (first,), (second,), (third,) = cache.write({"a": 1}), cache.write({"a": 1}), cache.write({"a": 2})
    assert first is second
    assert first != third


def test_the_lines_of_several_gpus_are_joined() -> None:
    written = [
        SampleCache((BY_LABEL, DOWN), Gpu(index, f"GPU-{index}").values()).write({"a": index}) for index in (0, 1)
    ]
    found = families((BY_LABEL, DOWN), written)
    assert [[(s.labels["gpu"], s.value) for s in family.samples] for family in found] == [
        [("0", 0), ("1", 1)],
        [("0", 1), ("1", 1)],
    ]


def test_without_a_gpu_every_family_is_empty() -> None:
    assert [(family.name, family.samples) for family in families((BY_LABEL, DOWN), [])] == [
        ("rankscope_gpu_by_label", []),
        ("rankscope_gpu_up", []),
    ]
