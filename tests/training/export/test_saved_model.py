from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index
from training.export.embeddings import read_user_vectors, write_users, write_vectors
from training.export.saved_model import write_export, write_models_config
from training.input.batches import build_eval_dataset
from training.models.registry import build_model

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
UNESCAPED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: UNESCAPED[found[0]], text)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3), elements=FLOATS), st.data())
def test_both_files_hold_the_same_keys_and_bits(vectors: np.ndarray, data: st.DataObject) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\\t\n\rtn"))
    keys = data.draw(st.lists(text, min_size=len(vectors), max_size=len(vectors)))
    ids = np.arange(2, 2 + len(keys))
    with tempfile.TemporaryDirectory() as name:
        batch = (pa.array(keys, pa.string()), ids, vectors)
        write_vectors(Path(name) / "items", pa.string(), [batch], vectors.ndim == 3)
        table = pq.read_table(Path(name) / "items.parquet")
        lines = (Path(name) / "items.txt").read_bytes().decode().split("\n")
    assert table["key"].to_pylist() == keys
    assert table["id"].to_pylist() == ids.tolist()
    stored = np.array(table["vector" if vectors.ndim == 2 else "vectors"].to_pylist(), np.float32)
    assert stored.tobytes() == vectors.tobytes()
    assert lines.pop() == ""
    read = [line.split("\t") for line in lines]
    assert [_unescape(key) for key, _ in read] == keys
    texts = [[own.split(",") for own in numbers.split(";")] for _, numbers in read]
    parsed = np.array(texts).astype(np.float32).reshape(vectors.shape)
    assert parsed.tobytes() == vectors.tobytes()


PAD = -(2**63)


@pytest.fixture(scope="module")
def trained(tiny_version: Path, tiny_manifest: Manifest) -> TrainedModel:
    config = TrainConfig.model_validate({"dataset": "d", "name": "n"})
    model = TinyTowers(tiny_manifest)
    return TrainedModel(Path(), model, config, tiny_manifest, tiny_version)


