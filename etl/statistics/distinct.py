"""Approximate number of distinct values, in a kilobyte, merged exactly.

HyperLogLog: Flajolet, Fusy, Gandouet and Meunier (2007), figure 3, with 64-bit hashes, so that the
paper's correction for large cardinalities falls away. Standard error 1.04 / sqrt(1024) = 3.25 %.
"""

from __future__ import annotations

import math

import numpy as np

from etl.encoders.hashing import mix64
from etl.tfrecord.kernels import inlined, kernel, leading_zeros

REGISTER_BITS = 10
REGISTERS = 1 << REGISTER_BITS
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)


def build_registers() -> np.ndarray:
    """Returns the sketch of no values, uint8 `[REGISTERS]`."""
    return np.zeros(REGISTERS, np.uint8)


def merge_registers(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the sketch of both sets of values together."""
    return np.maximum(left, right)


@inlined
def add_hash(mixed: np.uint64, registers: np.ndarray) -> None:
    """Adds the value of a 64-bit hash (`mix64` of its key) to a sketch."""
    register = mixed >> np.uint64(64 - REGISTER_BITS)
    # The set bit bounds the rank where all bits that are left are zero.
    rest = (mixed << np.uint64(REGISTER_BITS)) | np.uint64(1 << (REGISTER_BITS - 1))
    rank = np.uint8(leading_zeros(rest) + np.uint64(1))
    if rank > registers[register]:
        registers[register] = rank


@kernel
def add_keys(keys, registers):  # type: ignore[no-untyped-def]
    """Adds values to a sketch.

    Args:
        keys: One 64-bit key per value, equal for equal values, int64 `[values]`.
        registers: The sketch, updated.
    """
    for i in range(keys.size):
        add_hash(mix64(np.uint64(keys[i])), registers)


def estimate_distinct(registers: np.ndarray) -> int:
    """Estimates how many distinct values a sketch has seen."""
    estimate = _ALPHA * REGISTERS**2 / np.exp2(-registers.astype(np.float64)).sum()
    empty = int((registers == 0).sum())
    if estimate <= 2.5 * REGISTERS and empty:
        estimate = REGISTERS * math.log(REGISTERS / empty)  # linear counting
    return round(float(estimate))
