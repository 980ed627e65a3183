"""What follows training on keys: validation, evaluation, prediction, export, warm starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.artefacts.run import read_json
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID
from conf.training.train import FitConfig, TrainConfig
from tests.training.dynamic_runs import DSSM, build_config, build_trainer
from tests.training.tiny_dataset import TinyConfig, hash_key, write_tiny_dataset
from training.apply.export import Export
from training.apply.ranker import Ranker, RowInputs
from training.apply.rows import to_array
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import TrainedModel, load_checkpoint, load_run
from training.encoders.serving import INT_PAD_TOKENS
from training.encoders.vocabularies import read_key_vocabulary
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import build_item_index, read_item_features
from training.export.delta import apply_delta, write_delta
from training.export.saved_model import write_export
from training.fit import fit_run
from training.loop.warm_start import MatchedKeys, set_keys
from training.models.registry import build_model
from training.monitoring.progress import TrainingProgress

UNKNOWN = 999_999


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("keyed"), config=TinyConfig(keyed=True))


def configure(version: Path, root: Path, model=DSSM, **fit):
    fit = FitConfig(**{"epochs": 3, "steps_per_loop": 4, **fit})
    optimizer = {"learning_rate": 0.05}
    # All users of a batch fit on the device, and not all of the log.
    tiered = {**build_config(model).model.embeddings, "user_id": {"device_rows": 55}}
    model = {**model, "embedding_dim": 8, "embeddings": tiered}
    config = build_config(model, fit=fit, optimizer=optimizer)
    return config.model_copy(update={"dataset": str(version), "root": str(root)})


@pytest.fixture(scope="module")
def run(version: Path, tmp_path_factory) -> Path:
    """A run with validation after each epoch."""
    return fit_run(configure(version, tmp_path_factory.mktemp("runs")), TrainingProgress())


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedModel:
    return load_run(run)


def test_a_table_in_two_tiers_is_validated_as_it_is_trained_and_then_read_as_one(
    run: Path, trained: TrainedModel
) -> None:
    history = json.loads((run / "history.json").read_text())
    tables = [entry["tables"]["user_id"] for entry in history]
    assert tables[0]["device_bytes"] == 3 * 57 * 8 * 4  # with Adam's two moments
    assert all(found["swapped"] > 0 < found["device_hits"] for found in tables)
    assert "swapped" not in history[0]["tables"]["items"]
    assert trained.model.tables["user_id"].keys.tier is None
    best = read_json(run / "run_card.json")["training"]["best_epoch"]
    metrics = evaluate_split(trained, "validation")["protocols"][0]["systems"]["model"]
    validated = history[best - 1]["validation"]
    shared = {name: metrics[name] for name in validated if name in metrics}
    assert shared
    assert shared == pytest.approx({name: validated[name] for name in shared})


def test_a_delta_makes_the_later_export_of_the_earlier_one(run: Path, tmp_path: Path) -> None:
    since = list_checkpoints(run / "checkpoints" / "last")[0].path
    now = load_run(run, "last")
    write_export(load_checkpoint(since), ExportOptions(tmp_path / "models", "m", tables=True))
    full = write_export(now, ExportOptions(tmp_path / "full", "m", tables=True))
    delta = write_delta(now, since, ExportOptions(tmp_path / "deltas", "m"))
    served = apply_delta(delta, tmp_path / "models" / "m")
    cards = [read_json(version / "export.json") for version in (served, full)]
    assert cards[0]["tables"] == cards[1]["tables"]
    for name, about in cards[1]["files"].items():
        if name.endswith(".parquet"):
            assert cards[0]["files"][name] == about, name
    with pytest.raises(InputDataError, match="another version of the model"):
        apply_delta(delta, full.parent)


def test_exports_towers_that_look_up_keys_in_their_graph(trained: TrainedModel) -> None:
    export = write_export(trained)
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 16)
    signatures = tf.saved_model.load(str(export)).signatures
    raw_keys = {hash_key(100 + item): 100 + item for item in range(40)}
    tokens = [raw_keys[int(key)] for key in index.ids[:6]]
    listed = [
        [f"genre_{token % 4}", "genre_all" if (token - 100) % 3 == 0 else "<sluice:pad>"]
        for token in tokens
    ]
    served = signatures["item_embedding"](
        movie_id=tf.constant(tokens, tf.int64), genres=tf.constant(listed)
    )["embedding"]
    np.testing.assert_allclose(served.numpy(), index.vectors[:6], atol=1e-6)
    batch = {"movie_id": [UNKNOWN, int(index.ids[0])], "genres": [[0] * 4] * 2}
    encoded = {name: tf.constant(values, tf.int64) for name, values in batch.items()}
    known = signatures["item_embedding_encoded"](**encoded)["embedding"]
    np.testing.assert_allclose(known, trained.model.embed_items(encoded), atol=1e-6)
    rows = {name: tf.constant(values) for name, values in RAW_ROWS.items()}
    served = signatures["user_embedding"](**rows)["embedding"]
    batch = {name: tf.constant(v, tf.int64) for name, v in encode_rows(trained).items()}
    np.testing.assert_allclose(served, trained.model.embed_users(batch), atol=1e-6)
    table = pq.read_table(export / "embeddings" / "items.parquet")
    assert table["key"].to_pylist() == index.ids.tolist()
    # Batches of other sizes may differ in the last bit, by the CPU.
    np.testing.assert_allclose(table["vector"].to_pylist(), index.vectors, atol=1e-6)


def _genders(trained: TrainedModel) -> list[int]:
    vocabulary = read_key_vocabulary(trained.version_dir, trained.manifest, "gender")
    tokens = vocabulary.tokens.to_pylist()
    return [tokens.index(token) + FIRST_TOKEN_ID for token in ("F", "M")]


@pytest.mark.parametrize("moments", ["reset", "transfer"])
def test_a_warm_start_matches_rows_by_key(
    moments: str, run: Path, trained: TrainedModel, tmp_path: Path
) -> None:
    other = write_tiny_dataset(tmp_path, config=TinyConfig(keyed=True, users=70, seed=9))
    warm = {"path": str(run), "moments": moments}
    config = configure(other, tmp_path, epochs=1, warm_start=warm)
    trainer = build_trainer(config, other)
    report = trainer.warm_start()
    for name in ("user_id", "items"):
        old, new = trained.model.tables[name], trainer.parts.model.tables[name]
        keys = tf.constant(old.keys.read_keys())
        np.testing.assert_array_equal(new.lookup(keys).numpy(), old.lookup(keys).numpy())
        assert report.rows[name]["transferred"] == old.vocabulary_size
    assert not report.fresh
    trainer.fit(_made(tmp_path / "run"), None)
    assert trainer.parts.model.tables["user_id"].vocabulary_size == 72


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def ranking(version: Path, tmp_path_factory) -> tuple[TrainedModel, Export]:
    """A ranking model of hashed keys, and its export."""
    tables = {"user_id": "dynamic", "items": {"features": ["movie_id", "history"]}}
    model = {"kind": "ranking", "network": "din", "params": {"hidden_units": [4]},
             "embedding_dim": 4, "embedding_stddev": 1.0, "embeddings": tables}  # fmt: skip
    config = TrainConfig.model_validate({"dataset": "d", "name": "n", "model": model})
    manifest = read_manifest(version)
    built = build_model(config.model, manifest, 5)
    users, items = ([hash_key(first + n) for n in range(9)] for first in (1000, 100))
    for table, keys in (("user_id", users), ("items", items)):
        found = MatchedKeys(np.array(keys), np.arange(2 + len(keys)))
        set_keys(built, built.tables[table].keys, found)
    trained = TrainedModel(tmp_path_factory.mktemp("din"), built, config, manifest, version)
    return trained, Export(write_export(trained))


RAW_ROWS = {
    "user_id": np.array([1000, 1001, 7]),
    "gender": np.array(["F", "M", "F"], object),
    "history": np.array([[101, 105], [103, INT_PAD_TOKENS[0]], [7, 8]]),
}


def encode_rows(trained: TrainedModel) -> dict[str, list]:
    """What records hold of these rows."""
    women, men = _genders(trained)
    return {
        "user_id": [hash_key(1000), hash_key(1001), UNKNOWN],
        "gender": [women, men, women],
        "history": [[hash_key(101), hash_key(105)], [hash_key(103), 0], [UNKNOWN, UNKNOWN]],
    }


def test_a_ranking_model_looks_up_keys_in_its_graph(ranking: tuple[TrainedModel, Export]) -> None:
    trained, export = ranking
    genres = read_key_vocabulary(trained.version_dir, trained.manifest, "genres").tokens.to_pylist()
    listed = np.array([["genre_2"], ["genre_3"], ["genre_0"]], object)
    served = export.call(
        "serving_default", {**RAW_ROWS, "movie_id": np.array([102, 103, 7]), "genres": listed}
    )["label"]
    batch = {
        **encode_rows(trained),
        "movie_id": [hash_key(102), hash_key(103), UNKNOWN],
        "genres": [[genres.index(f"genre_{n}") + FIRST_TOKEN_ID] for n in (2, 3, 0)],
    }
    tensors = {name: tf.constant(values, tf.int64) for name, values in batch.items()}
    expected = trained.model.predict(tensors)["label"].numpy()
    np.testing.assert_allclose(served, expected, atol=1e-6)
    assert len(set(expected.tolist())) == 3


@pytest.mark.parametrize("is_encoded", [False, True])
def test_hashed_items_are_ranked_as_their_pairs_are_scored(
    ranking: tuple[TrainedModel, Export], is_encoded: bool
) -> None:
    (trained, export), items = ranking, ranking[1].items
    rows = {name: np.array(values) for name, values in encode_rows(trained).items()}
    given = RowInputs(rows, is_encoded=True) if is_encoded else RowInputs(RAW_ROWS)
    found = Ranker(export, items=items).rank(given, len(items))
    names = ("movie_id", "genres")
    ids, features = read_item_features(trained.version_dir, trained.manifest, names, 16)
    np.testing.assert_array_equal(items.keys, ids.ids)
    for row in range(3):
        pairs = {
            name: np.repeat(value[row : row + 1], len(items), 0) for name, value in rows.items()
        }
        pairs |= {name: to_array(features[name]) for name in names}
        scores = export.call("encoded", pairs)["label"]
        assert len(set(scores.tolist())) > 9
        np.testing.assert_allclose(found.scores[row], np.sort(scores)[::-1], atol=1e-6)
        of_items = scores[items.columns_of(found.ids[row])]
        np.testing.assert_allclose(found.scores[row], of_items, atol=1e-6)