@pytest.fixture(scope="module")
def exported(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(replace(trained, run_dir=tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def signatures(exported: Path) -> dict:
    return tf.saved_model.load(str(exported)).signatures


def _tokens(version: Path, name: str) -> list:
    return pq.read_table(version / "encoders" / f"{name}.parquet")["token"].to_pylist()


def test_raw_and_encoded_values_give_the_model_s_vectors(
    trained: TrainedModel, signatures: dict
) -> None:
    version, model = trained.version_dir, trained.model
    movies, genders = _tokens(version, "movie_id"), _tokens(version, "gender")
    users, genres = _tokens(version, "user_id"), _tokens(version, "genres")
    ids = [2 + genres.index(name) for name in ("genre_0", "genre_all")]
    raw = {
        "user": {
            "user_id": [users[0], users[5], -77],
            "gender": [genders[0], "no such", genders[1]],
            "history": [[movies[3], movies[1], 999999], [movies[0], PAD, PAD], [PAD] * 3],
        },
        "item": {
            "movie_id": [movies[4], -5],
            "genres": [["genre_0", "genre_all"], ["new", "<sluice:pad>"]],
        },
    }
    encoded = {
        "user": {
            "user_id": [2, 7, 1],
            "gender": [2, 1, 3],
            "history": [[5, 3, 1], [2, 0, 0], [0, 0, 0]],
        },
        "item": {"movie_id": [6, 1], "genres": [ids, [1, 0]]},
    }
    for side, embed in (("user", model.embed_users), ("item", model.embed_items)):
        batch = {name: tf.constant(value, tf.int64) for name, value in encoded[side].items()}
        of_raw = {name: tf.constant(value) for name, value in raw[side].items()}
        of_raw = {n: tf.cast(v, tf.int64) if v.dtype == tf.int32 else v for n, v in of_raw.items()}
        for suffix, inputs in (("", of_raw), ("_encoded", batch)):
            found = signatures[f"{side}_embedding{suffix}"](**inputs)["embedding"]
            np.testing.assert_allclose(found, embed(batch), atol=1e-6)


def test_embedding_files_hold_every_item_and_user(exported: Path, trained: TrainedModel) -> None:
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    [users] = read_user_vectors(trained, seen=False)
    expected = {
        "items": (index.ids, index.vectors, _tokens(trained.version_dir, "movie_id")),
        "users": (users.ids, users.vectors, _tokens(trained.version_dir, "user_id")),
    }
    for name, (ids, vectors, tokens) in expected.items():
        table = pq.read_table(exported / "embeddings" / f"{name}.parquet")
        assert table["id"].to_pylist() == ids.tolist()
        assert table["key"].to_pylist() == [tokens[token - 2] for token in ids]
        np.testing.assert_allclose(table["vector"].to_pylist(), vectors, atol=1e-6)


def test_the_export_explains_itself(
    exported: Path, trained: TrainedModel, signatures: dict
) -> None:
    card = json.loads((exported / "export.json").read_text())
    assert card["dataset_version"] == trained.manifest.dataset_version
    assert (card["name"], card["version"], card["embeddings"]["dim"]) == ("n", "1", 6)
    inputs = card["signatures"]["user_embedding"]["inputs"]
    assert {i["name"]: (i["dtype"], i["pad_token"]) for i in inputs} == {
        "user_id": ("int64", None),
        "gender": ("string", None),
        "history": ("int64", PAD),
    }
    for name, info in card["files"].items():
        content = (exported / name).read_bytes()
        assert info == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert found == {*card["files"], "export.json"}
    assert set(signatures) == set(card["signatures"])
    for name, about in card["signatures"].items():
        assert set(signatures[name].structured_input_signature[1]) == {
            item["name"] for item in about["inputs"]
        }
        assert set(signatures[name].structured_outputs) == {out["name"] for out in about["outputs"]}


def test_the_version_carries_no_other_variables(exported: Path, trained: TrainedModel) -> None:
    stored = tf.train.list_variables(str(exported / "variables" / "variables"))
    shapes = sorted(tuple(shape) for key, shape in stored if len(shape) == 2)
    tables = [tuple(table.rows.shape) for table in trained.model.tables.values()]
    assert shapes == sorted([*tables, (40, 6)])  # The items' vectors, for `top_k`.


def test_users_are_stored_with_what_is_known_of_them(exported: Path, trained: TrainedModel) -> None:
    assert (exported / "users.parquet").stat().st_mode & 0o137 == 0  # Owner and group alone.
    table = pq.read_table(exported / "users.parquet")
    names = [f"feature:{name}" for name in trained.model.user_inputs]
    assert table.column_names == ["key", *names, "seen"]
    [batch] = read_user_vectors(trained, seen=True)
    assert table["seen"].to_pylist() == batch.seen.to_list()
    tensors = {n: np.array(table[f"feature:{n}"].to_pylist()) for n in trained.model.user_inputs}
    np.testing.assert_array_equal(trained.model.embed_users(tensors), batch.vectors)


def test_every_history_of_users_is_stored_whether_or_not_the_model_reads_it(
    tmp_path: Path,
) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=9, bought=True))
    manifest = read_manifest(version)
    manifest = replace(manifest, keys=replace(manifest.keys, history=None))
    config = TrainConfig.model_validate({"dataset": "d", "name": "n", "model": {"name": "mf"}})
    model = build_model(config.model, manifest, 3)
    found = write_users(tmp_path, TrainedModel(tmp_path, model, config, manifest, version))
    assert found is not None
    assert found["histories"] == ["history", "bought"]
    table = pq.read_table(tmp_path / "users.parquet")
    names = ("history", "bought", "seen")
    expected = next(iter(build_eval_dataset(version, manifest, "users", 9, names, names)))
    for name in ("history", "bought"):
        assert table[f"feature:{name}"].to_pylist() == expected[name].to_list()


def test_warm_up_requests_are_those_of_tensorflow_serving(
    exported: Path, trained: TrainedModel, signatures: dict
) -> None:
    file = exported / "assets.extra" / "tf_serving_warmup_requests"
    asked = set()
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        request = PredictionLog.FromString(record).predict_log.request
        assert request.model_spec.name == "n"
        name = request.model_spec.signature_name
        inputs = {k: tf.constant(tf.make_ndarray(v)) for k, v in request.inputs.items()}
        assert all(value.shape[0] for value in signatures[name](**inputs).values())
        asked.add(name)
    assert asked == set(signatures)


def test_top_k_is_exact_and_leaves_out_what_it_is_told(
    exported: Path, trained: TrainedModel, signatures: dict
) -> None:
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    [users] = read_user_vectors(trained, seen=True)
    raw = _raw_users(trained)
    movies = np.array(_tokens(trained.version_dir, "movie_id"))
    scores = users.vectors @ index.vectors.T
    seen = [movies[np.array(row, int) - 2] for row in users.seen.to_list()]
    width = max(map(len, seen))
    exclude = [[*row, *[PAD] * (width - len(row))] for row in seen]
    given = {"exclude": tf.constant(exclude, tf.int64), "k": tf.fill([60], 40)}
    found = signatures["top_k"](**raw, **given)
    plain = signatures["serving_default"](**raw)
    assert plain["items"].shape == (60, 40)
    for row in range(60):
        order = np.argsort(-scores[row], kind="stable")
        np.testing.assert_array_equal(plain["items"][row], movies[order])
        np.testing.assert_allclose(plain["scores"][row], scores[row][order], atol=1e-5)
        left = [movies[i] for i in order if movies[i] not in seen[row]]
        assert found["items"][row].numpy().tolist() == left + [PAD] * (40 - len(left))
        assert set(found["scores"][row, len(left) :].numpy()) <= {np.finfo(np.float32).min}


def _raw_users(trained: TrainedModel) -> dict[str, tf.Tensor]:
    """The raw values of the `users` split, from its ids and the vocabularies."""
    names = trained.model.user_inputs
    where = (trained.version_dir, trained.manifest)
    [batch] = build_eval_dataset(*where, "users", 100, names)
    raw = {}
    for name, padding in (("user_id", 0), ("gender", ""), ("history", PAD)):
        vocabulary = trained.manifest.schema[name].table
        tokens = np.array([padding, padding, *_tokens(trained.version_dir, vocabulary)])
        raw[name] = tf.constant(tokens[batch[name].numpy()])
    return raw


def test_examples_are_raw_values_of_any_length(
    exported: Path, trained: TrainedModel, signatures: dict
) -> None:
    raw = _raw_users(trained)
    serialized = []
    for user, gender, history in zip(*(raw[n].numpy() for n in raw), strict=True):
        features = {
            "user_id": {"int64_list": {"value": [user]}},
            "gender": {"bytes_list": {"value": [gender]}},
            "history": {"int64_list": {"value": history[history != PAD]}},
        }
        example = tf.train.Example(features={"feature": features})
        serialized.append(example.SerializeToString())
    found = signatures["user_embedding_examples"](examples=tf.constant([*serialized, b""]))
    expected = signatures["user_embedding"](**raw)["embedding"]
    np.testing.assert_allclose(found["embedding"][:60], expected, atol=1e-6)
    cold = {"user_id": [1], "gender": [1], "history": [[0] * 8]}  # Of an empty Example.
    encoded = {name: tf.constant(value, tf.int64) for name, value in cold.items()}
    np.testing.assert_allclose(
        found["embedding"][60:], trained.model.embed_users(encoded), atol=1e-6
    )


class _BrokenTowers(TinyTowers):
    def embed_users(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        return super().embed_users(features) * float("inf")


def test_versions_grow_and_a_failed_export_leaves_them(
    trained: TrainedModel, tmp_path: Path
) -> None:
    options = ExportOptions(tmp_path / "models", "shop", keep=1)
    trained, model = replace(trained, run_dir=tmp_path), tmp_path / "models" / "shop"
    assert [write_export(trained, options).name for _ in range(2)] == ["1", "2"]
    broken = replace(trained, model=_BrokenTowers(trained.manifest))
    with pytest.raises(InputDataError, match="not finite"):
        write_export(broken, options)
    assert [p.name for p in model.iterdir() if not p.name.endswith(".lock")] == ["2"]
    shutil.copytree(model, model.with_name("other"))
    write_models_config(model.parent)
    text = (model.parent / "models.config").read_text()
    found = text_format.Parse(text, ModelServerConfig()).model_config_list.config
    assert [(one.name, one.base_path, one.model_platform) for one in found] == [
        (name, str(model.with_name(name)), "tensorflow") for name in ("other", "shop")
    ]
