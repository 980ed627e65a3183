"""An epoch that is resumed goes on bit for bit, wherever it stopped and whatever decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training import InputConfig
from training.input import ReadOptions, build_train_dataset
from training.input.pool import PoolReader

BASE = {"batch_size": 32, "shuffle_buffer": 200, "interleave_shards": 3}
CASES = {
    "plain": {},
    "one thread": {"parallel_parses": 1},
    "tensorflow": {"decoder": "tensorflow"},
    "pool of a batch": {"shuffle_buffer": 1},
    "one pool": {"shuffle_buffer": 10_000},
    "filter": {"filter": [{"feature": "history", "op": ">", "value": 1}]},
    "held out": {"validation": {"hash_of": "user_id", "share": 0.2}},
    "balanced": {"class_balance": {"feature": "label", "shares": {0: 0.5, 1: 0.5}}},
    "buckets": {"bucket_boundaries": [2, 5]},
    "cache": {"cache": "memory"},
    "take": {"take": 500},
}


def digest(batch: dict) -> bytes:
    parts = []
    for name, value in sorted(batch.items()):
        flat = tf.nest.flatten(value, expand_composites=True)
        parts.append(name.encode() + b"".join(tensor.numpy().tobytes() for tensor in flat))
    return b"|".join(parts)


def read(version: Path, manifest: Manifest, config: InputConfig, start: int = 0, **more) -> list:
    dataset = build_train_dataset(
        version, manifest, config, epoch=2, seed=5, start_batch=start, **more
    )
    return [digest(batch) for batch in dataset]


@pytest.mark.parametrize("case", CASES)
def test_the_tail_is_bit_identical(case, tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = InputConfig.model_validate({**BASE, **CASES[case]})
    whole = read(tiny_version, tiny_manifest, config)
    assert len(whole) >= 8
    every = case in ("plain", "tensorflow")
    starts = range(len(whole) + 1) if every else (1, len(whole) // 2, len(whole) - 1, len(whole))
    for start in starts:
        assert read(tiny_version, tiny_manifest, config, start) == whole[start:], start


def test_decoders_and_numbers_of_threads_give_the_same_batches(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    configs = [
        InputConfig.model_validate({**BASE, "decoder": decoder, "parallel_parses": threads})
        for decoder in ("block", "tensorflow")
        for threads in (1, 3)
    ]
    features = tiny_manifest.schema.names[:-1]
    found = [read(tiny_version, tiny_manifest, config, features=features) for config in configs]
    assert found[1:] == found[:1] * 3


def test_a_mix_resumes_too(tiny_version: Path, tiny_manifest: Manifest) -> None:
    mix = [{"dataset": str(tiny_version), "weight": 0.4}]
    config = InputConfig.model_validate({**BASE, "mix": mix})
    whole = read(tiny_version, tiny_manifest, config)
    assert len(whole) == int(780 // 32 / 0.6)
    for start in (1, 17, len(whole) - 1):
        assert read(tiny_version, tiny_manifest, config, start) == whole[start:]


def test_epochs_follow_each_other(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = InputConfig.model_validate(BASE)
    epochs = [
        [digest(b) for b in build_train_dataset(
            tiny_version, tiny_manifest, config, epoch=epoch, seed=5)]
        for epoch in (2, 3)
    ]  # fmt: skip
    options = ReadOptions(epochs=2)
    assert read(tiny_version, tiny_manifest, config, 3, options=options) == (
        epochs[0][3:] + epochs[1]
    )


def test_what_lies_before_the_position_is_neither_opened_nor_decoded(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[int] = []
    start = PoolReader.start

    def count(self, plan, places, low=0):
        placed.append(int((places >= low).sum()))
        return start(self, plan, places, low)

    monkeypatch.setattr(PoolReader, "start", count)
    config = InputConfig.model_validate(BASE)
    read(tiny_version, tiny_manifest, config, 20)
    assert sum(placed) == tiny_manifest.split("train").rows - 20 * 32


def test_workers_make_parts_of_the_global_batch(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = InputConfig.model_validate(BASE)
    seen = []
    for worker in range(2):
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, config, epoch=0, seed=1,
            features=["user_id", "history"], options=ReadOptions(worker=(worker, 2)),
        )  # fmt: skip
        batches = list(dataset)
        assert len(batches) == 24
        assert all(batch["user_id"].shape == (16,) for batch in batches)
        seen.append({digest({"r": batch["history"][i], "u": batch["user_id"][i]})
                     for batch in batches for i in range(16)})  # fmt: skip
    # Users repeat with the same history only at their first event.
    assert len(seen[0] & seen[1]) < 0.1 * len(seen[0])
    assert np.isclose(len(seen[0]), len(seen[1]), rtol=0.1)
