from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.calibration import Calibration

ROWS = st.lists(st.tuples(st.booleans(), st.floats(-12, 12)), min_size=1, max_size=60)


@given(ROWS, st.integers(1, 12), st.integers(1, 4))
def test_equals_a_walk_over_the_bins(rows: list[tuple[bool, float]], bins: int, parts: int) -> None:
    y = np.array([label for label, _ in rows], dtype=bool)
    z = np.array([logit for _, logit in rows])
    streamed = Calibration(bins)
    for part in np.array_split(np.arange(len(rows)), parts):
        streamed.update(y[part], z[part])
    p = 1 / (1 + np.exp(-z))
    loss = -np.mean(np.where(y, np.log(p), np.log1p(-p)))
    assert streamed.log_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
    found = streamed.result()
    members = [np.clip(np.floor(p * bins), 0, bins - 1) == b for b in range(bins)]
    error = sum(abs(p[m].mean() - y[m].mean()) * m.mean() for m in members if m.any())
    assert found["expected_error"] == pytest.approx(error, abs=1e-9)
    assert [b["rows"] for b in found["bins"]] == [int(m.sum()) for m in members if m.any()]
    if y.any():
        assert found["ratio"] == pytest.approx(p.mean() / y.mean(), rel=1e-9)
    else:
        assert found["ratio"] is None


def test_perfect_predictions_have_no_error() -> None:
    streamed = Calibration()
    streamed.update(np.array([True, False]), np.array([800.0, -800.0]))
    assert streamed.result()["expected_error"] == 0.0
    assert streamed.log_loss == 0.0


def test_no_row_has_no_value() -> None:
    streamed = Calibration()
    streamed.update(np.zeros(0, dtype=bool), np.zeros(0))
    assert streamed.result() is None
    assert streamed.log_loss is None
