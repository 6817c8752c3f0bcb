"""What is rendered is what prometheus_client renders, byte for byte, in both notations and whatever was before."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
from prometheus_client import core
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rankscope_exporter import families
from rankscope_exporter.exposition import Collected, Exposition

REFERENCES = {False: generate_latest, True: generate_openmetrics}
VALUES = [0, 1, True, -1.5, 0.1, 123456.0, 1234567.0, 8589934592, 1.7e9 + 0.25, 1e300, 2.5e-9, math.inf, -math.inf]
LABELS = ["", "plain", 'quo"ted', "back\\slash", "new\nline", "ümläut", "{}", 'all "\\\n']


def everything(shift: float, kinds: ModuleType = families) -> list[Metric]:
    """Families of every kind that we publish, from our module or from prometheus_client's."""
    gauge = kinds.GaugeMetricFamily("rankscope_gauge", 'Help with "quotes", a \\ and\na line.', labels=["uuid", "gpu"])
    for number, value in enumerate(VALUES):
        gauge.add_metric([f"GPU-{number}", str(number)], value + shift)
    counter = kinds.CounterMetricFamily("rankscope_seconds", "A counter.", labels=["phase"])
    for label in LABELS:
        counter.add_metric([label], shift)
    histogram = kinds.HistogramMetricFamily("rankscope_step_seconds", "A histogram.", labels=["rank"])
    for rank in "01":
        histogram.add_metric([rank], [("0.5", 1 + shift), ("+Inf", 2 + shift)], 3.25)
    return [
        gauge,
        counter,
        kinds.CounterMetricFamily("rankscope_suffixed_total", "Its name has the suffix already.", labels=["gpu"]),
        histogram,
        core.InfoMetricFamily("rankscope_build", "An info, which only prometheus_client has.", {"version": "1"}),
        kinds.GaugeMetricFamily("rankscope_alone", "No labels.", shift),
        kinds.GaugeMetricFamily("rankscope_empty", "No samples.", labels=["gpu"]),
        core.GaugeMetricFamily("rankscope_power_watts", "Has a unit.", 1, unit="watts"),
    ]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_byte_is_prometheus_clients_at_every_scrape(openmetrics: bool) -> None:
    exposition = Exposition(openmetrics=openmetrics)
    for shift in (0, 0, 1, 2.5, 2.5, 0):
        expected = REFERENCES[openmetrics](Collected(everything(shift, core)))
        assert exposition.render(everything(shift)).decode() == expected.decode()


def test_a_family_has_the_samples_of_prometheus_clients() -> None:
    for ours, theirs in zip(everything(1), everything(1, core), strict=True):
        assert (ours.name, ours.type, ours.documentation) == (theirs.name, theirs.type, theirs.documentation)
        assert ours.samples == theirs.samples


def test_prometheus_client_can_render_our_families() -> None:
    assert generate_latest(Collected(everything(1))) == generate_latest(Collected(everything(1, core)))


def test_a_counter_under_somebody_elses_name_keeps_it_and_is_legal_in_both_notations() -> None:
    family = families.BareCounterMetricFamily("DCGM_FI_ENERGY", "Energy.", labels=["gpu"])
    family.add_metric(["0"], 7)
    text, openmetrics = (Exposition(openmetrics=kind).render([family]).decode() for kind in (False, True))
    assert text == '# HELP DCGM_FI_ENERGY Energy.\n# TYPE DCGM_FI_ENERGY counter\nDCGM_FI_ENERGY{gpu="0"} 7.0\n'
    (parsed,) = text_string_to_metric_families(openmetrics)
    assert (parsed.name, parsed.type, parsed.samples[0].name) == ("DCGM_FI_ENERGY", "unknown", "DCGM_FI_ENERGY")


def test_a_row_with_too_few_labels_is_a_mistake_that_shows() -> None:
    family = families.GaugeMetricFamily("rankscope_gauge", "A gauge.", labels=["gpu", "uuid"])
    family.add_metric(["0"], 1)
    with pytest.raises(ValueError, match="shorter"):
        Exposition(openmetrics=False).render([family])


def test_a_value_that_becomes_unknown_and_known_again_is_rendered_so() -> None:
    exposition = Exposition(openmetrics=False)

    def render(value: float) -> str:
        family = families.GaugeMetricFamily("rankscope_g", "G.", value)
        return exposition.render([family]).decode().splitlines()[-1]

    values = (1.0, math.nan, math.nan, 1.0)
    assert [render(value) for value in values] == [f"rankscope_g {text}" for text in ("1.0", "NaN", "NaN", "1.0")]


def test_a_series_that_is_gone_is_not_remembered() -> None:
    exposition = Exposition(openmetrics=False)
    exposition.render(everything(0))
    exposition.render([])
    assert exposition._lines == {}
