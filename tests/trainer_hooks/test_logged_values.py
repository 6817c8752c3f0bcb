"""The loss and the gradient norm in what a job logs."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testing.clock import Clock
from testing.own_record import fail, value

import rankscope
from rankscope.attach import Attachment
from rankscope.guard import Guard
from rankscope.logged_values import INTERVAL, NAMES_LIMIT, LoggedValues, quantity_of
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

Load = Callable[..., object]
NAN, INF = math.nan, math.inf


class Fixture:
    """A timeline, and the loggers of a process whose modules a test loads."""

    def __init__(self) -> None:
        self.timeline, self.clock = Timeline(RankWriter()), Clock(100.0)
        self.logged = LoggedValues(self.timeline, Guard("logged_values", fail), self.clock)

    def look(self) -> None:
        self.clock.advance(INTERVAL)
        self.logged.poll()

    def step(self, **values: Any) -> None:
        self.timeline.step()
        self.logged.note(values.items())

    def counts(self, quantity: str = "loss") -> tuple[float, float, float]:
        """Return the values, the last ones that are not finite, and the step of the first of these."""
        fields = ("logged_values", "not_finite_values", "not_finite_since_step")
        at = layout.LOGGED.index(quantity)
        values, last, since = (self.timeline.slots[INDEX[field] + at] for field in fields)
        return values, last, since


@pytest.fixture
def job() -> Iterator[Fixture]:
    fixture = Fixture()
    yield fixture
    fixture.logged.remove()


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("loss", "loss"),
        ("train/loss", "loss"),
        ("Loss/train", "loss"),
        ("train_loss_step", "loss"),
        ("lm loss", "loss"),
        ("loss_metrics/global_avg_loss", "loss"),
        ("grad_norm", "gradient_norm"),
        ("train/grad_norm", "gradient_norm"),
        ("grad-norm", "gradient_norm"),
        ("grad_2.0_norm_total", "gradient_norm"),
        ("eval_loss", None),
        ("val/loss", None),
        ("loss_scale", None),
        ("loss/task_3", None),
        ("grad_2.0_norm/layer.weight", None),
        ("weight_norm", None),
        ("accuracy", None),
        ("", None),
    ],
)
def test_a_value_is_known_by_its_name(name: str, quantity: str | None) -> None:
    """The loss of a part, or of validation data, may be NaN where there is nothing to compute it from."""
    assert quantity_of(name) == (layout.LOGGED.index(quantity) if quantity else None)


def test_the_last_values_that_are_not_finite_are_counted_with_the_step_of_the_first(job: Fixture) -> None:
    for loss in (2.5, NAN, 2.4, NAN, INF, -INF):
        job.step(loss=loss)
    assert job.counts() == (6, 3, 4)
    assert job.counts("gradient_norm") == (0, 0, 0)
    job.step(grad_norm=INF)
    job.step(loss=2.0)
    assert job.counts()[:2] == (7, 0)
    assert job.counts("gradient_norm") == (1, 1, 7)


def test_the_values_of_one_step_are_one_value_which_is_finite_if_one_is(job: Fixture) -> None:
    """A trainer logs, and its logger does. A mean over steps stays NaN after a single one."""
    job.step(loss=NAN)
    job.logged.note([("train/loss", NAN), ("loss", NAN)])
    assert job.counts() == (1, 1, 1)
    job.logged.note([("train/loss", 2.5)])
    assert job.counts()[:2] == (1, 0)
    job.step(loss_avg=NAN, loss=2.5)
    job.logged.note([("loss_avg", NAN)])
    assert job.counts()[:2] == (2, 0)


def test_a_tensor_is_not_read_and_other_values_are_ignored(job: Fixture) -> None:
    class Tensor(torch.Tensor):
        def item(self) -> float:  # type: ignore[override]
            raise AssertionError

    job.step(loss=Tensor([NAN]))
    job.step(loss="nan")
    job.step(loss=None)
    job.logged.note([(3, NAN), (None, NAN)])
    assert job.counts() == (0, 0, 0)


def test_only_so_many_names_are_looked_at(job: Fixture) -> None:
    job.timeline.step()
    job.logged.note([(f"layer {number}", 1.0) for number in range(NAMES_LIMIT)])
    job.logged.note([("loss", NAN)])
    assert job.counts() == (0, 0, 0)


class Trainer:
    def log(self, logs: dict[str, Any], start_time: float | None = None) -> Any:
        return logs, start_time


class Run:
    def log(self, data: dict[str, Any], step: int | None = None) -> Any:
        return self._log(data=data, step=step)

    def _log(self, data: dict[str, Any], step: int | None = None) -> Any:
        return data, step


class MlflowClient:
    def log_metric(self, run_id: str, key: str, value: float, step: int = 0) -> Any:
        return run_id, key, value, step

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> Any:
        return run_id, metrics, params


class FileWriter:
    def add_summary(self, summary: Any, global_step: int | None = None) -> Any:
        return summary, global_step


class Logger:
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        raise NotImplementedError


class OwnLogger(Logger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        return metrics, step


def summary(tag: str, value: float, kind: str = "simple_value") -> Any:
    return SimpleNamespace(value=[SimpleNamespace(tag=tag, simple_value=value, WhichOneof=lambda _: kind)])


CALLS: dict[str, tuple[str, type, Callable[[Any], Any]]] = {
    "Hugging Face": ("transformers.trainer", Trainer, lambda it: it.log({"loss": NAN, "epoch": 0.1})),
    "Hugging Face, by name": ("transformers.trainer", Trainer, lambda it: it.log(logs={"loss": NAN})),
    "W&B": ("wandb.sdk.wandb_run", Run, lambda it: it.log({"train/loss": NAN}, step=3)),
    "MLflow": ("mlflow.tracking.client", MlflowClient, lambda it: it.log_metric("7f", "loss", NAN, step=3)),
    "MLflow, many": (
        "mlflow.tracking.client",
        MlflowClient,
        lambda it: it.log_batch("7f", metrics=[SimpleNamespace(key="loss", value=NAN)]),
    ),
    "TensorBoard": ("torch.utils.tensorboard.writer", FileWriter, lambda it: it.add_summary(summary("loss", NAN), 3)),
}


@pytest.mark.parametrize("logger", CALLS)
def test_what_a_logger_gets_is_counted_and_its_call_is_unchanged(job: Fixture, load: Load, logger: str) -> None:
    module, owner, call = CALLS[logger]
    load(module, **{owner.__name__: owner})
    before, expected = dict(vars(owner)), repr(call(owner()))
    job.look()
    assert repr(call(owner())).split(" at ")[0] == expected.split(" at ")[0]
    assert job.counts() == (1, 1, 0)
    job.logged.remove()
    assert dict(vars(owner)) == before


def test_a_bound_method_of_the_time_before_the_hook_is_counted(job: Fixture, load: Load) -> None:
    """`wandb.log` is one."""
    log = Run().log
    load("wandb.sdk.wandb_run", Run=Run)
    job.look()
    log({"loss": NAN})
    assert job.counts() == (1, 1, 0)


def test_a_logger_that_the_script_derives_from_lightnings_is_watched(job: Fixture, load: Load) -> None:
    load("lightning.fabric.loggers.logger", Logger=Logger)
    job.look()
    assert OwnLogger().log_metrics({"loss": NAN}, step=1) is not None
    assert job.counts() == (1, 1, 0)
    with pytest.raises(NotImplementedError):
        Logger().log_metrics({"loss": NAN})


def test_a_watched_logger_of_the_script_can_be_sent_to_a_process_without_the_hook(job: Fixture, load: Load) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")

    class Sent(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
            return metrics, step

    load("lightning.fabric.loggers.logger", Logger=Logger)
    job.look()
    sent = cloudpickle.loads(cloudpickle.dumps(Sent.log_metrics))
    assert sent(None, {"loss": NAN}, 3)[1] == 3
    assert job.counts() == (0, 0, 0)


def test_a_histogram_of_tensorboard_has_no_value(job: Fixture, load: Load) -> None:
    load("tensorboardX.writer", FileWriter=FileWriter)
    job.look()
    FileWriter().add_summary(summary("loss", 0.0, "histo"))
    assert job.counts() == (0, 0, 0)


@pytest.mark.parametrize(("numbers", "counts"), [([NAN], (1, 1, 0)), ([NAN, NAN], (0, 0, 0)), ([], (0, 0, 0))])
def test_a_number_that_tensorboard_writes_as_a_tensor_is_counted(
    job: Fixture, load: Load, numbers: list[float], counts: tuple[int, int, int]
) -> None:
    load("tensorboardX.writer", FileWriter=FileWriter)
    job.look()
    tensor = SimpleNamespace(float_val=numbers)
    value = SimpleNamespace(tag="loss", tensor=tensor, WhichOneof=lambda _: "tensor")
    FileWriter().add_summary(SimpleNamespace(value=[value]))
    assert job.counts() == counts


def test_nothing_is_imported_and_what_a_logger_does_not_have_is_left_out(job: Fixture, load: Load) -> None:
    load("transformers.trainer")
    load("wandb.sdk.wandb_run", Run=object)
    before = set(sys.modules)
    job.look()
    assert set(sys.modules) == before


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_lightnings_loggers_derive_from_the_watched_class(package: str) -> None:
    pytest.importorskip(package)
    csv = pytest.importorskip(
        "lightning.pytorch.loggers.csv_logs" if "." in package else "pytorch_lightning.loggers.csv_logs"
    )
    logger = sys.modules[f"{package}.loggers.logger"].Logger
    assert issubclass(csv.CSVLogger, logger)


def test_the_scripts_own_values_are_counted(attached: Attachment) -> None:
    rankscope.log(loss=NAN)
    rankscope.log(gradient_norm=1.0)
    timeline = attached.timeline
    assert value(timeline, "not_finite_values") == 1.0
    rankscope.log(loss=torch.tensor(1.0))  # type: ignore[arg-type]  # ignored
    assert value(timeline, "not_finite_values") == 1.0


def test_hugging_faces_trainer_has_the_watched_method() -> None:
    trainer = pytest.importorskip("transformers.trainer")
    assert list(inspect.signature(trainer.Trainer.log).parameters)[1] == "logs"
