"""The record of a rank that ends by an exception about memory, or a lost peer: which memory, in which phase."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from testing.records import rank_snapshot, record_in
from tests.trainer_hooks.scripts import TRAIN, job

from rankscope.exhaustion import DEVICE, HOST, SHARED, WORKER, exhausted, has_lost_peer
from rankscope.record import layout

GIB = 2.0**30
TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 15.20 GiB is "
    "free. Including non-PyTorch memory, this process has 63.90 GiB memory in use. Of the allocated memory 61.50 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
FAIL = f"raise torch.OutOfMemoryError({TEXT!r})"
MODEL = f"""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        if full == "forward":
            {FAIL}
        return self.inner(x).sum()

def fail(_):
    if full == "backward":
        {FAIL}

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if full == "optimizer":
            {FAIL}
        super().step()

full = ""
model = Model()
model.inner.weight.register_hook(fail)
optimizer = Optimizer(model.parameters(), lr=0.1)

def train():
    model(torch.ones(1, 2)).backward()
    optimizer.step()

for _ in range(STEPS):
    train()
"""


FULL_IN_BACKWARD = f"""
def fail(_):
    {FAIL}

weights.register_hook(fail)
step()
"""
FAKE_CUDA = """
GIB = 2.0**30
numbers = [74 * GIB, 78 * GIB]

def stats(_):
    allocated, reserved = numbers
    return dict(allocated_bytes=dict(all=dict(current=allocated, peak=allocated)),
                reserved_bytes=dict(all=dict(current=reserved)), num_alloc_retries=0, num_ooms=0)

class Properties:
    total_memory = 158 * GIB

