from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.objectives.sampled_softmax import (
    SoftmaxCandidates,
    compute_log_expected_counts,
    compute_sampled_softmax,
    draw_uniform_items,
    gather_replicas,
    replica_offset,
)


def test_outside_a_strategy_nothing_changes() -> None:
    values = tf.constant([[1.0], [2.0]])
    np.testing.assert_array_equal(gather_replicas(values), values)
    assert int(replica_offset(2)) == 0


def test_replicas_see_all_rows_in_order_and_gradients_flow_back() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        local = tf.cast(replica, tf.float32) * 10 + tf.constant([[1.0], [2.0]])
        with tf.GradientTape() as tape:
            tape.watch(local)
            gathered = gather_replicas(local)
            weight = tf.constant([[1.0], [2.0], [3.0], [4.0]]) * tf.cast(replica + 1, tf.float32)
            loss = tf.reduce_sum(gathered * weight)
        return gathered, tape.gradient(loss, local), replica_offset(2)

    gathered, gradients, offsets = tf.function(lambda: strategy.run(step))()
    for copy in strategy.experimental_local_results(gathered):
        assert copy.numpy().ravel().tolist() == [1, 2, 11, 12]
    # Replica r weighs row k by (k + 1) (r + 1): summed over both replicas, 3 (k + 1).
    found = [g.numpy().ravel().tolist() for g in strategy.experimental_local_results(gradients)]
    assert found == [[3, 6], [9, 12]]
    assert [int(o) for o in strategy.experimental_local_results(offsets)] == [0, 2]


def reference(users, items, ids, log_counts, positions, temperature, mask) -> np.ndarray:
    losses = []
    for row, position in enumerate(positions):
        kept, target = [], None
        for column in range(len(ids)):
            logit = float(users[row].astype(np.float64) @ items[column].astype(np.float64))
            logit = logit / temperature - log_counts[column]
            if column == position:
                target = logit
            elif mask and ids[column] == ids[position]:
                continue
            kept.append(logit)
        losses.append(np.logaddexp.reduce(kept) - target)
    return np.array(losses)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 8),
    extra=st.integers(0, 5),
    mask=st.booleans(),
    temperature=st.floats(0.05, 2.0),
)
def test_equals_the_reference(seed, batch, extra, mask, temperature) -> None:
    rng = np.random.default_rng(seed)
    users = rng.normal(size=(batch, 4)).astype(np.float32)
    items = rng.normal(size=(batch + extra, 4)).astype(np.float32)
    ids = rng.integers(2, 6, size=batch + extra)  # few ids: accidental hits are certain
    log_counts = rng.normal(size=batch + extra).astype(np.float32)
    positions = np.arange(batch)
    found = compute_sampled_softmax(
        tf.constant(users),
        SoftmaxCandidates(tf.constant(items), tf.constant(ids), tf.constant(log_counts)),
        tf.constant(positions, tf.int32),
        temperature=temperature,
        mask_accidental_hits=mask,
    )
    expected = reference(users, items, ids, log_counts, positions, temperature, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def equal_pair(ids: list[int], mask: bool) -> np.ndarray:
    """Three users on three equal items: every logit is 0."""
    return compute_sampled_softmax(
        tf.zeros([3, 2]),
        SoftmaxCandidates(tf.zeros([3, 2]), tf.constant(ids)),
        tf.range(3),
        mask_accidental_hits=mask,
    ).numpy()


def test_masking_accidental_hits_changes_the_loss() -> None:
    np.testing.assert_allclose(equal_pair([5, 5, 7], mask=False), np.log(3), rtol=1e-6)
    masked = equal_pair([5, 5, 7], mask=True)
    np.testing.assert_allclose(masked, [np.log(2), np.log(2), np.log(3)], rtol=1e-6)


def test_a_masked_copy_gets_no_gradient() -> None:
    items = tf.Variable(np.ones((2, 2), np.float32))
    with tf.GradientTape() as tape:
        loss = compute_sampled_softmax(
            tf.ones([1, 2]), SoftmaxCandidates(items + 0.0, tf.constant([5, 5])), tf.constant([0])
        )
    assert not tape.gradient(loss, items).numpy().any()


def test_logq_lifts_the_loss_off_popular_negatives() -> None:
    popular_negative = SoftmaxCandidates(
        tf.zeros([2, 2]), tf.constant([5, 6]), tf.math.log([1.0, 9.0])
    )
    loss = compute_sampled_softmax(tf.zeros([1, 2]), popular_negative, tf.constant([0]))
    np.testing.assert_allclose(loss, -np.log(1 / (1 + 1 / 9)), rtol=1e-6)


def test_corrected_loss_is_unbiased_for_the_full_softmax() -> None:
    """Sampled by popularity, many corrected candidates give the full softmax's partition."""
    rng = np.random.default_rng(0)
    counts = np.array([0, 0, 1000, 300, 30, 10, 5])
    scores = rng.normal(size=7)
    draws = rng.choice(7, size=200_000, p=counts / counts.sum())
    log_counts = compute_log_expected_counts(counts, len(draws)).astype(np.float64)
    estimate = np.logaddexp.reduce(scores[draws] - log_counts[draws])
    assert estimate == pytest.approx(np.logaddexp.reduce(scores[2:]), abs=0.02)


def test_expected_counts_equal_what_is_drawn() -> None:
    counts = np.array([0, 0, 6, 3, 1])
    expected = np.exp(compute_log_expected_counts(counts, 100, uniform_negatives=30))
    np.testing.assert_allclose(expected[2:], [60 + 10, 30 + 10, 10 + 10], rtol=1e-5)
    assert np.isfinite(compute_log_expected_counts(np.zeros(5, np.int64), 8)).all()


def test_uniform_items_are_of_the_drawable_ones_and_repeat_by_seed() -> None:
    drawable = tf.constant([4, 5, 6, 8, 11], tf.int64)
    drawn = draw_uniform_items(5000, drawable, tf.constant([3, 4])).numpy()
    assert set(drawn) == {4, 5, 6, 8, 11}
    assert np.bincount(drawn)[drawable.numpy()].min() > 850
    np.testing.assert_array_equal(drawn, draw_uniform_items(5000, drawable, tf.constant([3, 4])))
    assert not np.array_equal(drawn, draw_uniform_items(5000, drawable, tf.constant([3, 12])))


def test_uniform_items_equal_draws_from_the_range_of_ids() -> None:
    seed = tf.constant([3, 4])
    by_range = tf.random.stateless_uniform([99], seed, minval=2, maxval=12, dtype=tf.int64)
    np.testing.assert_array_equal(
        draw_uniform_items(99, tf.range(2, 12, dtype=tf.int64), seed), by_range
    )


def test_expected_counts_rise_for_the_drawable_ids_alone() -> None:
    counts = np.array([0, 0, 6, 3, 1])
    plain = np.exp(compute_log_expected_counts(counts, 100))
    mixed = np.exp(compute_log_expected_counts(counts, 100, 30, np.array([2, 4])))
    np.testing.assert_allclose(mixed - plain, [0, 0, 15, 0, 15], atol=1e-4)
