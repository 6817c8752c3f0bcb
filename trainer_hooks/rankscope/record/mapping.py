"""Mapping a file into memory without keeping a descriptor of it.

`mmap.mmap` duplicates the descriptor and later closes that number. If the job has closed it before, the number may then
belong to a file of the job.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_shared(descriptor: int, size: int) -> memoryview[int]:
    """Return the file's first `size` bytes, mapped as long as there is a view of them. Raises OSError."""
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * size).from_address(address)
    # Not at process exit: exit functions still write.
    weakref.finalize(memory, _libc().munmap, address, size).atexit = False
    return memoryview(memory).cast("B")
