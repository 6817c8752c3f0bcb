"""Invalid arguments of `step` and `phase` are omitted from the record and logged."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from testing.own_record import snapshot
from torch.amp.grad_scaler import GradScaler

import rankscope
from rankscope.attach import Attachment
from rankscope.record import layout
from rankscope.record.labels import MOST_LABELS, VALUE_LIMIT
from rankscope.record.text import LABEL_LIMIT
from rankscope_exporter.ranks.checks import check_info

pytestmark = pytest.mark.usefixtures("trained")

NAN, INFINITY = float("nan"), float("inf")


class Broken:
    """A type of the script that is neither a number nor text."""

    def __float__(self) -> float:
        raise ZeroDivisionError

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.fixture
def trained(attached: Attachment) -> None:
    """Instrument this process and make two steps."""
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    rankscope.step()


@pytest.mark.parametrize(
    "number",
    [
        *(8, 8.0, "8", 0.5, 0, -0.0, True, 2**53, 10**30, Decimal("8.5"), Fraction(1, 3)),
        *(numpy.int64(8), numpy.float32(8), numpy.array([8]).sum(), torch.tensor(8), torch.tensor([8.0])),
    ],
)
def test_a_finite_number_of_any_type_is_counted(number: Any, caplog: pytest.LogCaptureFixture) -> None:
    rankscope.step(samples=number, tokens=number)
    rank = snapshot()
    assert (rank["samples"], rank["tokens"]) == (float(number), float(number))
    assert not caplog.records


@pytest.mark.parametrize(
    "number",
    [
        *(NAN, INFINITY, -INFINITY, -1, 1e300, 10**400, "many", "", b"x", [8], {}, 1j, object(), Broken()),
        *(Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal("1e400")),
        *(numpy.float64("nan"), numpy.array([1, 2]), torch.tensor(NAN), torch.ones(2), torch.empty(1, device="meta")),
    ],
)
def test_any_other_value_is_dropped_and_logged_once(number: Any, caplog: pytest.LogCaptureFixture) -> None:
    for tokens in (100, number, number, 100):
        rankscope.step(samples=8, tokens=tokens)
    rank = snapshot()
    assert (rank["steps"], rank["samples"], rank["tokens"]) == (6, 32, 200)
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == ["rankscope: tokens"]


def test_the_largest_numbers_of_many_steps_are_still_read() -> None:
    for _ in range(1000):
        rankscope.step(samples=2.0**128, tokens=2.0**128)
    assert snapshot()["steps"] == 1002


def step_with_scale(scale: float) -> None:
    parameter = torch.ones(2, requires_grad=True)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.1))
    scaler.update()


@pytest.mark.parametrize(("scale", "shown"), [(NAN, 0), (INFINITY, 0), (-2, 0), (2.0**127, 2.0**127), (0.0, 0)])
def test_an_invalid_loss_scale_is_absent(scale: float, shown: float) -> None:
    step_with_scale(scale)
    assert snapshot()["amp_scale"] == shown


@pytest.mark.parametrize(
    "name", ["x", "x" * LABEL_LIMIT, "数据预处理", "de-tokenize / π", ' a "quoted\\" name ', "🚂" * 200, 3, None]
)
def test_a_printable_name_is_a_phase(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    with rankscope.phase(name):
        pass
    assert str(name) in snapshot().phase_seconds
    check_info(snapshot())
    assert not caplog.records


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "\t\n",
        "\u3000",
        "x" * 201,
        "x" * 10_000,
        "a\nb",
        "\x00",
        "\ud800",
        "\u202e",
        Broken(),
        pytest.param(10**5000, id="long"),
    ],
)
def test_the_time_of_a_refused_name_is_other_and_logged_once(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = snapshot()
    for _ in range(2):
        with rankscope.phase(name):
            assert snapshot().phase == "other"
    with rankscope.phase("tokenize"):
        rankscope.step()
    after = snapshot()
    assert [*before.phase_seconds, "tokenize"] == list(after.phase_seconds)
    assert after["steps"] == before["steps"] + 1
    assert after.info["probes_disabled"] == []
    assert caplog.text.count("cannot record phase") == 1


@pytest.mark.parametrize("character", ["文", "🚂", '"', "x"])
def test_long_names_that_do_not_fit_together_are_other_and_the_rank_is_still_recorded(
    character: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(18):
        with rankscope.phase(f"{number}{character * 190}"):
            rankscope.step()
    rank = snapshot()
    check_info(rank)
    assert rank["steps"] == 20
    assert "0" + character * 190 in rank.phase_seconds
    assert len(rank.phase_seconds) < len(layout.PHASES) + 18
    assert caplog.text.count("cannot record phase") == 1


def test_the_longest_names_leave_space_for_all_groups(attached: Attachment) -> None:
    with rankscope.phase("🚂" * 200):
        pass
    attached.timeline.groups.names += ["9" * 137] * layout.MAX_GROUPS
    attached._settings.known = dict.fromkeys(layout.SETTINGS, "文" * 80)
    attached.publication._labels = {f"name_{number}": "🚂" * VALUE_LIMIT for number in range(MOST_LABELS)}
    attached.publication.refresh()
    assert len(snapshot().groups) == layout.MAX_GROUPS


def test_the_scripts_phase_checkpoint_counts_as_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    with rankscope.phase("checkpoint"):
        pass
    assert snapshot()["checkpoints"] == 1
