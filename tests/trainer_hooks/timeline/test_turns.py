"""Choice of the optimizer that marks the steps, and the number of steps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rankscope.timeline.turns import FIRST_PATIENCE, LEAST_PATIENCE, Turns


class Optimizer:
    """A stand-in for an optimizer: only its identity matters."""


A, B, C, D = (Optimizer() for _ in range(4))

Event = tuple[Optimizer, int]  # an optimizer's step, and the number of backward passes before it


def after_each_pass(*optimizers: Optimizer) -> list[Event]:
    return [(optimizer, 1) for optimizer in optimizers]


def steps_of(events: Iterable[Event]) -> int:
    turns, passes, steps = Turns(on_change=lambda _: None), 0, 0
    for optimizer, passes_before in events:
        passes += passes_before
        steps += turns.count(optimizer, passes)
    return steps


@pytest.mark.parametrize("second", [LEAST_PATIENCE + 1, 50, 200])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_step_of_stages_with_their_own_optimizers_counts(second: int, accumulation: int) -> None:
    assert steps_of([(A, accumulation)] * 50 + [(B, accumulation)] * second) == 50 + second


def test_a_stage_after_a_single_step_counts_every_step_after_the_first_patience() -> None:
    assert steps_of(after_each_pass(A, *[B] * FIRST_PATIENCE)) == 1
    assert steps_of(after_each_pass(A, *[B] * (FIRST_PATIENCE + 1))) == 1 + FIRST_PATIENCE + 1


@pytest.mark.parametrize("length", [10, 40])
def test_every_step_of_models_that_alternate_counts(length: int) -> None:
    fold = [optimizer for optimizer in (A, B, C, D) for _ in range(length)]
    assert steps_of(after_each_pass(*fold * 3)) == 3 * 4 * length


def test_each_step_of_stages_with_two_optimizers_counts_once() -> None:
    both = [[(first, 1), (second, 0)] for first, second in [(A, B)] * 20 + [(C, D)] * 20]
    assert steps_of([event for step in both for event in step]) == 40


@pytest.mark.parametrize("critic_steps", [1, 3, 5, 10, 100])
def test_a_generator_and_its_critic_count_once_per_round(critic_steps: int) -> None:
    assert steps_of(after_each_pass(*[A, *[B] * critic_steps] * 6)) == 6


def test_a_critic_that_steps_first_counts_each_of_its_steps() -> None:
    assert steps_of(after_each_pass(*[B, B, B, A] * 6)) == 18


def test_an_actor_updated_at_every_second_step_of_its_critic_counts_no_step() -> None:
    assert steps_of(after_each_pass(*[A, A, B, C, B, C] * 20)) == 40


def test_a_longer_gap_increases_the_patience() -> None:
    rare = [A, A, *[B] * LEAST_PATIENCE, A, *[B] * (2 * LEAST_PATIENCE)]
    assert steps_of(after_each_pass(*rare, A)) == 4


def test_every_step_of_each_stage_counts_without_backward_passes() -> None:
    assert steps_of([(A, 0)] * 20 + [(B, 0)] * 20) == 40


def test_an_optimizer_that_no_longer_exists_is_not_waited_for() -> None:
    turns = Turns(on_change=lambda _: None)
    assert turns.count(Optimizer(), 1) == 1
    assert turns.count(A, 2) == 1


def test_the_optimizer_that_marks_the_steps_is_announced_when_it_changes() -> None:
    announced: list[Optimizer] = []
    turns = Turns(on_change=announced.append)
    for passes, optimizer in enumerate([*[A] * 3, *[B] * 20], start=1):
        turns.count(optimizer, passes)
    assert announced == [A, B]
