"""A run has the same name on every rank; ranks and GPUs have the launcher's and CUDA's names."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from testing.leaving import leave

from rankscope.process import identity
from rankscope.timeline.timeline import Job

SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_SLUID", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION")
TASK_OF_SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
SOURCES = (*SLURM, *TASK_OF_SLURM, "RANKSCOPE_RUN", "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANKSCOPE_RUN": "mine", "SLURM_JOB_ID": "77"}, "mine"),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "llama", "TORCHELASTIC_RUN_ID": "abc"}, "llama-77"),
    ],
)
def test_the_users_name_of_the_run_precedes_slurms_and_slurms_precedes_torchruns(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert identity.run_name() == name


BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}


@pytest.mark.parametrize(
    ("variables", "rank", "world_size", "has_launcher"),
    [
        (BATCH, "0", "1", False),
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, "0", "1", False),  # the batch script's own step
        (BATCH | {"SLURM_STEP_ID": "batch"}, "0", "1", False),
        (TASK, "3", "1", True),
        (TASK | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "0", "1", False),
        (BATCH | {"RANK": "5", "WORLD_SIZE": "6"}, "5", "1", True),  # torchrun in a batch script
        ({"RANK": "0", "WORLD_SIZE": "1"}, "0", "1", False),
        ({"RANK": "2"}, "2", "1", True),
    ],
    ids=["batch", "batch step", "named step", "srun", "srun of one", "torchrun", "torchrun of one", "rank only"],
)
def test_slurms_variables_name_a_rank_only_in_a_task_of_srun(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: str, world_size: str, *, has_launcher: bool
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    described = identity.describe("run")
    assert (described["rank"], described["group"], described["world_size"]) == (rank, rank, world_size)
    assert identity.has_launcher() is has_launcher


INHERITS = "from rankscope.process import identity; print(identity.inherits_rank())"
LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "change", "inherits"),
    [
        ({}, {}, False),
        (LAUNCHED, {}, True),
        (LAUNCHED, {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None}, True),
        (TASK, {}, True),
        (BATCH, {}, False),
        (TASK, LAUNCHED, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "0", "WORLD_SIZE": "8"}, False),
    ],
    ids=["no launcher", "child", "without the variables", "srun", "batch", "torchrun in srun", "torchrun in a pod"],
)
@pytest.mark.parametrize("shell", [[], ["sh", "-c", '"$@"; exit', "sh"]], ids=["direct", "through a shell"])
def test_a_process_that_a_rank_started_inherits_its_rank_but_not_from_a_launcher_or_a_shell(
    variables: dict[str, str], change: dict[str, str | None], shell: list[str], *, inherits: bool
) -> None:
    changed = {name: value for name, value in {**os.environ, **variables, **change}.items() if value is not None}
    start = "import os, subprocess, sys; subprocess.run(sys.argv[1:], check=True, env=eval(os.environ['CHANGED']))"
    command = [*shell, sys.executable, "-c", start, *shell, sys.executable, "-c", INHERITS]
    environment = {**os.environ, **variables, "CHANGED": repr(changed)}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed == f"{inherits}\n"


def test_a_rank_that_a_shell_started_inherits_nothing() -> None:
    command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", INHERITS]
    printed = subprocess.run(command, env={**os.environ, **LAUNCHED}, check=True, capture_output=True, text=True).stdout
    assert printed == "False\n"


def test_the_slurm_job_has_its_id_and_name_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.slurm_job() == {}
    monkeypatch.setenv("SLURM_JOB_NAME", "left over")
    assert identity.slurm_job() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "train\n" + "x" * 300)
    assert identity.slurm_job() == {"job_id": "77", "job_name": "train?" + "x" * 194}
    more = {"sluid": "s9G5M8BD1KND00", "account": "physics", "partition": "gpu"}
    for name, value in more.items():
        monkeypatch.setenv(f"SLURM_JOB_{name.upper()}", value)
    assert identity.slurm_job().items() >= more.items()


@pytest.mark.parametrize(
    ("address", "port", "rendezvous"),
    [
        (" 10.0.0.1 ", "29500", "10.0.0.1:29500"),
        ("host\n", None, "host:"),
        ("a\x1b[2Jb", "x" * 100, "a?[2Jb:" + "x" * 57),
        (None, "29500", ""),
        ("", "29500", ""),
    ],
)
def test_the_rendezvous_is_what_the_environment_names_in_printable_text(
    monkeypatch: pytest.MonkeyPatch, address: str | None, port: str | None, rendezvous: str
) -> None:
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert identity.rendezvous() == ""
    monkeypatch.setattr(identity, "has_peers", lambda: True)
    assert identity.rendezvous() == rendezvous


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\xa0"])
def test_a_blank_name_is_ignored_in_every_variable(monkeypatch: pytest.MonkeyPatch, blank: str) -> None:
    for variable in ("RANKSCOPE_RUN", "SLURM_JOB_ID", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(variable, blank)
    assert identity.run_name().strip(" ?")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", " none ")
    assert identity.run_name() != "none"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", " abc ")
    assert identity.run_name() == "abc"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert identity.run_name() == "slurm-77"
    monkeypatch.setenv("RANKSCOPE_RUN", " my run ")
    assert identity.run_name() == "my run"


@pytest.mark.parametrize(("named", "node"), [("gpu-node-7", "gpu-node-7"), (" \t", None), ("a\nb", "a?b")])
def test_the_node_is_the_host_unless_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch, named: str, node: str | None
) -> None:
    monkeypatch.setenv("RANKSCOPE_NODE", named)
    assert identity.describe("mine")["node"] == (node or socket.gethostname())


@pytest.mark.parametrize(("visible", "uuid"), [("GPU-aa, GPU-bb", "GPU-bb"), ("0,1", "")])
def test_the_gpu_is_at_the_local_rank_in_a_list_of_uuids(
    monkeypatch: pytest.MonkeyPatch, visible: str, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert identity.gpu_uuid() == uuid


@pytest.mark.parametrize(
    ("parameters", "allocated", "device"),
    [
        (None, (), 0),
        (None, (1,), 1),
        (None, (0, 1), 0),
        ((1,), (0, 1), 1),
        ((0, 1), (0, 1), 0),
        ((3, 2), (), 2),
    ],
    ids=["nothing known", "memory", "memory on the current one", "parameters", "parameters on both", "on others"],
)
def test_the_gpu_is_the_one_with_the_parameters_or_with_memory_and_not_always_the_current_one(
    monkeypatch: pytest.MonkeyPatch, parameters: tuple[int, ...] | None, allocated: tuple[int, ...], device: int
) -> None:
    simulated = {
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: 0,
        "memory_allocated": lambda index: 2**30 * (index in allocated),
        "get_device_properties": lambda index: types.SimpleNamespace(uuid=f"GPU-{index}"),
    }
    for name, function in simulated.items():
        monkeypatch.setattr(torch.cuda, name, function)
    job = Job()
    if parameters:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        on_cuda = [types.SimpleNamespace(device=torch.device("cuda", index)) for index in parameters]
        optimizer.param_groups = [{"params": [one]} for one in on_cuda]
        job.keep_optimizer(optimizer)
    assert identity.gpu_uuid(job.device) == f"GPU-{device}"


def test_without_statistics_of_an_allocator_the_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_index: int) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", refuse)
    assert identity.device_in_use() == 1


def test_an_optimizer_on_the_cpu_initializes_no_cuda() -> None:
    job = Job()
    job.keep_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    assert job.device is None
    assert not torch.cuda.is_initialized()


def test_the_file_name_is_safe_with_any_name_of_the_run() -> None:
    name = identity.file_name({"run": "../a b/ü", "rank": "3", "pid": "9"})
    assert name == "_a_b__.3.9"


@pytest.mark.parametrize("name", [None, "gloo", "cpu:gloo"])
def test_the_backend_in_use_is_named_for_every_kind_of_group(name: str | None) -> None:
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert identity.backend() == "gloo"
    finally:
        leave()
    assert identity.backend() == ""


class StoreInPython(dist.Store):
    """A store without compare_set. No reference to it is kept, so that its methods are gone after the group is made."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def wait(self, keys: list[str], *timeout: object) -> None:
        self.store.wait(keys, *timeout)


class FailingStore(StoreInPython):
    """A store whose compare_set fails."""

    def compare_set(self, *_arguments: str) -> bytes:
        raise ConnectionError


@pytest.fixture(params=[StoreInPython, FailingStore])
def group_with_python_store(request: pytest.FixtureRequest) -> Iterator[None]:
    store = request.param()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if request.param is StoreInPython:
        del store
    yield
    leave()


@pytest.mark.usefixtures("group_with_python_store")
def test_a_store_in_python_costs_at_most_the_agreed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.run_name("known") == "known"
    assert identity.run_name() not in ("", identity.run_name())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert identity.run_name() == identity.run_name()


@pytest.mark.usefixtures("group_with_python_store")
def test_spawned_ranks_share_a_name_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = types.SimpleNamespace(parent_process=object)
    monkeypatch.setitem(sys.modules, "multiprocessing.process", spawned)
    assert identity.run_name() == identity.run_name()


def test_ranks_agree_on_a_name_in_torchs_store() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert identity.run_name() == identity.run_name("later")
    finally:
        leave()
