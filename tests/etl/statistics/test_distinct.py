from __future__ import annotations

import numpy as np
import pytest

from etl.statistics.distinct import (
    add_keys,
    build_registers,
    estimate_distinct,
    merge_registers,
)


def sketch(keys: np.ndarray) -> np.ndarray:
    registers = build_registers()
    add_keys(keys.astype(np.int64), registers)
    return registers


@pytest.mark.parametrize("distinct", [0, 1, 10, 500, 2_000, 5_000, 100_000, 2_000_000])
def test_the_estimate_is_within_four_standard_errors(distinct):
    keys = np.arange(distinct) * 7919 - distinct
    assert estimate_distinct(sketch(keys)) == pytest.approx(distinct, rel=4 * 0.0325, abs=2)


def test_repetition_does_not_count():
    keys = np.arange(1000)
    assert np.array_equal(sketch(np.tile(keys, 5)), sketch(keys))


def test_merging_equals_one_pass():
    keys = np.arange(50_000) * 31
    merged = merge_registers(sketch(keys[:30_000]), sketch(keys[20_000:]))
    assert np.array_equal(merged, sketch(keys))


def test_a_hash_of_zeros_has_the_highest_rank():
    registers = sketch(np.array([0]))  # mix64(0) is 0
    assert registers[0] == 64 - 10 + 1
