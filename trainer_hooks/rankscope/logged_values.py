"""Loss and gradient norm in what the job logs: how many values in a row were NaN or infinite, and since which step.

They are seen where a logger gets them: Hugging Face's Trainer, Lightning's loggers, W&B, MLflow, TensorBoard, and
`rankscope.log`. Only numbers of the host count. A tensor is never read, because that could wait for the device.
Nothing is imported: a logger that is not in `sys.modules` is not in use. This looks for new ones every ten seconds.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

from rankscope.guard import Guard
from rankscope.patch import Patches
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

INTERVAL = 10.0  # seconds
NAMES_LIMIT = 1024  # names of values that are looked at: some jobs log one for each layer

STEPS, MICRO_STEPS = INDEX["steps"], INDEX["micro_steps"]
VALUES, NOT_FINITE, SINCE = INDEX["logged_values"], INDEX["not_finite_values"], INDEX["not_finite_since_step"]
LOSS, GRADIENT_NORM = range(len(layout.LOGGED))

# A loss or gradient norm of the whole model: other words in its name mean a part of it (a task, a layer), which may be
# NaN where it does not occur, or another quantity (a loss scale, the loss of the validation data).
LOSS_WORDS = frozenset({"loss", "trainloss", "totalloss", "lmloss"})
NORM_WORDS = (
    {"grad", "grads", "gradient", "gradients", "gradnorm", "gradientnorm"},
    {"norm", "gradnorm", "gradientnorm"},
)
OTHER_WORDS = frozenset(
    {
        "train",
        "training",
        "step",
        "epoch",
        "iter",
        "batch",
        "total",
        "global",
        "overall",
        "avg",
        "average",
        "mean",
        "max",
    }
    | {"lm", "ce", "nll", "model", "optim", "optimizer", "metrics", "losses", "l2", "2", "0"}
)
WORDS = re.compile(r"[a-z0-9]+")

Values = Iterable[tuple[Any, Any]]
"""The names and values of one call of a logger."""
Take = Callable[[tuple[Any, ...], dict[str, Any]], Values]
"""A function that returns them from the arguments of the call, without the object."""


def _mapping(parameter: str) -> Take:
    """Return a function for calls with a mapping as the first argument or by this name."""

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        values = args[0] if args else kwargs.get(parameter)
        return values.items() if isinstance(values, Mapping) else ()

    return take


def _pair(at: int, name: str, value: str) -> Take:
    """Return a function for calls with a name, as the argument `at`, and a value after it."""

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        return [
            (
                args[at] if len(args) > at else kwargs.get(name),
                args[at + 1] if len(args) > at + 1 else kwargs.get(value),
            )
        ]

    return take


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """Return the metrics of `MlflowClient.log_batch`."""
    metrics = args[1] if len(args) > 1 else kwargs.get("metrics")
    return [(one.key, one.value) for one in metrics or ()]


def _summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """Return the numbers that a SummaryWriter writes, which it has read from tensors already."""
    values = getattr(args[0] if args else kwargs.get("summary"), "value", ())
    found = [(one.tag, one.simple_value) for one in values if one.WhichOneof("value") == "simple_value"]
    tensors = [(one.tag, one.tensor.float_val) for one in values if one.WhichOneof("value") == "tensor"]
    return [*found, *((tag, numbers[0]) for tag, numbers in tensors if len(numbers) == 1)]  # with new_style=True


class Source(NamedTuple):
    """A method that gets the values. All classes derived from an abstract `owner` are watched."""

    module: str
    owner: str
    method: str
    take: Take
    is_abstract: bool = False


SOURCES = (
    Source("transformers.trainer", "Trainer", "log", _mapping("logs")),
    Source("lightning.fabric.loggers.logger", "Logger", "log_metrics", _mapping("metrics"), is_abstract=True),
    Source("lightning_fabric.loggers.logger", "Logger", "log_metrics", _mapping("metrics"), is_abstract=True),
    # `wandb.log` is a bound method of the time before the hook looked; it calls `_log`.
    Source("wandb.sdk.wandb_run", "Run", "_log", _mapping("data")),
    Source("mlflow.tracking.client", "MlflowClient", "log_metric", _pair(1, "key", "value")),
    Source("mlflow.tracking.client", "MlflowClient", "log_batch", _batch),
    Source("torch.utils.tensorboard.writer", "FileWriter", "add_summary", _summary),
    Source("tensorboardX.writer", "FileWriter", "add_summary", _summary),
)


class LoggedValues:
    """Watches the loggers and counts what they get. Several values of one step count once, as finite if one is."""

    def __init__(self, timeline: Timeline, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self._guard = guard
        self._clock = clock
        self._quantities: dict[str, int | None] = {}  # by name: an index in layout.LOGGED
        self._patches = Patches()
        self.note, self.remove = guard(self._note), self._patches.undo
        self.restart()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty stand-in, as `Guard.__reduce__` does: a script may derive a logger from Lightning's."""
        return SimpleNamespace, ()

    def restart(self) -> None:
        """Start over in the calling process."""
        self._counted: list[tuple[float, float] | None] = [None] * len(layout.LOGGED)  # in which step, by quantity
        self._next = 0.0

    def poll(self) -> None:
        """Look for loggers if that is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL
        for source in SOURCES:
            module = sys.modules.get(source.module)
            for owner in _owners(vars(module).get(source.owner), source) if module else ():
                self._patches.add(owner, source.method, self._watch(source.take))

    def _watch(self, take: Take) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        note_call, guard = self._guard(lambda args, kwargs: self._note(take(args, kwargs))), self._guard

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def watched(instance: Any, *args: Any, **kwargs: Any) -> Any:
                if not guard.disabled:
                    note_call(args, kwargs)
                return original(instance, *args, **kwargs)

            return watched

        return make

    def _note(self, values: Values) -> None:
        """Count the values that are a loss or a gradient norm."""
        for name, value in islice(values, NAMES_LIMIT):
            quantity = self._quantity(name)
            if quantity is not None and isinstance(value, Real):
                self._count(quantity, is_finite=math.isfinite(value))

    def _quantity(self, name: Any) -> int | None:
        if type(name) is not str:
            return None
        if name not in self._quantities:
            if len(self._quantities) == NAMES_LIMIT:
                return None
            self._quantities[name] = quantity_of(name)
        return self._quantities[name]

    def _count(self, quantity: int, *, is_finite: bool) -> None:
        slots = self._timeline.slots
        step = slots[STEPS], slots[MICRO_STEPS]
        is_new, self._counted[quantity] = step != self._counted[quantity], step
        slots[VALUES + quantity] += is_new
        if is_finite:
            slots[NOT_FINITE + quantity] = 0.0
        elif is_new:
            if not slots[NOT_FINITE + quantity]:
                slots[SINCE + quantity] = step[0]
            slots[NOT_FINITE + quantity] += 1.0


def quantity_of(name: str) -> int | None:
    """Return what a logged value is by its name, as an index in layout.LOGGED; None if it is neither."""
    words = frozenset(WORDS.findall(name.lower()))
    if words & LOSS_WORDS and words <= LOSS_WORDS | OTHER_WORDS:
        return LOSS
    gradient, norm = NORM_WORDS
    if words & gradient and words & norm and words <= gradient | norm | OTHER_WORDS:
        return GRADIENT_NORM
    return None


def _owners(owner: Any, source: Source) -> Iterator[type]:
    """Yield the classes whose own method a source watches."""
    waiting = [owner] if isinstance(owner, type) else []
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__() if source.is_abstract else ()
        if source.method in vars(one) and not (source.is_abstract and one is owner):
            yield one
