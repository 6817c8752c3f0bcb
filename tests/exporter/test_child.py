"""Child processes: what they may write."""

import sys
import time

from rankscope_exporter.child import ERROR_LIMIT, Child

WRITE = """
import contextlib, os
written = os.write(2, b"ValueError: damaged" + bytes([10]))
with contextlib.suppress(OSError):
    for _ in range(1024):
        written += os.write(2, b"x" * 4096)
print('{"written": %d}' % written)
"""


def test_a_long_standard_error_takes_no_more_memory() -> None:
    with Child([sys.executable, "-c", WRITE]) as child:
        assert child.wait(time.monotonic() + 60)
        assert child.lines == [{"written": ERROR_LIMIT}]
        assert child.error == "ValueError: damaged"
