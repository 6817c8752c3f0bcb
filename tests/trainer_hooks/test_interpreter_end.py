"""The end of the interpreter: it clears modules while objects of the job still call functions that the hook patched."""

from __future__ import annotations

import subprocess

import pytest
from testing.programs import python
from tests.trainer_hooks.scripts import watched

# Records each wrapper that the hook makes, around a stand-in for the original.
RECORD = """
import atexit, sys
from types import SimpleNamespace
from rankscope import patch

wrappers, called, real = {}, [], patch.replace

def replace(owner, name, make):
    def original(*args, **kwargs):
        called.append(name)
    if (owner.__name__, name) not in REAL and (name in vars(owner) or name != "__call__"):
        wrappers.setdefault(f"{owner.__name__}.{name}", make(original))
    return real(owner, name, make)

# They pass on another function than the original, as the inherited call of a module's class does.
REAL = {("os", name) for name in ("_exit", "execv", "execve", "closerange", "dup2")}
patch.replace = replace

import torch
import torch.distributed as dist
from rankscope import attach
from rankscope.probes.tensor_methods import WatchedMethod
from rankscope.probes.timed_iterator import timed_iterator

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
guard = attach.current()._guard("a test")
method = WatchedMethod(torch.Tensor.to, lambda *_: None, guard, True)
fetched = timed_iterator((number for number in range(2)), lambda _iterator, ask: ask())
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
hooks = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
tensor, loader = torch.ones(1), SimpleNamespace(num_workers=2)
"""
# As the interpreter does after the exit functions. Its own modules come last.
CLEAR = """
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "rankscope":
        for variable in [one for one in vars(module) if one != "__builtins__"]:
            vars(module)[variable] = None
"""
CALL = """
for name, wrapper in wrappers.items():
    code = wrapper.__code__
    arguments = [loader] * max(1, code.co_argcount - len(wrapper.__defaults__ or ()))
    wrapper(*arguments)
assert [name.rpartition(".")[2] for name in wrappers] == called, "each calls its original once"
for hook in hooks:
    hook(optimizer, (), {})
assert method.__get__(tensor, torch.Tensor)(torch.float64).dtype == torch.float64
assert model.module(torch.ones(1, 2)).shape == (1, 2)
assert next(fetched) == 0
fetched.close()
print(len(called))
sys.stdout.flush()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, python(code))), capture_output=True, text=True, check=False, env=watched())


@pytest.mark.usefixtures("run_dir")
def test_every_patched_function_calls_its_original_while_the_interpreter_clears_modules() -> None:
    done = run(f"import posix; leave = posix._exit\n{RECORD}\natexit._run_exitfuncs()\n{CLEAR}{CALL}leave(0)")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


# The interpreter clears the modules to which something still refers, in the reverse order of their import.
KEPT = """
import _frozen_importlib as importlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(16, 4))
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
"""
ALIVE = "    importlib.modules = [one for name, one in sys.modules.items() if name.startswith('rankscope')]\n"
LATE = {
    "a loader with persistent workers": "    importlib.kept = loader\n",
    "a loader with persistent workers, kept by its iterator": "    importlib.kept = iter(loader)\n",
    "an object that closes a watched generator": """
    import rankscope

    class Late:
        def __del__(self, batches=rankscope.timed(number for number in range(9))):
            batches.__name__ = "batches"
            batches.close()

    importlib.kept = Late()
""",
}


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("name", LATE)
def test_an_object_that_lives_until_the_end_ends_without_an_error_of_the_hook(name: str) -> None:
    done = run(KEPT + LATE[name] + ALIVE)
    assert done.returncode == 0
    assert "rankscope/" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
