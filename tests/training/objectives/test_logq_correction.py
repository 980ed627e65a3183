"""The logQ correction against a reference, and the counts that it is made of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.networks.network import TrainingPass
from training.objectives.logq_correction import LogQCorrection, count_in_batch
from training.objectives.samplers import UniformSampler

PASS = TrainingPass(tf.constant([1, 2]))


def test_expected_counts_of_rows_and_of_draws_add_up() -> None:
    sampler = UniformSampler(np.array([2, 3, 4]), 5)
    counts = np.array([1, 1, 6, 3, 1], np.float32)
    found = LogQCorrection(0.5, counts, sampler, drawn=30).find(tf.constant([2, 4], tf.int64), PASS)
    np.testing.assert_allclose(found, 0.5 * np.log([16.0, 11.0]), rtol=1e-6)
    alone = LogQCorrection(1.0, None, sampler, drawn=30).find(tf.constant([2], tf.int64), PASS)
    np.testing.assert_allclose(alone, np.log([10.0]), rtol=1e-6)


def test_corrected_loss_is_unbiased_for_the_full_softmax() -> None:
    """Sampled by popularity, many corrected candidates give the full softmax's partition."""
    rng = np.random.default_rng(0)
    counts = np.array([0, 0, 1000, 300, 30, 10, 5])
    scores = rng.normal(size=7)
    draws = rng.choice(7, size=200_000, p=counts / counts.sum())
    log_counts = np.log(count_in_batch(counts, len(draws)).astype(np.float64))
    estimate = np.logaddexp.reduce(scores[draws] - log_counts[draws])
    assert estimate == pytest.approx(np.logaddexp.reduce(scores[2:]), abs=0.02)


def test_counts_in_a_batch_are_shares_of_train() -> None:
    found = count_in_batch(np.array([0, 0, 6, 3, 1]), 100)
    np.testing.assert_allclose(found[2:], [60, 30, 10], rtol=1e-5)
    assert (count_in_batch(np.zeros(5, np.int64), 8) > 0).all()
    # Of mixed datasets the numbers are expected ones, which may be below one row.
    shares = count_in_batch(np.array([0.0, 0.25, 0.75, 9.0]), 10)
    np.testing.assert_allclose(shares[1:], [0.25, 0.75, 9.0])
