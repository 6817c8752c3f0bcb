"""Frameworks that own the loop, used as their users do."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from testing.ways.run import BATCH_SIZE, Batch, Parameters, Run, Samples, mlp, parameters, sgd, slow_collate


class Ballast:
    """A tensor that makes a saved state large enough to time: the model alone is written in a millisecond or two."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return 32 MiB."""
        return {"ballast": torch.zeros(2**23)}

    def load_state_dict(self, _: dict[str, torch.Tensor]) -> None:
        """Do nothing: no state is loaded here."""


def accelerate(run: Run) -> Parameters:
    """Use two batches a step, a metric gathered from all ranks, and a state saved at the end."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), run.loader(4 * run.steps))
    for inputs, targets in run.batches(loader):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                run.end_step()
            optimizer.zero_grad()
    losses = accelerator.gather(loss.detach())
    accelerator.register_for_checkpointing(Ballast())
    with run.clock("checkpoint"):
        accelerator.save_state(str(run.directory / "state"))
    accelerator.free_memory()
    return [*parameters(model), losses]


def lightning(run: Run) -> Parameters:
    """Validate in the middle, and save a checkpoint outside of it: one within a validation is a part of it."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def training_step(self, batch: Batch) -> torch.Tensor:
            return cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: Batch) -> None:
            self.log("loss", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True, batch_size=BATCH_SIZE)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["ballast"] = Ballast().state_dict()

    class Clock(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            run.end_step()
            if trainer.global_step == run.steps - 1:
                with run.clock("checkpoint"):
                    trainer.save_checkpoint(run.directory / "model.ckpt")

    model = Classifier()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=run.steps,
        max_epochs=-1,
        val_check_interval=run.steps // 2,
        callbacks=[Clock()],
        **quiet,
    )
    trainer.fit(model, run.loader(2 * run.steps, shuffle=False), run.loader(4, shuffle=False))
    return parameters(model)


class Mappings(Samples):
    """Samples in the format of the Hugging Face Trainer."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, targets = super().__getitem__(index)
        return {"inputs": inputs, "labels": targets}


class WithLoss(torch.nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def hugging_face(run: Run) -> Parameters:
    """Use two batches a step; evaluate and save in the middle."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.end_step()

    class Timed(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            with run.clock("evaluation"):
                return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with run.clock("checkpoint"):
                super()._save_checkpoint(*args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(run.directory),
        use_cpu=True,
        max_steps=run.steps,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=run.steps // 2,
        save_strategy="steps",
        save_steps=run.steps // 2,
        report_to=[],
        disable_tqdm=True,
    )
    model = WithLoss()
    trainer = Timed(
        model=model,
        args=arguments,
        data_collator=slow_mappings,
        train_dataset=Mappings(4 * BATCH_SIZE * run.steps),
        eval_dataset=Mappings(8 * BATCH_SIZE),
        callbacks=[Clock()],
    )
    trainer.train()
    return parameters(model)


def slow_mappings(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch after a delay."""
    inputs, labels = slow_collate([(sample["inputs"], sample["labels"]) for sample in samples])
    return {"inputs": inputs, "labels": labels}
