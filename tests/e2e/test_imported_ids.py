"""Files whose ids start at 0, at 1 or are hashes: from the import to a served score of raw ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.run import read_json, resolve_run
from etl.tfrecord.table import write_table
from jobs.cli import main
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import ServerConfig

WORTH = np.array([2.0, -1.0, 1.0, 0.5, -2.0])
"""Of each item; the label is that of the row's item and of its history, and a taste, together."""
KEYS = [2**62 + 11, 7, 2**63 - 1, -(2**63) + 9, 12345678901234567]
"""Hashes: the same items, with names of 64 bits."""


def make_table(kind: str) -> pa.Table:
    """Rows in which a user of ids from 0 gives stars to items of ids from 0, from 1, or of keys."""
    random = np.random.default_rng(3)
    item = np.concatenate([np.arange(5), random.integers(0, 5, 795)])
    names = {"from_0": range(5), "from_1": range(1, 6), "keys": KEYS}[kind]
    none = {"from_0": -1, "from_1": 0, "keys": 0}[kind]
    taste = random.normal(size=800)
    lists = [random.integers(0, 5, length) for length in random.integers(0, 4, 800)]
    return pa.table(
        {
            "user": [int(user) for user in random.integers(0, 20, 800)],
            "item": pa.array([names[i] for i in item], pa.int64()),
            "history": pa.array(
                [[names[i] for i in row] + [none] * (3 - len(row)) for row in lists],
                pa.list_(pa.int64()),
            ),
            "taste": [value.tobytes() for value in taste],
            "worth": pa.array(
                [WORTH[i] + WORTH[row].sum() for i, row in zip(item, lists, strict=True)] + taste,
                pa.float32(),
            ),
        }
    )


def declare(kind: str) -> list[dict[str, Any]]:
    how = {"from_0": {"offset": 2}, "from_1": {"offset": 1}, "keys": {"ids": "keys"}}[kind]
    return [
        {"name": "user", "role": "user", "offset": 2},
        {"name": "item", "role": "item", **how},
        {"name": "history", "role": "user", "table": "item", "length": 3, **how},
        {"name": "taste", "role": "user"},
        {"name": "worth", "role": "label"},
    ]


MODEL = {
    "kind": "ranking",
    "network": "lr",
    "vectors": {"taste": {"decode": "float64", "length": 1}},
    "tasks": {"worth": {"label": "worth", "objective": "squared_error"}},
}


@pytest.mark.parametrize(
    "kind",
    [
        "from_1",
        pytest.param("from_0", marks=pytest.mark.exhaustive),
        pytest.param("keys", marks=pytest.mark.exhaustive),
    ],
)
def test_the_served_score_of_raw_ids_is_that_of_the_right_item(tmp_path, monkeypatch, kind):
    table = make_table(kind)
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        write_table(table, tmp_path / "files" / f"{split}.tfrecord")
    dataset = {
        "name": "ours",
        "splits": {split: [f"{split}.tfrecord"] for split in ("train", "test")},
        "features": declare(kind),
        "keys": {"user": "user"},
        "output": {"root": str(tmp_path / "datasets")},
    }
    run_sluice("data", "import", save(tmp_path / "data.json", dataset), "--data",
               str(tmp_path / "files"))  # fmt: skip
    embeddings = {"embeddings": {"item": {"kind": "dynamic"}}} if kind == "keys" else {}
    training = {
        "name": "ours",
        "dataset": str(tmp_path / "datasets/ours"),
        "root": str(tmp_path / "runs"),
        "model": {**MODEL, **embeddings},
        "input": {"batch_size": 50},
        "optimizer": {"learning_rate": 0.1},
        "fit": {"epochs": 8},
    }
    run_sluice("train", save(tmp_path / "train.json", training), "--no-report")
    run = resolve_run(str(tmp_path / "runs/ours"))
    run_sluice("export", "--run", str(run))
    version = run / "export/ours/1"
    # Evaluation through what serves it sends the raw values of the records.
    for option, value in (("--export", str(version)), ("--endpoint", URL)):
        with serve(run / "export", monkeypatch):
            run_sluice("evaluate", "--run", str(run), option, value)
        metrics = read_json(run / "metrics-served.json")
        assert metrics["tasks"]["worth"]["rmse"] < 0.05
        replay = metrics["replay"]
        assert (replay["sent"], replay["differing_rows"]) == ("raw values", 0)

    # The user's own records, as their file holds them: by value, as messages, as JSON lines.
    model, columns = tf.saved_model.load(str(version)), table.to_pydict()
    inputs = {name: tf.constant(columns[name], tf.int64) for name in ("user", "item", "history")}
    inputs["taste"] = tf.constant(columns["taste"])
    served = model.signatures["serving_default"](**inputs)["worth"].numpy()
    np.testing.assert_allclose(served, columns["worth"], atol=0.1)
    records = list(tf.data.TFRecordDataset(str(tmp_path / "files/test.tfrecord")))
    [examples] = model.signatures["examples"](examples=tf.stack(records)).values()
    np.testing.assert_allclose(examples, served, atol=1e-6)
    rows, scores = tmp_path / "rows.parquet", tmp_path / "scores.parquet"
    pq.write_table(table.slice(0, 20), rows)
    run_sluice("predict", "--run", str(run), "--input", str(rows), "--to", str(scores))
    predicted = pq.read_table(scores)["worth"].to_numpy()
    np.testing.assert_allclose(predicted, served[:20], atol=1e-6)


