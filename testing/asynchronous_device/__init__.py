"""A device that is as asynchronous as CUDA, for tests, benchmarks and the gauntlet. It needs no GPU.

    with asynchronous_device():
        dist.init_process_group(BACKEND)
        rankscope.instrument()
        rankscope.instrument()
        …
        launch(30)                 # 30 ms of device work in the current stream
        dist.all_reduce(gradient)  # is issued, and meets the other ranks on the device
        read(loss)                 # the host waits for the device, as for `.item()`

**What it is.** Streams are threads that run one operation after the other. Events have the time at which the device
passed them. A collective is issued after the work in the current stream and really meets the other ranks; waiting for
it blocks the current stream, never the host. `torch.cuda` and `torch.cpu` have these streams, so that the hook and
FSDP2 find them where they look for CUDA's.

**What it is not.** It computes nothing: tensors are on the host, and torch's computations take host time. Only launched
work takes device time. Results of collectives are there at once and are *not* correct: each rank's own part stands in
for all, so trained values have no meaning. Only integers that two ranks send each other arrive, because pipelines agree
on shapes with them. `.item()` and `.cpu()` do not wait: a job reads with `read`. Streams do not share the device: two
at once are as fast as one. There is no memory, no graph capture and no second device.

docs/decisions/0017-an-asynchronous-device-for-tests.md has the reasons for this design.
"""

from testing.asynchronous_device.installation import asynchronous_device
from testing.asynchronous_device.process_group import BACKEND
from testing.asynchronous_device.streams import current_stream, launch, read, stream, synchronize

__all__ = ["BACKEND", "asynchronous_device", "current_stream", "launch", "read", "stream", "synchronize"]
