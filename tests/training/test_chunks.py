from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training import BinaryConfig, DSSMConfig, InputConfig, TrainConfig
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.chunks import ChunkRunner, StepInputs, TrainingData, plan_chunk
from training.input import build_eval_dataset, shard_damage
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
    runner = ChunkRunner(
        config, data, strategy, StepInputs(("movie_id",)), build_run_steps(strategy, add_ids)
    )
    (whole,) = runner.run(Position(1, 0))
    assert len(whole.losses) == 12
    (tail,) = runner.run(Position(1, 5))
    np.testing.assert_array_equal(tail.losses, whole.losses[5:])
    again = runner.read_batch(Position(1, 7))
    assert float(add_ids(again)) == whole.losses[7]
    assert list(runner.run(Position(1, 12))) == []


def build_runner(version: Path, manifest: Manifest, inputs=("movie_id",), **changes) -> ChunkRunner:
    settings = {"batch_size": 64, **changes.pop("input", {})}
    config = TrainConfig(
        dataset="d", name="n", input=InputConfig.model_validate(settings), **changes
    )

    def count(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.cast(tf.shape(batch["movie_id"])[0], tf.float32)

    strategy = tf.distribute.get_strategy()
    data = TrainingData(version, manifest)
    return ChunkRunner(
        config, data, strategy, StepInputs(tuple(inputs)), build_run_steps(strategy, count)
    )


FILTER = {"filter": [{"feature": "history", "op": ">", "value": 3}]}


@pytest.mark.parametrize(
    "settings",
    [
        FILTER,
        {"validation": {"hash_of": "user_id", "share": 0.3}},
        {"take": 300},
        {"on_corrupt": "skip_record"},
        {"mix": [{"dataset": "", "weight": 0.4}]},
    ],
)
def test_an_epoch_has_the_steps_that_its_input_gives(
    settings: dict, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    if "mix" in settings:
        settings = {"mix": [{"dataset": str(tiny_version), "weight": 0.4}]}
    runner = build_runner(tiny_version, tiny_manifest, input=settings)
    batches = [loss for chunk in runner.run(Position(0, 0)) for loss in chunk.losses]
    assert batches == [64.0] * runner.steps_per_epoch
    whole = {"on_corrupt": 12, "mix": int(12 / 0.6)}
    assert runner.steps_per_epoch == whole.get(next(iter(settings)), runner.steps_per_epoch)
    if not set(settings) & set(whole):
        assert 1 <= runner.steps_per_epoch < 12


def test_an_id_that_no_row_of_a_table_stands_for_is_named(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    specs = [
        replace(spec, vocabulary_size=30) if spec.name == "user_id" else spec
        for spec in tiny_manifest.schema.features
    ]
    manifest = replace(tiny_manifest, schema=FeatureSchema(tuple(specs)))
    strategy = tf.distribute.get_strategy()

    def look_up(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.device("CPU:0"):  # GPUs read zeros beyond a table.
            return tf.reduce_sum(tf.gather(tf.zeros([30]), batch["user_id"]))

    runner = ChunkRunner(
        TrainConfig.model_validate(
            {"dataset": "d", "name": "n", "input": {"batch_size": 64, "shuffle_buffer": 1000}}
        ),
        TrainingData(tiny_version, manifest),
        strategy,
        StepInputs(("gender", "user_id")),
        build_run_steps(strategy, look_up),
    )
    with pytest.raises(InputDataError, match="'user_id' holds an id") as caught:
        list(runner.run(Position(0, 0)))
    assert caught.value.allowed == "0 to 29"


def test_what_an_epoch_left_out_is_the_same_wherever_it_is_resumed(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    totals = []
    for start in (0, 2, None):
        runner = build_runner(tiny_version, tiny_manifest, input={**FILTER, "shuffle_buffer": 100})
        if start is not None:
            list(runner.run(Position(1, start)))
        totals.append(runner.count_left_out(1).totals())
    short = sum(
        int(length <= 3)
        for batch in build_eval_dataset(tiny_version, tiny_manifest, "train", 1000, ["history"])
        for length in np.count_nonzero(batch["history"], axis=1)
    )
    assert totals == [{"filtered_rows": short}] * 3


def test_shards_that_are_gone_since_they_were_counted_are_told(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=30))
    runner = build_runner(
        version, read_manifest(version), input={"batch_size": 32, "on_corrupt": "skip_shard"}
    )
    (version / "train" / "part-00001.tfrecord").unlink()
    shard_damage._DAMAGE.clear()  # as in the process that resumes
    with pytest.raises(InputDataError, match=r"fewer rows than were counted[\s\S]*12 batches"):
        list(runner.run(Position(0, 0)))


def test_a_binary_objective_reads_labels_of_0_and_1_alone(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=30))
    manifest = read_manifest(version)
    other = replace(manifest, keys=replace(manifest.keys, label="gender"))
    inputs = ("movie_id", "gender")
    assert list(build_runner(version, other, inputs).run(Position(0, 0)))
    binary = DSSMConfig(objective=BinaryConfig())
    with pytest.raises(InputDataError, match="'gender' holds a value that a binary objective"):
        list(build_runner(version, other, inputs, model=binary).run(Position(0, 0)))