torch.cuda.memory_stats_as_nested_dict = stats
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda _: Properties
torch.cuda.get_per_process_memory_fraction = lambda _: 0.5
step()
"""


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), DEVICE),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DEVICE),
        (RuntimeError("NCCL error: ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"), DEVICE),
        (MemoryError(), HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), HOST),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), HOST),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
                      "workers are out of shared memory."), SHARED),
        (RuntimeError("unable to write to file </torch_123_0>: No space left on device (28)"), SHARED),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), WORKER),
    ],
)  # fmt: skip
def test_a_lack_of_memory_is_known_by_the_exception(error: BaseException, memory: int) -> None:
    found = exhausted(error)
    assert found
    assert found[0] == memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        OSError(errno.ENOSPC, "No space left on device", "checkpoint.pt"),
        ValueError("the user's text: CUDA out of memory"),
        KeyError("memory"),
        None,
    ],
)
def test_other_exceptions_say_nothing_about_memory(error: BaseException | None) -> None:
    assert exhausted(error) is None


def test_the_reason_of_an_exception_counts_and_a_chain_may_be_a_circle() -> None:
    first, second = ValueError("step failed"), torch.OutOfMemoryError("CUDA out of memory.")
    first.__cause__, second.__context__ = second, first
    assert exhausted(first) == (DEVICE, second)
    second.__context__ = None
    first.__cause__ = KeyError()
    first.__cause__.__context__ = first
    assert exhausted(first) is None


CLOSED = "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29056. This is"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(CLOSED.replace("Connection closed by peer [", "Read error [") + ": Connection reset by peer"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:583] writev [10.0.0.7]:2331: Broken pipe"),
        torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:77, remote process exited"),
        torch.distributed.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
        torch.distributed.DistNetworkError("Connection was likely closed. Did the remote server shutdown or crash?"),
        torch.distributed.DistNetworkError("sendBytes failed on SocketImpl(fd=3, addr=[a]:1): Broken pipe"),
    ],
)  # fmt: skip
def test_a_lost_connection_to_a_rank_is_known_by_the_exception_or_its_reason(error: BaseException) -> None:
    assert has_lost_peer(error)
    outer = SystemExit(1)
    outer.__context__ = error
    assert has_lost_peer(outer)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        RuntimeError("the download failed: Connection closed by peer"),
        RuntimeError("[/w/third_party/gloo/gloo/transport/tcp/buffer.cc:81] Timed out waiting 1800000ms for recv"),
        KeyError(CLOSED),
        None,
    ],
)
def test_other_exceptions_are_about_no_lost_rank(error: BaseException | None) -> None:
    assert not has_lost_peer(error)


@pytest.mark.parametrize(("error", "lost"), [(f"RuntimeError({CLOSED!r})", 1.0), ("KeyError('lost')", 0.0)])
def test_the_record_has_that_the_rank_lost_its_peer(run_dir: Path, error: str, lost: float) -> None:
    ended(run_dir, f"raise {error}")
    assert record_in(run_dir)["lost_peer"] == lost


def ended(run_dir: Path, code: str, rank: str = TRAIN) -> tuple[str, str, float, float]:
    """Return how a rank ended: the memory, the phase, the request and the capacity in GiB."""
    with job(code, rank=rank) as process:
        process.communicate("")
    record = record_in(run_dir)
    assert record.exit_reason == "exception"
    return (
        record.exhausted_memory,
        record.exhausted_in_phase,
        record["exhausted_request_bytes"] / GIB,
        record["device_capacity_bytes"] / GIB,
    )


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_the_record_has_the_phase_in_which_the_gpus_memory_was_exhausted(run_dir: Path, phase: str, steps: int) -> None:
    """Also in the first steps, when all time is start-up and the probes do not know the model yet."""
    code = f"full = {phase!r}\ntrain()"
    assert ended(run_dir, code, TRAIN + MODEL.replace("STEPS", str(steps))) == ("device", phase, 20.0, 79.15)


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", "tokenize"])
def test_a_phase_of_the_script_contains_what_it_calls(run_dir: Path, phase: str) -> None:
    code = f"with rankscope.phase({phase!r}):\n    {FAIL}"
    assert ended(run_dir, code)[:2] == ("device", phase)
    inside = f"full = 'forward'\nwith rankscope.phase({phase!r}):\n    train()"
    named = "forward" if phase == "tokenize" else phase
    assert ended(run_dir, inside, TRAIN + MODEL.replace("STEPS", "8"))[:2] == ("device", named)


EXITS = {
    "outside of all phases": (FAIL, "device"),
    "another exception": (
        f"try:\n    {FAIL}\nexcept RuntimeError as error:\n    raise ValueError('lost') from None",
        "device",
    ),
    "sys.exit": (f"try:\n    {FAIL}\nexcept RuntimeError:\n    sys.exit(1)", "device"),
    "os._exit": (f"try:\n    {FAIL}\nexcept RuntimeError:\n    os._exit(1)", "device"),
    "after it was caught": (f"try:\n    {FAIL}\nexcept RuntimeError:\n    pass\nraise KeyError('lost')", ""),
    "the host": ("raise MemoryError", "host"),
    "no memory": ("raise KeyError('lost')", ""),
}


@pytest.mark.parametrize("end", EXITS)
def test_the_record_has_the_memory_that_was_exhausted_and_no_phase_without_one(run_dir: Path, end: str) -> None:
    code, memory = EXITS[end]
    assert ended(run_dir, code)[:2] == (memory, "")


@pytest.mark.parametrize(
    ("setup", "read"),
    [
        ("", [75.0, 79.0]),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'", [74.0, 78.0]),
        ("torch.cuda.memory_stats_as_nested_dict = None", [74.0, 78.0]),
    ],
    ids=["the allocator is read at the end", "not if that calls the driver", "an error does not reach the job"],
)  # fmt: skip
def test_the_allocators_counters_are_those_of_the_failure(run_dir: Path, setup: str, read: list[float]) -> None:
    code = f"numbers[:] = 75 * GIB, 79 * GIB\n{setup}\nraise torch.OutOfMemoryError('CUDA out of memory.')"
    assert ended(run_dir, code, TRAIN + FAKE_CUDA)[0] == "device"
    record = record_in(run_dir)
    assert [record["cuda_peak_allocated_bytes"] / GIB, record["cuda_reserved_bytes"] / GIB] == read
    assert record["device_capacity_bytes"] == 79 * GIB
    assert record.info["probes_disabled"] == []


def test_a_forged_record_has_no_memory_and_no_phase() -> None:
    for value in (99.0, -3.0, 2.5e9):
        forged = rank_snapshot({"exhausted_memory": value, "exhausted_in_phase": value})
        assert (forged.exhausted_memory, forged.exhausted_in_phase) == ("", "")
    assert layout.EXHAUSTED[0] == rank_snapshot({"exhausted_memory": 1.0}).exhausted_memory
