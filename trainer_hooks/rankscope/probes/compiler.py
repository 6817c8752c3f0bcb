"""Keeping torch.compile out of our own functions.

While compiled code runs, torch.compile takes up every Python frame that it comes across outside its graphs, ours among
them: our wrapper of DDP's forward was compiled, to its transparent path, so that the call was lost to us, and
`Timeline.enter` was, with graph breaks of its own. Frames are told apart by their code, without loading torch._dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frame(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` to Python, and still look at what it calls: a wrapper."""
    _skip(function.__code__, within="DEFAULT")
    return function


def skip_call(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` and of all that it calls to Python: code of ours alone."""
    _skip(function.__code__, within="SKIP")
    return function


def skip_package() -> None:
    """Have torch.compile leave every frame of ours to Python where it can only be told of single ones (torch < 2.7)."""
    if not hasattr(torch._C._dynamo.eval_frame, "skip_code"):  # noqa: SLF001 - as below
        return
    package = __name__.partition(".")[0]
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == package]:
        for value in vars(module).values():
            for function in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    _skip_with_nested(function.__code__)


def _skip_with_nested(code: CodeType) -> None:
    _skip(code, within="DEFAULT")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip_with_nested(constant)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, with torch.compile off while it runs, also where `skip_call` cannot keep it from what that calls.

    For what is rare and calls others' code: before torch 2.7 the publication of the record, at an event within code
    that is compiled, was compiled itself, a hundred frames of json and pathlib.
    """
    api: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - as below
    if not hasattr(api, "skip_code"):
        return skip_call(function)

    def paused(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        callback = api.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            api.set_eval_frame(callback)

    return skip_frame(paused)


def _skip(code: CodeType, within: str) -> None:
    """What torch._dynamo.eval_frame.skip_code does; nothing where a version of torch has neither way."""
    api: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - no public one, and in torch 2.4 no module to import
    if hasattr(api, "skip_code"):  # torch < 2.7: of the frame alone
        api.skip_code(code)
    elif hasattr(api, "set_code_exec_strategy"):
        action = api._FrameAction  # noqa: SLF001 - torch's own name for it
        strategy = api._FrameExecStrategy(action.SKIP, getattr(action, within))  # noqa: SLF001 - as above
        api.set_code_exec_strategy(code, strategy)
