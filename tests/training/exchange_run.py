"""One worker that exchanges drawn rows with the others, in one compiled loop of many lengths."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.embedding.key_index import FIRST_ROW
from training.embedding.worker_rows import RowExchange, find_owners

DIMS, LENGTHS = (4, 1), (16, 40, 16, 17, 40)


class DrawnBatch(NamedTuple):
    """What a worker brings to a step: a block of each matrix, and its share of gradients."""

    blocks: list[np.ndarray]
    shares: np.ndarray


def draw_batch(index: int, step: int, length: int, workers: int = 2) -> DrawnBatch:
    """Draws what a worker brings."""
    rng = np.random.default_rng([index, step])
    blocks = [rng.normal(size=(length, dim)).astype(np.float32) for dim in DIMS]
    shares = rng.normal(size=(FIRST_ROW + workers * length, DIMS[0])).astype(np.float32)
    return DrawnBatch(blocks, shares)


def exchange(index: int, addresses: list[str], result: str) -> None:
    """Writes what comes of each step."""
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    strategy = build_strategy(DevicesConfig(strategy="multi_worker", worker_timeout_s=30))
    owners = find_owners(strategy)
    assert owners is not None
    rows = RowExchange(owners, 0)

    def step(own: tf.Tensor, first: tf.Tensor, second: tf.Tensor, shares: tf.Tensor) -> tuple:
        rows.begin(own)
        return (*rows.gather([first, second]), rows.sum_at_owner(shares, 0))

    step = tf.autograph.experimental.do_not_convert(step)
    signature = [
        tf.TensorSpec([None], tf.int64),
        *(tf.TensorSpec([None, dim]) for dim in (*DIMS, DIMS[0])),
    ]
    compiled = tf.function(lambda *batch: strategy.run(step, args=batch), input_signature=signature)
    found = {}
    for number, length in enumerate(LENGTHS):
        batch = draw_batch(index, number, length)
        *parts, gradient = compiled(tf.zeros([length], tf.int64), *batch.blocks, batch.shares)
        found |= {f"rows {number} {part}": value.numpy() for part, value in enumerate(parts)}
        found[f"gradient {number}"] = gradient.numpy()
    np.savez(result, **found)
    # Who ends first would close the connections that the others may still read from.
    end = time.monotonic() + 600
    while len(list(Path(result).parent.glob("*.npz"))) < len(addresses):
        assert time.monotonic() < end
        time.sleep(0.05)
