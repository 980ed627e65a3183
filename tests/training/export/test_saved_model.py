from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conf.encoders import ColumnEncoding, EncoderPlan, VocabularySpec
from conf.errors import InputDataError, InternalError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index, read_user_vectors
from training.export.embeddings import EmbeddingWriter
from training.export.saved_model import save_model, write_export
from training.export.serving_encoders import ServingEncoders
from training.input.vocabularies import Vocabulary

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
UNESCAPED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def _unescape(text: str) -> str:
    parts, position = [], 0
    while position < len(text):
        step = 2 if text[position] == "\\" else 1
        part = text[position : position + step]
        parts.append(UNESCAPED.get(part, part))
        position += step
    return "".join(parts)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=FLOATS),
    st.data(),
)
def test_both_files_hold_the_same_keys_and_bits(vectors: np.ndarray, data: st.DataObject) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\\t\n\rtn"))
    keys = data.draw(st.lists(text, min_size=len(vectors), max_size=len(vectors)))
    with tempfile.TemporaryDirectory() as name:
        with EmbeddingWriter(Path(name), "items", pa.string()) as writer:
            writer.write(pa.array(keys, pa.string()), np.arange(len(keys)), vectors)
        table = pq.read_table(Path(name) / "items.parquet")
        lines = (Path(name) / "items.txt").read_bytes().decode().split("\n")
    assert table["key"].to_pylist() == keys
    assert table["id"].to_pylist() == list(range(len(keys)))
    stored = np.array(table["vector"].to_pylist(), np.float32)
    assert stored.tobytes() == vectors.tobytes()
    assert lines.pop() == ""
    read = [line.split("\t") for line in lines]
    assert [_unescape(key) for key, _ in read] == keys
    parsed = np.array([[np.float32(v) for v in numbers.split(",")] for _, numbers in read])
    assert parsed.astype(np.float32).tobytes() == vectors.tobytes()


def test_rows_are_appended_and_integer_keys_stay_integers(tmp_path: Path) -> None:
    with EmbeddingWriter(tmp_path, "users", pa.int64()) as writer:
        for start in (0, 2):
            writer.write(pa.array([start, start + 1]), np.arange(2), np.ones((2, 3), np.float32))
        writer.write(pa.array([], pa.int64()), np.arange(0), np.ones((0, 3), np.float32))
        assert writer.rows == 4
    table = pq.read_table(tmp_path / "users.parquet")
    assert table.schema.field("key").type == pa.int64()
    assert table["key"].to_pylist() == [0, 1, 2, 3]
    assert (tmp_path / "users.txt").read_text().startswith("0\t1,1,1\n")


# Runs without Sluice on its path: what a serving host would do.
CLIENT = """
import json, sys
import numpy as np, tensorflow as tf
assert not any(name.split(".")[0] in ("conf", "training", "etl") for name in sys.modules)
root, asked = sys.argv[1], json.load(sys.stdin)
answers = {}
for name, (tower, signature, inputs) in asked.items():
    function = tf.saved_model.load(f"{root}/{tower}/1").signatures[signature]
    types = function.structured_input_signature[1]
    tensors = {k: tf.constant(v, types[k].dtype) for k, v in inputs.items()}
    answers[name] = function(**tensors)["embedding"].numpy().tolist()
print(json.dumps(answers))
"""


PAD = -(2**63)


@pytest.fixture(scope="module")
def trained(tiny_version: Path, tiny_manifest: Manifest) -> TrainedModel:
    config = TrainConfig.model_validate({"dataset": "d", "name": "n"})
    model = TinyTowers(tiny_manifest)
    return TrainedModel(Path(), model, config, tiny_manifest, tiny_version)


@pytest.fixture(scope="module")
def exported(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(replace(trained, run_dir=tmp_path_factory.mktemp("run")))


def _tokens(version: Path, name: str) -> list:
    return pq.read_table(version / "encoders" / f"{name}.parquet")["token"].to_pylist()


def _ask(exported: Path, questions: dict[str, tuple[str, str, dict]]) -> dict[str, np.ndarray]:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(exported)],
        input=json.dumps(questions),
        text=True,
        capture_output=True,
        check=False,
        cwd=exported,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return {name: np.array(v, np.float32) for name, v in json.loads(done.stdout).items()}


def test_a_fresh_process_without_sluice_gives_the_model_s_vectors(
    exported: Path, trained: TrainedModel
) -> None:
    version, model = trained.version_dir, trained.model
    movies, genders = _tokens(version, "movie_id"), _tokens(version, "gender")
    users = _tokens(version, "user_id")
    raw_user = {
        "user_id": [users[0], users[5], -77],
        "gender": [genders[0], "no such", genders[1]],
        "history": [[movies[3], movies[1], 999999], [movies[0], PAD, PAD], [PAD] * 3],
    }
    encoded_user = {
        "user_id": [2, 7, 1],
        "gender": [2, 1, 3],
        "history": [[5, 3, 1], [2, 0, 0], [0, 0, 0]],
    }
    raw_item = {
        "movie_id": [movies[4], -5],
        "genres": [["genre_0", "genre_all"], ["new", "<sluice:pad>"]],
    }
    genre_ids = {token: 2 + i for i, token in enumerate(_tokens(version, "genres"))}
    encoded_item = {
        "movie_id": [6, 1],
        "genres": [[genre_ids["genre_0"], genre_ids["genre_all"]], [1, 0]],
    }
    answers = _ask(
        exported,
        {
            "raw_user": ("user_tower", "serving_default", raw_user),
            "encoded_user": ("user_tower", "encoded", encoded_user),
            "raw_item": ("item_tower", "serving_default", raw_item),
            "encoded_item": ("item_tower", "encoded", encoded_item),
            "unknown": (
                "item_tower",
                "serving_default",
                {"movie_id": [-5, 10**12], "genres": [["x"], ["y"]]},
            ),
        },
    )
    direct_user = model.embed_users({n: tf.constant(v, tf.int64) for n, v in encoded_user.items()})
    direct_item = model.embed_items({n: tf.constant(v, tf.int64) for n, v in encoded_item.items()})
    for kind in ("raw", "encoded"):
        np.testing.assert_allclose(answers[f"{kind}_user"], direct_user, atol=1e-6)
        np.testing.assert_allclose(answers[f"{kind}_item"], direct_item, atol=1e-6)
    oov = model.embed_items(
        {"movie_id": tf.constant([1], tf.int64), "genres": tf.constant([[1]], tf.int64)}
    )
    np.testing.assert_allclose(answers["unknown"], np.repeat(oov, 2, axis=0), atol=1e-6)


