from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import Manifest
from conf.training import InputConfig, TrainConfig
from training.chunks import ChunkRunner, TrainingData, plan_chunk
from training.position import Position
from training.step import build_run_steps

counts = st.integers(1, 40)


def ends(start: int, epoch: int, steps: int, loop: int, every: int | None) -> list[int]:
    """Batches at which calls end that begin at a batch."""
    found, batch = [], start
    while batch < steps:
        chunk = plan_chunk(Position(epoch, batch), steps, loop, every)
        assert 1 <= chunk <= loop
        batch += chunk
        found.append(batch)
    assert batch == steps
    return found


@given(counts, counts, st.none() | counts, st.integers(0, 5))
def test_calls_end_at_the_same_batches_wherever_a_run_is_resumed(
    steps: int, loop: int, every: int | None, epoch: int
) -> None:
    whole = ends(0, epoch, steps, loop, every)
    for index, start in enumerate(whole):
        assert ends(start, epoch, steps, loop, every) == whole[index + 1 :]
    if every is not None:
        due = [batch for batch in range(1, steps + 1) if (epoch * steps + batch) % every == 0]
        assert set(due) <= set(whole)


def test_the_rest_of_an_epoch_is_its_tail(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = TrainConfig(dataset="d", name="n", input=InputConfig(batch_size=64))
    data = TrainingData(tiny_version, tiny_manifest)
    assert data.steps_per_epoch(config.input) == 12

    def add_ids(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(batch["movie_id"] * tf.range(64, dtype=tf.int64)), tf.float32)

    strategy = tf.distribute.get_strategy()
    runner = ChunkRunner(config, data, strategy, ["movie_id"], build_run_steps(strategy, add_ids))
    (whole,) = runner.run(Position(1, 0))
    assert len(whole.losses) == 12
    (tail,) = runner.run(Position(1, 5))
    np.testing.assert_array_equal(tail.losses, whole.losses[5:])
    again = runner.read_batch(Position(1, 7))
    assert float(add_ids(again)) == whole.losses[7]
    assert list(runner.run(Position(1, 12))) == []
