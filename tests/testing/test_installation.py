"""The device is in torch until its block ends; afterwards everything is restored."""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch
from testing.asynchronous_device.installation import replacements

OWNERS = (torch.cuda, torch.cpu, torch.accelerator, torch.backends.cuda, dist.ProcessGroup, dist.Work, dist.Backend)


def everything():
    registered = dist.Backend.backend_list, dist.Backend.backend_type_map, dist.Backend.backend_capability
    return [{**vars(owner)} for owner in OWNERS], [str(each) for each in (*registered, dist.Backend._plugins)]


def test_everything_is_restored_and_no_thread_is_left():
    before, threads = everything(), {*threading.enumerate()}
    with asynchronous_device():
        launch(1)
        torch.cuda.Stream().put_mark()
        assert everything() != before
    assert everything() == before
    assert {*threading.enumerate()} <= threads


def test_it_can_be_entered_again():
    for _ in range(2):
        with asynchronous_device():
            assert torch.cuda.is_initialized()
            assert torch.backends.cuda.is_built()
            assert BACKEND in dist.Backend.backend_list


def test_all_replaced_attributes_are_torchs():
    assert all(name in vars(owner) for owner, name, _ in replacements())


def test_a_forked_child_has_no_device():
    with asynchronous_device():
        child = os.fork()
        if not child:
            os._exit(torch.cuda.is_initialized())
        assert os.waitpid(child, 0)[1] == 0


def test_the_gpu_is_the_rank_s_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with asynchronous_device():
        assert torch.cuda.get_device_properties(torch.cuda.current_device()).uuid == "GPU-b"
