from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.dataset import read_manifest
from conf.errors import ExitCode
from conf.run import read_json, resolve_run
from jobs.cli import run_app
from jobs.export import app
from tests.jobs.runs import write_tiny_run
from training.input import build_eval_dataset


def _raw_batch(run: Path, split: str, card: dict) -> dict[str, tf.Tensor]:
    """The raw tokens that a split's records were encoded from, as a client would send them."""
    version = Path(read_json(run / "run_card.json")["dataset"]["path"])
    manifest = read_manifest(version)
    tower = card["towers"]["user_tower" if split == "users" else "item_tower"]
    inputs = {i["name"]: i for i in tower["signatures"]["serving_default"]["inputs"]}
    [encoded] = build_eval_dataset(version, manifest, split, 1000, tuple(inputs))
    raw = {}
    for name, values in encoded.items():
        encoding = manifest.schema[name].encoding
        table = pq.read_table(version / "encoders" / f"{encoding}.parquet")
        tokens = [inputs[name]["pad_token"], None, *table["token"].to_pylist()]
        rows = values.numpy().tolist()
        raw[name] = tf.constant(
            [[tokens[i] for i in row] if isinstance(row, list) else tokens[row] for row in rows],
            tf.int64 if inputs[name]["dtype"] == "int64" else tf.string,
        )
    return raw


@pytest.mark.parametrize(
    "model",
    [
        {"name": "dssm", "user_hidden_units": [8]},
        {"name": "mf", "embedding_dim": 8},
    ],
)
def test_towers_fed_with_raw_tokens_give_the_exported_vectors(
    model: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = write_tiny_run(tmp_path, model)
    assert run_app(app, ["--run", str(series)]) == ExitCode.OK
    assert "40 items, 60 users" in capsys.readouterr().out
    run = resolve_run(str(series))
    card = read_json(run / "export" / "export.json")
    assert card["model"] == model["name"]
    assert read_json(run / "run_card.json")["timing"]["export_seconds"] > 0
    for tower, name, split in (
        ("user_tower", "users", "users"),
        ("item_tower", "items", "catalog"),
    ):
        table = pq.read_table(run / "export" / "embeddings" / f"{name}.parquet")
        served = tf.saved_model.load(str(run / "export" / tower / "1"))
        raw = _raw_batch(run, split, card)
        found = served.signatures["serving_default"](**raw)["embedding"].numpy()
        vectors = dict(zip(table["key"].to_pylist(), table["vector"].to_pylist(), strict=True))
        keys = raw["user_id" if split == "users" else "movie_id"].numpy().tolist()
        np.testing.assert_allclose(found, [vectors[key] for key in keys], atol=1e-6)


def test_json_names_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = write_tiny_run(tmp_path, {"name": "mf"})
    assert run_app(app, ["--run", str(series), "--log-format", "json"]) == ExitCode.OK
    target = Path(json.loads(capsys.readouterr().out)["export"])
    assert (target / "user_tower" / "1" / "saved_model.pb").is_file()