def test_embedding_files_hold_every_item_and_user(exported: Path, trained: TrainedModel) -> None:
    folder = exported / "embeddings"
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    items = pq.read_table(folder / "items.parquet")
    assert items["id"].to_pylist() == index.ids.tolist()
    assert items["key"].to_pylist() == _tokens(trained.version_dir, "movie_id")
    np.testing.assert_allclose(items["vector"].to_pylist(), index.vectors, atol=1e-6)
    users = pq.read_table(folder / "users.parquet")
    [batch] = read_user_vectors(trained, seen=False)
    assert users["id"].to_pylist() == batch.ids.tolist()
    assert sorted(users["key"].to_pylist()) == sorted(_tokens(trained.version_dir, "user_id"))
    np.testing.assert_allclose(users["vector"].to_pylist(), batch.vectors, atol=1e-6)
    for name, table in (("items", items), ("users", users)):
        lines = [line.split("\t") for line in (folder / f"{name}.txt").read_text().splitlines()]
        assert [int(key) for key, _ in lines] == table["key"].to_pylist()
        numbers = np.array([[np.float32(n) for n in v.split(",")] for _, v in lines])
        np.testing.assert_array_equal(numbers, np.array(table["vector"].to_pylist(), np.float32))


def test_the_export_explains_itself(exported: Path, trained: TrainedModel) -> None:
    card = json.loads((exported / "export.json").read_text())
    assert card["dataset_version"] == trained.manifest.dataset_version
    assert card["embeddings"]["dim"] == 6
    inputs = card["towers"]["user_tower"]["signatures"]["serving_default"]["inputs"]
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


def test_a_tower_carries_its_own_variables_only(exported: Path, trained: TrainedModel) -> None:
    tables = trained.model.tables
    for tower, names in (
        ("user_tower", ("user_id", "gender", "movie_id")),
        ("item_tower", ("movie_id", "genres")),
    ):
        stored = tf.train.list_variables(str(exported / tower / "1" / "variables" / "variables"))
        shapes = sorted(tuple(shape) for key, shape in stored if len(shape) == 2)
        assert shapes == sorted(tuple(tables[name].shape) for name in names)


class _BrokenTowers(TinyTowers):
    def embed_users(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        return super().embed_users(features) * float("inf")


def test_a_failed_export_leaves_the_earlier_one(trained: TrainedModel, tmp_path: Path) -> None:
    target = write_export(replace(trained, run_dir=tmp_path))
    before = (target / "export.json").read_bytes()
    broken = replace(trained, run_dir=tmp_path, model=_BrokenTowers(trained.manifest))
    with pytest.raises(InputDataError, match="not finite"):
        write_export(broken)
    assert (target / "export.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "export"]


def test_a_full_disk_is_named_and_leaves_the_earlier_export(
    trained: TrainedModel, tmp_path: Path
) -> None:
    target = write_export(replace(trained, run_dir=tmp_path))
    before = (target / "export.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # every write beyond fails
    try:
        with pytest.raises(InternalError, match="cannot write the export") as caught:
            write_export(replace(trained, run_dir=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.fix
    assert (target / "export.json").read_bytes() == before


@pytest.mark.parametrize("name", ["user.id", "Größe", "1st", "self", "training"])
def test_features_of_any_name_can_be_served(name: str, tmp_path: Path) -> None:
    vocabulary = Vocabulary("v", "int64", pa.array([50, 60]))
    spec = FeatureSpec(name, "int64", "user", encoding="v", vocabulary_size=4)
    plan = EncoderPlan(
        FeatureSchema((spec,)),
        (ColumnEncoding(name, name, "int64", "v"),),
        (VocabularySpec("v", "int64", "v.parquet", 4, ""),),
    )
    encoders = ServingEncoders(plan, (name,), {"v": vocabulary})
    table = tf.Variable(tf.reshape(tf.range(8.0), (4, 2)))
    save_model(
        tmp_path / "1", encoders, {name: spec}, lambda x: {"embedding": tf.gather(table, x[name])}
    )
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    asked = encoders.inputs[0].name
    for signature, value in (("serving_default", 60), ("encoded", 3)):
        found = signatures[signature](**{asked: tf.constant([value], tf.int64)})
        assert found["embedding"].numpy().tolist() == [[6.0, 7.0]]
