"""All supported ways to train, each with the same tiny model.

`job.py` trains each way without and with the hook and reports both; `launch.py` starts it as torchrun does. A new way
is a function in one of the files here and a line in this table.
"""

from __future__ import annotations

# The ways by number of ranks, as file.function. The group `frameworks` needs the packages of that name.
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (
        1,
        (
            "alone.plain",
            "alone.own_batching",
            "alone.random_inputs",
            "alone.iterable_dataset",
            "alone.persistent_workers",
            "alone.accumulation",
            "alone.autocast",
            "alone.grad_scaler",
            "alone.fused_optimizer",
            "alone.two_optimizers",
            "alone.optimizer_in_backward",
            "alone.closure",
            "alone.activation_checkpointing",
            "alone.reentrant_checkpointing",
            "alone.compiled",
            "alone.checkpoints",
        ),
    ),
    "pairs": (
        2,
        (
            "replicas.ddp",
            "replicas.buffers",
            "replicas.static_graph",
            "replicas.unused_parameters",
            "replicas.fp16_hook",
            "replicas.power_sgd_hook",
            "replicas.uneven_inputs",
            "replicas.no_sync",
            "replicas.sync_flag",
            "replicas.gan",
            "replicas.clipped",
            "replicas.compiled",
            "by_hand.all_reduce",
            "by_hand.async_all_reduce",
            "by_hand.all_gather",
            "by_hand.one_flat_tensor",
            "sharded.fsdp2",
            "sharded.fsdp2_clipped",
            "sharded.fsdp2_accumulating",
            "split.tensor_parallel",
            "split.gpipe",
            "split.one_forward_one_backward",
            "split.send_and_receive",
        ),
    ),
    "fours": (4, ("replicas.ddp", "sharded.hybrid", "sharded.tensor_parallel_and_fsdp2")),
    "frameworks": (
        2,
        (
            "frameworks.accelerate",
            "frameworks.lightning",
            "frameworks.hugging_face",
        ),
    ),
}