@pytest.mark.exhaustive
def test_lists_of_matrix_factorization_hold_the_files_own_ids(tmp_path):
    table = make_table("from_1").select(["user", "item", "history"])
    liked = {1, 3}  # By everybody, and nobody clicks on another item.
    clicks = pa.array([int(item in liked) for item in table["item"].to_pylist()])
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        write_table(table.append_column("click", clicks), tmp_path / f"files/{split}.tfrecord")
    dataset = {
        "name": "ours",
        "splits": {split: [f"{split}.tfrecord"] for split in ("train", "test")},
        "features": [*declare("from_1")[:3], {"name": "click", "role": "label"}],
        "keys": {"user": "user", "item": "item", "history": "history"},
        "output": {"root": str(tmp_path / "datasets")},
    }
    run_sluice("data", "import", save(tmp_path / "data.json", dataset), "--data",
               str(tmp_path / "files"))  # fmt: skip
    training = {
        "name": "ours",
        "dataset": str(tmp_path / "datasets/ours"),
        "root": str(tmp_path / "runs"),
        "model": {"name": "mf", "embedding_dim": 4, "objective": {"kind": "binary"}},
        "input": {"batch_size": 50},
        "optimizer": {"learning_rate": 0.1},
        "fit": {"epochs": 8},
    }
    run_sluice("train", save(tmp_path / "train.json", training), "--no-report")
    run = resolve_run(str(tmp_path / "runs/ours"))
    run_sluice("evaluate", "--run", str(run))
    run_sluice("export", "--run", str(run))
    model = tf.saved_model.load(str(run / "export/ours/1"))
    [users] = model.signatures["user_embedding"](user=tf.range(20, dtype=tf.int64)).values()
    [items] = model.signatures["item_embedding"](item=tf.range(1, 6, dtype=tf.int64)).values()
    scores = users.numpy() @ items.numpy().T
    assert scores[:, [0, 2]].min() > scores[:, [1, 3, 4]].max()
    rows, lists = tmp_path / "rows.json", tmp_path / "lists.json"
    rows.write_text("".join(f'{{"user": {user}}}\n' for user in range(20)))
    run_sluice("predict", "--run", str(run), "--input", str(rows), "--k", "2", "--to", str(lists))
    found = [json.loads(line) for line in lists.read_text().splitlines()]
    assert [set(row["items"]) for row in found] == [liked] * 20


URL = "http://localhost/v1/models/ours"


@contextmanager
def serve(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers what is posted to `URL`, in this process."""
    with TestClient(build_app(Server(ServerConfig(models))), "http://localhost") as client:

        def post(url: str, data: str, **options: Any) -> Any:
            return client.post(url, content=data, headers=options["headers"])

        with monkeypatch.context() as patched:
            patched.setattr("requests.post", post)
            yield


def run_sluice(*arguments: str) -> None:
    assert main(list(arguments)) == 0


def save(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config))
    return str(path)
