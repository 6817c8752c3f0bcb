"""Sampling of steps, to measure them on the device or to represent the others. It depends only on a step's number.

So all ranks sample the same steps without communication. Each block of 2**level steps has exactly one sampled step,
which is also sampled at all lower levels: if one rank's steps seem a little shorter, so that it samples half as many,
the ranks still share these. Its position in the block looks random, so that an event in every n-th step (a checkpoint,
a log line) is neither always nor never sampled. This is a van der Corput sequence under nested uniform scrambling (A.
B. Owen, Randomly permuted (t,m,s)-nets and (t,s)-sequences, 1995): a hash of the block decides which half has the
sampled step.
"""

from __future__ import annotations

MAX_LEVEL = 30
_WORD = 2**64 - 1


def is_sampled(step: int, level: int) -> bool:
    """Return whether `step` is the sampled one of its block of 2**level steps."""
    return all((step >> bit) & 1 == _half(step >> bit + 1, bit) for bit in range(level))


def next_sampled(step: int, level: int) -> int:
    """Return the first sampled step at or after `step`."""
    block = step >> level
    chosen = _chosen(block, level)
    return chosen if chosen >= step else _chosen(block + 1, level)


def _chosen(block: int, level: int) -> int:
    """Return the sampled step of a block, from the largest half down."""
    step = block
    for bit in reversed(range(level)):
        step = step << 1 | _half(step, bit)
    return step


def _half(block: int, bit: int) -> int:
    """Return the half of a block of 2**(bit + 1) steps with the sampled step: a hash bit (as Murmur3's finalizer)."""
    value = (block * 0x9E3779B97F4A7C15 + bit * 0xC2B2AE3D27D4EB4F + 1) & _WORD
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _WORD
    return (value ^ value >> 33) >> 40 & 1
