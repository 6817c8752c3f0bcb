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
    turns, passes, steps = Turns(), 0, 0
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


@pytest.mark.parametrize("length", range(2, LEAST_PATIENCE + 1))
def test_stages_of_few_steps_lose_at_most_the_last_patience(length: int) -> None:
    stages = [optimizer for optimizer in [Optimizer() for _ in range(60)] for _ in range(length)]
    first = [A] * 2  # so that the gap is known
    assert 60 * length + 2 - LEAST_PATIENCE <= steps_of(after_each_pass(*first, *stages)) <= 60 * length + 2


def test_short_stages_with_two_optimizers_count_each_step_once() -> None:
    stages = [(Optimizer(), Optimizer()) for _ in range(40)]
    both = [
        (optimizer, passes) for pair in stages for _ in range(5) for optimizer, passes in zip(pair, (1, 0), strict=True)
    ]
    assert 200 - LEAST_PATIENCE <= steps_of(both) <= 200


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


def test_a_loop_that_accumulates_over_many_passes_has_a_known_gap_from_its_first_step() -> None:
    turns = Turns()
    assert turns.count(A, 500) == 1
    assert turns.passes_without_step(900) == 400
    assert turns.may_still_step(400)
    assert not turns.may_still_step(1001)


def test_an_optimizer_that_no_longer_exists_is_not_waited_for() -> None:
    turns = Turns()
    assert turns.count(Optimizer(), 1) == 1
    assert turns.count(A, 2) == 1


def test_the_optimizer_that_marks_the_steps_is_announced_when_it_changes() -> None:
    announced: list[Optimizer] = []
    turns = Turns()
    turns.on_change = announced.append
    for passes, optimizer in enumerate([*[A] * 3, *[B] * 20], start=1):
        turns.count(optimizer, passes)
    assert announced == [A, B]
