from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.encoders.bags import Weights
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.input import InputConfig
from tests.training.tiny_dataset import TinyConfig, one_feature, write_tiny_dataset
from training.input.batches import build_eval_dataset, build_train_dataset
from training.reader import batch_plan as sparse_module
from training.reader.batch_plan import find_sparse_pairs

CONFIG = InputConfig(batch_size=32, shuffle_buffer=400, interleave_shards=2)


def read_rows(dataset: tf.data.Dataset, names: tuple[str, ...]) -> list[tuple]:
    rows = []
    for batch in dataset:
        columns = [batch[name].numpy().tolist() for name in names]
        rows += [tuple(map(repr, row)) for row in zip(*columns, strict=True)]
    return rows


def test_an_epoch_is_the_split_less_the_tail(tiny_version: Path, tiny_manifest: Manifest) -> None:
    stored = Counter(
        read_rows(
            build_eval_dataset(tiny_version, tiny_manifest, "train", 64),
            ("user_id", "movie_id", "history"),
        )
    )
    dataset = build_train_dataset(tiny_version, tiny_manifest, CONFIG, epoch=0, seed=1)
    rows = read_rows(dataset, ("user_id", "movie_id", "history"))
    total = sum(stored.values())
    assert total == tiny_manifest.split("train").rows
    assert len(rows) == total - total % CONFIG.batch_size
    assert not Counter(rows) - stored  # each row at most as often as it is stored


def test_evaluation_keeps_order_and_tail_and_raggedness(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    dataset = build_eval_dataset(
        tiny_version, tiny_manifest, "test", 25, ["user_id", "seen", "genres"], ragged=["genres"]
    )
    batches = list(dataset)
    assert [int(batch["user_id"].shape[0]) for batch in batches] == [25, 25, 10]
    assert isinstance(batches[0]["seen"], tf.RaggedTensor)
    assert isinstance(batches[0]["genres"], tf.RaggedTensor)
    again = list(build_eval_dataset(tiny_version, tiny_manifest, "test", 60, ["user_id"]))
    together = np.concatenate([batch["user_id"].numpy() for batch in batches])
    np.testing.assert_array_equal(together, again[0]["user_id"].numpy())


def test_an_empty_split_gives_no_batch(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(validation=False))
    dataset = build_eval_dataset(version, read_manifest(version), "validation", 8)
    assert list(dataset) == []
    assert dataset.element_spec["user_id"].dtype == tf.int64


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FeatureSpec("f", "int64", "user", vocabulary_size=9), [5, 1]),
        (FeatureSpec("f", "float32", "user", pad_value=-1.5), [5.0, -1.5]),
        (FeatureSpec("f", "int64", "user", pad_value=7), [5, 7]),
        (FeatureSpec("f", "int64", "user", shape=(2,), vocabulary_size=9), [[5, 6], [0, 0]]),
        (FeatureSpec("f", "float32", "user", shape=(2,), pad_value=0.5), [[5.0, 6.0], [0.5, 0.5]]),
        (FeatureSpec("f", "int64", "user", (None,), 3, vocabulary_size=9), [[5, 6, 0], [0, 0, 0]]),
        (FeatureSpec("f", "float32", "user", (None,), 3), [[5.0, 6.0, 0.0], [0.0, 0.0, 0.0]]),
        (FeatureSpec("f", "float32", "user", (None,), 1, pad_value=0.5), [[5.0], [0.5]]),
    ],
)
def test_an_absent_value(
    tmp_path: Path, tiny_manifest: Manifest, spec: FeatureSpec, expected: list
) -> None:
    present = {"f": [5, 6] if spec.is_list else 5}
    manifest = one_feature(tmp_path, tiny_manifest, spec, [present, {}])
    batch = next(iter(build_eval_dataset(tmp_path, manifest, "test", 2)))
    assert batch["f"].numpy().tolist() == expected


def test_weights_belong_to_the_ids_of_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(feature: str, operation: object, *inputs: str) -> SimpleNamespace:
        names = tuple(SimpleNamespace(name=name) for name in inputs)
        return SimpleNamespace(feature=feature, column=feature, operation=operation, inputs=names)

    weights = Weights.__new__(Weights)
    columns = [
        column("ids", None, "a"),
        column("others", None, "b"),
        column("values", weights, "w", "a"),
    ]
    spec = SimpleNamespace(vocabulary_size=9)
    names = ["ids", "others", "values"]

    class Schema(dict):
        names = ["ids", "others", "values"]  # noqa: RUF012

    monkeypatch.setattr(sparse_module, "read_plan", lambda *_: SimpleNamespace(columns=columns))
    manifest = SimpleNamespace(schema=Schema(dict.fromkeys(names, spec)))
    assert find_sparse_pairs(None, manifest) == {"ids": "values"}  # type: ignore[arg-type]
