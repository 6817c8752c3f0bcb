"""A device that works asynchronously, as CUDA's do, for tests, benchmarks and the gauntlet: no GPU is needed.

    with asynchronous_device():
        dist.init_process_group(BACKEND)
        rankscope.instrument()
        …
        launch(30)                 # 30 ms of the device's work, in the current stream
        dist.all_reduce(gradient)  # issued; meets the other ranks on the device
        read(loss)                 # the host waits for the device, as for `.item()`

**What it is.** Streams are threads that take one operation after the other. Events have the time at which the device
passed them. Collectives are issued after what is in the current stream and really meet the other ranks; to wait for one
makes the current stream wait, never the host. `torch.cuda` and `torch.cpu` have these streams, so that the hook and
FSDP2 meet them where they look for CUDA's.

**What it is not.** Nothing is computed on it: tensors are the host's, and all that torch computes with them is the
host's time. What takes the device's time is what is launched. Results of collectives are there at once and are *not*
what the ranks would have computed together (each rank's own part stands in for all), so the values that are trained
have no meaning; only whole numbers that two ranks send each other do arrive, for pipelines agree on shapes by them.
`.item()` and `.cpu()` of a tensor do not wait: a job reads by `read`. Streams do not share the device: two that work at
once are both as fast as alone. There is no memory, no graph capture and no second device.

docs/decisions/0017-an-asynchronous-device-for-tests.md gives the reasons.
"""

from testing.asynchronous_device.installation import asynchronous_device
from testing.asynchronous_device.process_group import BACKEND
from testing.asynchronous_device.streams import current_stream, launch, read, stream, synchronize

__all__ = ["BACKEND", "asynchronous_device", "current_stream", "launch", "read", "stream", "synchronize"]
