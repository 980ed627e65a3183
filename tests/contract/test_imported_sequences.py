"""SequenceExamples that TensorFlow wrote, imported: batches hold what its parser reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.run import read_json, resolve_run
from conf.etl.imported import ImportConfig
from etl.import_dataset import import_dataset
from jobs.cli import main
from training import open_dataset

ROWS, ITEMS, MAX_LEN = 400, 10, 5
CONTEXT = {
    "user": tf.io.FixedLenFeature([], tf.int64),
    "item": tf.io.FixedLenFeature([], tf.int64),
    "age": tf.io.FixedLenFeature([], tf.float32, -1.0),
    "profile": tf.io.FixedLenFeature([2], tf.float32),
    "click": tf.io.FixedLenFeature([], tf.int64),
}
LISTS = {
    "history": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
    "gaps": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True),
    "words": tf.io.FixedLenSequenceFeature([], tf.string, allow_missing=True),
}


def write_log(path: Path, rows: int, seed: int) -> list[bytes]:
    """A log whose clicks follow from the history: items of the parity that the user read last."""
    rng = np.random.default_rng(seed)
    payloads = []
    with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
        for row in range(rows):
            example = tf.train.SequenceExample()
            context, lists = example.context.feature, example.feature_lists.feature_list
            item, parity = int(rng.integers(2, ITEMS)), int(rng.integers(2))
            context["user"].int64_list.value.append(2 + row % 50)
            context["item"].int64_list.value.append(item)
            if row % 3:
                context["age"].float_list.value.append(20.5 + row % 40)
            context["profile"].float_list.value.extend([row / 8, -row])
            context["click"].int64_list.value.append(int(item % 2 == parity))
            for step in range(row % 9 if row % 11 else 0):
                read = 2 * int(rng.integers(1, ITEMS // 2)) + parity
                lists["history"].feature.add().int64_list.value.append(read)
                lists["gaps"].feature.add().float_list.value.append(step / 4)
                lists["words"].feature.add().bytes_list.value.append(b"w%d" % step)
            payloads.append(example.SerializeToString())
            writer.write(payloads[-1])
    return payloads


def publish(folder: Path, **changes: Any) -> Path:
    data: dict[str, Any] = {
        "name": "news",
        "data_dir": str(folder),
        "splits": {"train": ["train.gz"], "test": ["test.gz"]},
        "features": [
            {"name": "user", "role": "user"},
            {"name": "item", "role": "item"},
            {"name": "history", "role": "user", "max_len": MAX_LEN, "table": "item"},
            {"name": "gaps", "role": "context", "max_len": MAX_LEN},
            {"name": "words", "role": "id"},
            {"name": "age", "role": "context", "pad_value": -1},
            {"name": "profile", "role": "context", "length": 2},
            {"name": "click", "role": "label"},
        ],
        "aligned": [["history", "gaps", "words"]],
        "keys": {"user": "user", "item": "item", "history": "history"},
        "output": {"root": str(folder / "datasets")},
    }
    return import_dataset(ImportConfig.model_validate({**data, **changes})).version


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("news")
    write_log(folder / "test.gz", ROWS, 2)
    return folder, write_log(folder / "train.gz", ROWS, 1)


def test_batches_hold_what_tensorflow_parses(payloads: tuple[Path, list[bytes]]) -> None:
    folder, records = payloads
    features = [*CONTEXT, *LISTS]
    batches = open_dataset(
        publish(folder), 64, shuffle=False, features=[f for f in features if f != "click"]
    )
    row = 0
    for inputs, label in batches:
        for n in range(len(label)):
            context, lists = tf.io.parse_single_sequence_example(records[row], CONTEXT, LISTS)
            for name in ("user", "item", "age", "profile"):
                np.testing.assert_array_equal(inputs[name][n], context[name])
            assert int(label[n]) == int(context["click"])
            for name in ("history", "gaps"):
                steps = lists[name][:MAX_LEN].numpy()
                np.testing.assert_array_equal(inputs[name][n][: len(steps)], steps)
                assert not inputs[name][n][len(steps) :].numpy().any()
            words = inputs["words"][n].numpy().tolist()
            assert words[: len(lists["words"])] == lists["words"].numpy().tolist()
            assert not any(words[len(lists["words"]) :])
            row += 1
    assert row == ROWS


@pytest.mark.parametrize("network", ["din", "bst"])
def test_networks_of_histories_train_on_them(
    network: str, payloads: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    folder, _ = payloads
    params = {"hidden_units": [32], **({"heads": 2} if network == "bst" else {})}
    model = {"kind": "ranking", "network": network, "embedding_dim": 8, "params": params,
             "features": ["item", "history"]}  # fmt: skip
    settings = [f"model={model}", f"root={tmp_path}", "name=news", "input.batch_size=20",
                "fit.epochs=15", "optimizer.learning_rate=0.01"]  # fmt: skip
    chosen = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "--dataset", str(publish(folder)), "--no-report", *chosen]) == 0
    run = resolve_run(tmp_path / "news")
    assert main(["evaluate", "--run", str(run)]) == 0
    assert read_json(run / "metrics.json")["tasks"]["click"]["auc"] > 0.8
