"""Shards to batches: what a manifest lists, read and decoded by threads, for `tf.data`."""

from training.input.columns import check_specs, select_features
from training.input.counting import count_rows, count_steps
from training.input.damage import InputCounts
from training.input.dataset import (
    ROLE_OF_SPLIT,
    build_eval_dataset,
    build_held_out_dataset,
    build_train_dataset,
    read_batches,
)
from training.input.epoch_plan import shard_for
from training.input.mix import find_mixed
from training.input.reading import ReadOptions, Source
from training.input.tensors import Batch

__all__ = [
    "ROLE_OF_SPLIT", "Batch", "InputCounts", "ReadOptions", "Source", "build_eval_dataset",
    "build_held_out_dataset", "build_train_dataset", "check_specs",
    "count_rows", "count_steps", "find_mixed", "read_batches", "select_features", "shard_for",
]  # fmt: skip
