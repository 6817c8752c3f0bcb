"""Which steps are measured on the device, and which stand for the others: decided by a step's number alone.

Every rank comes to the same answer without a message, so that a measured step is one that all ranks have measured.
Of each block of 2**level steps there is exactly one, and what is chosen at a level is chosen at all lower ones too: two
ranks whose steps look a little differently long, so that one takes twice as many, share every second one at least.
Which one of a block that is looks random, so that what happens each n-th step (a checkpoint, a log line) is neither
always met nor never. That is a van der Corput sequence under nested uniform scrambling (A. B. Owen, Randomly permuted
(t,m,s)-nets and (t,s)-sequences, 1995): which half of a block has the chosen step depends on a hash of the block.
"""

from __future__ import annotations

MAX_LEVEL = 30
_WORD = 2**64 - 1


def is_sampled(step: int, level: int) -> bool:
    """Whether `step` is the one of its block of 2**level steps."""
    return all((step >> bit) & 1 == _half(step >> bit + 1, bit) for bit in range(level))


def next_sampled(step: int, level: int) -> int:
    """The first such step that is not before `step`."""
    block = step >> level
    chosen = _chosen(block, level)
    return chosen if chosen >= step else _chosen(block + 1, level)


def _chosen(block: int, level: int) -> int:
    """The step of a block: from the largest half down."""
    step = block
    for bit in reversed(range(level)):
        step = step << 1 | _half(step, bit)
    return step


def _half(block: int, bit: int) -> int:
    """Which half of a block of 2**(bit + 1) steps has the step: a bit of a hash (after Murmur3's finaliser)."""
    value = (block * 0x9E3779B97F4A7C15 + bit * 0xC2B2AE3D27D4EB4F + 1) & _WORD
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _WORD
    return (value ^ value >> 33) >> 40 & 1
