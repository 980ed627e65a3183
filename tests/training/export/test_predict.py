from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index, read_user_vectors
from training.export import predict
from training.export.predict import write_recommendations
from training.input.batches import build_eval_dataset
from training.input.vocabularies import Vocabulary


@pytest.fixture(scope="module")
def trained(tiny_version: Path, tiny_manifest: Manifest) -> TrainedModel:
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "evaluation": {"batch_size": 17}}
    )
    return TrainedModel(Path(), TinyTowers(tiny_manifest), config, tiny_manifest, tiny_version)


def _read(file: Path) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _expected(trained: TrainedModel, k: int, mask_seen: bool) -> dict[int, list[int]]:
    """Lists by brute force in float64, with raw tokens."""
    vocabularies = {
        name: pq.read_table(trained.version_dir / "encoders" / f"{name}.parquet")[
            "token"
        ].to_pylist()
        for name in ("user_id", "movie_id")
    }
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    lists = {}
    rows = build_eval_dataset(
        trained.version_dir, trained.manifest, "users", 1, ("user_id", "seen"), ("seen",)
    )
    vectors = np.concatenate([b.vectors for b in read_user_vectors(trained, seen=False)])
    for row, vector in zip(rows, vectors, strict=True):
        scores = index.vectors.astype(np.float64) @ vector.astype(np.float64)
        met = set(row["seen"].values.numpy().tolist()) if mask_seen else set()
        order = [i for i in np.argsort(-scores, kind="stable") if index.ids[i] not in met][:k]
        user = vocabularies["user_id"][int(row["user_id"][0]) - 2]
        lists[user] = [vocabularies["movie_id"][index.ids[i] - 2] for i in order]
    return lists


@pytest.mark.parametrize(("k", "mask_seen"), [(5, True), (1000, True), (5, False)])
def test_lists_are_the_best_items_that_the_user_has_not_met(
    trained: TrainedModel, tmp_path: Path, k: int, mask_seen: bool
) -> None:
    file, counts = write_recommendations(replace(trained, run_dir=tmp_path), k, mask_seen)
    rows = _read(file)
    assert counts.users == len(rows) == 60
    assert counts.users_outside_vocabulary == 0
    assert {row["user"]: row["items"] for row in rows} == _expected(trained, k, mask_seen)
    for row in rows:
        assert len(row["scores"]) == len(row["items"])
        assert row["scores"] == sorted(row["scores"], reverse=True)
        assert all(float(np.float32(score)) == pytest.approx(score) for score in row["scores"])


def test_the_same_run_gives_the_same_bytes(trained: TrainedModel, tmp_path: Path) -> None:
    first = write_recommendations(replace(trained, run_dir=tmp_path), 5, True)[0].read_bytes()
    second = write_recommendations(replace(trained, run_dir=tmp_path), 5, True)[0].read_bytes()
    assert first == second
    assert first[4:8] == b"\0\0\0\0"
    assert [p.name for p in tmp_path.iterdir()] == ["recommendations.json.gz"]


def test_masking_needs_seen_items(trained: TrainedModel, tmp_path: Path) -> None:
    keys = replace(trained.manifest.keys, seen=None)
    blind = replace(trained, manifest=replace(trained.manifest, keys=keys))
    with pytest.raises(ConfigError, match="does not carry them"):
        write_recommendations(replace(blind, run_dir=tmp_path), 5, True)
    assert write_recommendations(replace(blind, run_dir=tmp_path), 5, False)[1].users == 60


def test_users_without_a_known_token_are_left_out_and_counted(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = predict.read_key_vocabulary

    def without_last_users(version_dir: Path, manifest: Manifest, feature: str) -> Vocabulary:
        vocabulary = whole(version_dir, manifest, feature)
        assert vocabulary is not None
        left_out = 5 if feature == "user_id" else 0
        return replace(vocabulary, tokens=vocabulary.tokens[: len(vocabulary.tokens) - left_out])

    monkeypatch.setattr(predict, "read_key_vocabulary", without_last_users)
    file, counts = write_recommendations(replace(trained, run_dir=tmp_path), 5, True)
    assert (counts.users, counts.users_outside_vocabulary) == (55, 5)
    assert len(_read(file)) == 55


def test_text_tokens_are_json(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(version_dir: Path, manifest: Manifest, feature: str) -> Vocabulary:
        size = manifest.schema[feature].vocabulary_size or 0
        return Vocabulary("v", "string", pa.array([f'"{i}\\\n\u00e9' for i in range(size - 2)]))

    monkeypatch.setattr(predict, "read_key_vocabulary", texts)
    rows = _read(write_recommendations(replace(trained, run_dir=tmp_path), 5, True)[0])
    assert all(row["items"][0].endswith("\\\n\u00e9") for row in rows)
