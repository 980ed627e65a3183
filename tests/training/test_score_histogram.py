from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.score_histogram import StreamedAUC

FLOATS = st.floats(width=32, allow_nan=False)
ROWS = st.lists(st.tuples(st.booleans(), FLOATS | st.integers(-2, 2)), max_size=60)


def pairwise(labels: np.ndarray, scores: np.ndarray) -> float | None:
    positive, negative = scores[labels][:, None], scores[~labels][None, :]
    if not positive.size or not negative.size:
        return None
    return float(np.mean((positive > negative) + 0.5 * (positive == negative)))


def stream(labels: np.ndarray, scores: np.ndarray, exact_rows: int, parts: int = 3):
    streamed = StreamedAUC(exact_rows)
    for part in np.array_split(np.arange(len(labels)), parts):
        streamed.update(labels[part], scores[part])
    return streamed.result()


@given(ROWS, st.integers(0, 100))
def test_the_value_of_all_pairs_lies_within_the_error(
    rows: list[tuple[bool, float]], exact_rows: int
) -> None:
    labels = np.array([label for label, _ in rows], dtype=bool)
    scores = np.array([score for _, score in rows], dtype=np.float32)
    expected, found = pairwise(labels, scores), stream(labels, scores, exact_rows)
    if expected is None:
        assert found is None
        return
    assert abs(found.value - expected) <= found.error + 1e-12
    if len(rows) <= exact_rows:
        assert found.error == 0.0


@pytest.mark.parametrize("shift", [-100.0, 0.0, 1e6])
def test_many_rows_are_close_wherever_the_scores_lie(shift: float) -> None:
    rng = np.random.default_rng(1)
    labels = rng.random(4000) < 0.2
    scores = ((rng.normal(size=4000) + labels) * 50 + shift).astype(np.float32)
    found = stream(labels, scores, exact_rows=10)
    expected = pairwise(labels, scores.astype(np.float64))
    assert abs(found.value - expected) <= found.error
    if shift <= 0:
        assert found.error < 1e-3


def test_scores_of_few_values_are_exact_in_the_histogram_too() -> None:
    labels = np.array([True, False, True, False])
    scores = np.array([-0.0, 0.0, 2.0, -1.5], dtype=np.float32)
    assert stream(labels, scores, 0).value == pairwise(labels, scores)


def test_nan_has_no_order() -> None:
    with pytest.raises(ValueError, match="NaN"):
        StreamedAUC().update(np.array([True]), np.array([np.nan], dtype=np.float32))
