"""The ends of steps: counting them, and updating the histogram, the ring and the listeners."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf

from rankscope.record import layout
from rankscope.record.layout import FORWARD, INDEX, PASSES_WITHOUT_STEP, RING_STEPS, STEP_BOUNDS
from rankscope.timeline.batches import COPIES, FORWARD_COPY, Batch, Batches
from rankscope.timeline.groups import Groups
from rankscope.timeline.phases import PhaseClock
from rankscope.timeline.turns import Turns

NOTHING, BACKWARD_PASS, OPTIMIZER_STEP, SCRIPT = range(len(layout.STEP_MARKERS))

SETTLED_STEPS = 20  # polls run after each of these first steps, later at most once a second
POLL_INTERVAL = 1.0  # seconds
CHECK_INTERVAL = 10  # backward passes between two checks whether a long accumulation still is one

STEPS = INDEX["steps"]
MICRO_STEPS = INDEX["micro_steps"]
SAMPLES = INDEX["samples"]
TOKENS = INDEX["tokens"]
AMP_SCALE = INDEX["amp_scale"]
STEP_SECONDS = INDEX["step_seconds"]
STEP_BUCKETS = INDEX["step_buckets"]


class Steps:
    """The steps of one timeline's thread, and what marks their ends."""

    def __init__(self, phases: PhaseClock, groups: Groups) -> None:
        self._phases = phases
        self._groups = groups
        self.marker = NOTHING  # index in layout.STEP_MARKERS
        self.on_end: Callable[[float, int], object] | None = None  # called with the step's end and the open phase
        self.polls: list[Callable[[], object]] = []  # called at a step's end, at most once a second: costly work
        self.batches = Batches(phases)
        phases.on_adopt = self.batches.adopt
        self.turns = Turns()
        self._wake_number: float = inf
        self._on_wake: Callable[[int], int | None] = lambda _: None
        self.restart()

    def restart(self) -> None:
        """Start over in the calling process. Its first step ends startup."""
        self.has_started = False
        self._last_end = self._next_poll = 0.0
        self._bucket = (inf, inf, STEP_BUCKETS)  # of the last step: bounds (none yet) and slot
        self.batches.restart()
        self.turns.restart()
        self.check_after: float = PASSES_WITHOUT_STEP  # passes after which `check_pass` is to be called
        # The script's samples and tokens of the step that ends next.
        self.script_counts: tuple[float | None, float | None] | None = None
        # Of some used batch, so the sum means nothing.
        self.samples_are_unknown = self.tokens_are_unknown = False
        self.shares_batches = False  # with another rank, which counts them

    def add_poll(self, poll: Callable[[], object]) -> Callable[[], None]:
        """Call `poll` at each poll from now on. Returns a function that ends that."""
        self.polls.append(poll)
        return lambda: self.polls.remove(poll)

    @property
    def count(self) -> int:
        """The number of ended steps, including the one that ended startup."""
        return int(self._phases.slots[STEPS])

    @property
    def micro_steps(self) -> int:
        """The number of ended outermost backward passes."""
        return int(self._phases.slots[MICRO_STEPS])

    def end(self, number: int = 1) -> None:
        """End a step at the last event of the training thread.

        If the `number` is larger than 1, earlier steps were not known to be steps. In the histogram they have the same
        length; in the ring they have no entries.
        """
        phases = self._phases
        now = phases.last_event
        slots = phases.slots
        elapsed = now - self._last_end
        seconds = elapsed / number
        lowest, highest, bucket = self._bucket  # nearly always the same as the last step's
        if lowest < seconds <= highest:
            slots[STEP_SECONDS] += elapsed
            slots[bucket] += number
        elif self.has_started:
            slots[STEP_SECONDS] += elapsed
            slots[self._find_bucket(seconds)] += number
        else:
            phases.end_startup()
            self.has_started = True
        batches = self.batches
        if batches.samples:  # nearly always
            slots[SAMPLES] += batches.samples
            batches.samples = 0
            batches.passes = slots[MICRO_STEPS]
            batches.gradients = 0
        elif batches.sources or self.script_counts:
            self._count_samples()
        count = slots[STEPS] + number
        entry = phases.ring[int(count) % RING_STEPS]
        entry[0] = count
        entry[1] = now
        entry[COPIES] = phases.copied
        slots[STEPS] = count  # last: from now on the entry counts
        self._last_end = now
        if self._groups.unread:
            self._groups.read_numbers()
        if self.on_end is not None:
            self.on_end(now, phases.charged_phase())
        if count >= self._wake_number:
            self._wake_number = self._on_wake(int(count)) or inf
        if now >= self._next_poll:
            self._poll(now)

    @property
    def is_between(self) -> bool:
        """True if a step has ended and its thread has not started a forward pass since."""
        phases = self._phases
        forward_then = phases.ring[self.count % RING_STEPS][FORWARD_COPY]
        is_idle = phases.open_phases[1] is None and phases.seconds[FORWARD] == forward_then
        return self.has_started and is_idle

    def share_batches(self) -> None:
        """Stop counting samples and tokens: another rank trains on the same batches."""
        self.shares_batches = True
        self.batches.end_usual()
        self._phases.slots[SAMPLES] = self._phases.slots[TOKENS] = 0.0

    def _count_samples(self) -> None:
        """Count the batches of the step that ends now, or the numbers that the script gave."""
        batches = self.batches.take()
        if self.script_counts is not None:
            batches = self._replace_counts(batches, *self.script_counts)
        if self.shares_batches:
            return
        self._add(batches)
        if not self.samples_are_unknown:
            self.batches.expect_usual()

    def _add(self, batches: list[Batch]) -> None:
        slots = self._phases.slots
        for samples, tokens in batches:
            slots[SAMPLES] += samples or 0.0
            slots[TOKENS] += tokens or 0.0
            self.samples_are_unknown = self.samples_are_unknown or samples is None
            self.tokens_are_unknown = self.tokens_are_unknown or tokens is None
        if self.samples_are_unknown:
            slots[SAMPLES] = 0.0
        if self.tokens_are_unknown:
            slots[TOKENS] = 0.0

    def set_counts(self, samples: float | None, tokens: float | None) -> None:
        """Keep the script's numbers for the step that ends next."""
        self.script_counts = samples, tokens
        self.batches.end_usual()

    def _replace_counts(self, batches: list[Batch], samples: float | None, tokens: float | None) -> list[Batch]:
        """Return the batches, with their numbers replaced by those that the script gave."""
        self.script_counts = None
        keeps_samples, keeps_tokens = samples is None, tokens is None
        others = [
            Batch(batch.samples if keeps_samples else 0.0, batch.tokens if keeps_tokens else 0.0) for batch in batches
        ]
        return [*others, Batch(samples or 0.0, tokens or 0.0)]

    def check_pass(self, in_evaluation_mode: bool) -> None:
        """Handle the end of a backward pass, if there have been more than `check_after` in all.

        After many of these passes without a step each counts as a step, including the earlier ones: an optimizer may be
        compiled after its first steps. Not passes of an evaluation (of attacks, of explanations), nor those of a job
        with a gradient scaler, which may skip any number of steps.
        """
        if self.marker == SCRIPT:
            self.check_after = inf
            return
        passes = self.turns.passes_without_step(self.micro_steps)
        if self.marker == OPTIMIZER_STEP and (in_evaluation_mode or self._phases.slots[AMP_SCALE]):
            self.turns.ignore_passes(self.micro_steps)
            passes = 0
        if self.marker != BACKWARD_PASS and self.turns.may_still_step(passes):
            left = PASSES_WITHOUT_STEP - passes
            self.check_after = self.micro_steps + (left if left >= 0 else CHECK_INTERVAL)
            return
        number = 1 if self.marker == BACKWARD_PASS else int(passes)
        self.marker, self.check_after = BACKWARD_PASS, 0.0
        self.end(number)

    def take_over(self, marker: int) -> bool:
        """Let `marker` mark the steps from now on. Returns False if a backward pass has already counted this step."""
        before, self.marker = self.marker, marker
        return before != BACKWARD_PASS

    def wake_at(self, number: int, on_wake: Callable[[int], int | None]) -> None:
        """Call `on_wake` with the number of a step when it has ended. It returns the number for the next call."""
        self._wake_number, self._on_wake = number, on_wake

    def _find_bucket(self, seconds: float) -> int:
        number = bisect_left(STEP_BOUNDS, seconds)
        lowest, highest = (0.0, *STEP_BOUNDS, inf)[number : number + 2]
        self._bucket = lowest, highest, STEP_BUCKETS + number
        return STEP_BUCKETS + number

    def _poll(self, now: float) -> None:
        if self.count >= SETTLED_STEPS:
            self._next_poll = now + POLL_INTERVAL
        for poll in self.polls:
            poll()
