"""Lists by vectors: which rows get them, of which items, against brute force."""

from __future__ import annotations

import functools
import gzip
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.predictions import open_export, write_lists
from tests.training.tiny_dataset import TinyConfig, _draw_log, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.apply import rows as apply_rows
from training.apply.answers import Asked, Source
from training.apply.predict import predict_rows
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import Vocabulary
from training.evaluation.item_index import ItemIndex, build_item_index, read_user_vectors
from training.input.batches import build_eval_dataset
from training.raw_inputs.files import RawFile


def build(version: Path, manifest: Manifest) -> TrainedModel:
    values = {"dataset": "d", "name": "n", "evaluation": {"batch_size": 17}}
    config = TrainConfig.model_validate(values)
    return TrainedModel(Path(), TinyTowers(manifest), config, manifest, version)


@pytest.fixture(scope="module")
def trained(tiny_version: Path, tiny_manifest: Manifest) -> TrainedModel:
    return build(tiny_version, tiny_manifest)


def read(file: Path) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def sort_items(trained: TrainedModel, k: int, mask_seen: bool) -> dict[int, list[int]]:
    """Lists by brute force in float64, with raw tokens."""
    tokens = {name: list(find_ids(trained, name)) for name in ("user_id", "movie_id")}
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    rows = build_eval_dataset(
        trained.version_dir, trained.manifest, "users", 1, ("user_id", "seen"), ("seen",)
    )
    vectors = np.concatenate([b.vectors for b in read_user_vectors(trained, seen=False)])
    lists = {}
    for row, vector in zip(rows, vectors, strict=True):
        scores = index.vectors.astype(np.float64) @ vector.astype(np.float64)
        met = set(row["seen"].values.numpy().tolist()) if mask_seen else set()
        order = [i for i in np.argsort(-scores, kind="stable") if index.ids[i] not in met][:k]
        user = tokens["user_id"][int(row["user_id"][0]) - 2]
        lists[user] = [tokens["movie_id"][index.ids[i] - 2] for i in order]
    return lists


@pytest.mark.parametrize(("k", "keep_seen"), [(5, False), (1000, False), (5, True)])
def test_lists_are_the_best_items_that_the_user_has_not_met(
    trained: TrainedModel, tmp_path: Path, k: int, keep_seen: bool
) -> None:
    file = tmp_path / "lists.json.gz"
    done = write_lists(trained, file, k, keep_seen=keep_seen)
    rows = read(file)
    assert (done.rows, done.left_out) == (len(rows), 0) == (60, 0)
    assert {row["user"]: row["items"] for row in rows} == sort_items(trained, k, not keep_seen)
    assert all(row["scores"] == sorted(row["scores"], reverse=True) for row in rows)
    write_lists(trained, tmp_path / "again.json.gz", k, keep_seen=keep_seen)
    assert (tmp_path / "again.json.gz").read_bytes() == file.read_bytes()


def test_lists_without_what_tells_seen_items_are_refused(
    trained: TrainedModel, tmp_path: Path
) -> None:
    for keys, source, keep_seen, said in (
        ({"seen": None}, Source(), False, "cannot be left out"),
        ({"seen": None}, Source(as_of="train"), True, "seen items"),
        ({"seen": None, "user": None}, Source(as_of="train"), True, "has no user"),
    ):
        manifest = replace(trained.manifest, keys=replace(trained.manifest.keys, **keys))
        blind = replace(trained, manifest=manifest)
        with pytest.raises(ConfigError, match=said):
            write_lists(blind, tmp_path / "l.jsonl", 5, source, keep_seen=keep_seen)


def test_users_of_an_export_get_the_lists_of_its_run(trained: TrainedModel, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("run.jsonl", "export.jsonl")]
    write_lists(trained, files[0], 5)
    export = open_export(trained)
    predict_rows(export, Source(), Asked(k=5), files[1])
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ConfigError, match="no split"):
        predict_rows(export, Source(as_of="test"), Asked(), files[1])


def test_users_without_a_known_token_are_left_out_and_counted(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = apply_rows.read_key_vocabulary

    def without_last(version_dir: Path, manifest: Manifest, feature: str) -> Vocabulary:
        vocabulary = whole(version_dir, manifest, feature)
        assert vocabulary is not None
        return replace(vocabulary, tokens=vocabulary.tokens[: len(vocabulary.tokens) - 5])

    monkeypatch.setattr(apply_rows, "read_key_vocabulary", without_last)
    done = write_lists(trained, tmp_path / "l.json.gz", 5)
    assert (done.rows, done.left_out, len(read(tmp_path / "l.json.gz"))) == (55, 5, 55)


HELD_OUT = TinyConfig(leave_out=3, events_per_user=20, own_group=0.6, items=60)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A dataset with three events of each user in validation, and three in test."""
    version = write_tiny_dataset(tmp_path_factory.mktemp("several"), config=HELD_OUT)
    return build(version, read_manifest(version))


def find_ids(trained: TrainedModel, name: str) -> dict:
    return read_ids(Path(str(trained.version_dir)), name)


@functools.cache
def read_ids(version: Path, name: str) -> dict:
    table = pq.read_table(version / "encoders" / f"{name}.parquet")
    return dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))


Score = Callable[..., dict[int, float]]


@pytest.fixture(scope="module")
def score(several: TrainedModel) -> Score:
    """Scores of the catalogue by raw item, for what a user did, earliest first."""
    items, users = find_ids(several, "movie_id"), find_ids(several, "user_id")
    where = (several.version_dir, several.manifest)
    index: ItemIndex = build_item_index(several.model, *where, 64)
    raw = {number: item for item, number in items.items()}

    def find(user: int | None, history: list[int], gender: str | None = None) -> dict[int, float]:
        recent = [items.get(item, 1) for item in history[::-1]][: HELD_OUT.max_len]
        gender = gender or "FM"[((user or 1000) - 1000) % 2]
        features = {
            "user_id": np.array([users.get(user, 1)]),
            "gender": np.array([find_ids(several, "gender")[gender]]),
            "history": np.array([recent + [0] * (HELD_OUT.max_len - len(recent))]),
        }
        scores = index.vectors @ several.model.embed_users(features).numpy()[0]
        return {raw[int(i)]: float(s) for i, s in zip(index.ids, scores, strict=True)}

    return find


def find_best(scores: dict[int, float], k: int, without: list[int]) -> list[int]:
    return [i for i in sorted(scores, key=lambda i: -scores[i]) if i not in set(without)][:k]


@pytest.mark.parametrize(("as_of", "later"), [("train", 6), ("validation", 3), ("test", 0)])
def test_users_are_ranked_as_of_a_split(
    several: TrainedModel, score: Score, tmp_path: Path, as_of: str, later: int
) -> None:
    file = tmp_path / "lists.json.gz"
    write_lists(several, file, 7, Source(as_of=as_of))
    rows, events = read(file), _draw_log(HELD_OUT).events
    assert len(rows) == len({row["user"] for row in rows}) == len(events)
    for row in rows:
        known = events[row["user"]][: len(events[row["user"]]) - later]
        assert row["items"] == find_best(score(row["user"], known), 7, known)
    if not later:  # The end of the log.
        write_lists(several, tmp_path / "now.json.gz", 7)
        assert (tmp_path / "now.json.gz").read_bytes() == file.read_bytes()


def test_users_of_a_file_alone_get_lists(
    several: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users, file = tmp_path / "users.csv", tmp_path / "o.json.gz"
    users.write_text('\ufeffuser_id,note\n1007,x\n5,y\n "1003",\n6,\n')
    source = Source(as_of="validation", users=RawFile(users))
    with caplog.at_level(logging.WARNING, "sluice.training.predict"):
        write_lists(several, file, 5, source)
    assert sorted(row["user"] for row in read(file)) == [1003, 1007]
    assert "users.csv: 2 of 4 keys match nothing, the first 5" in caplog.text
    for bad, said in (("1007\n5\n 1007\n", "a key twice"), ('1007\n""\n', "row 2: there is no key"),
                      ("5\n", "no user of")):  # fmt: skip
        users.write_text(f"user_id\n{bad}")
        with pytest.raises(InputDataError, match=said):
            write_lists(several, file, 5, source)


def test_candidates_of_a_file_are_ranked(
    several: TrainedModel, score: Score, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, file = [104, 131, 120, 7, 117, 100, 8], tmp_path / "o.json.gz"
    (tmp_path / "pool.csv").write_text("movie_id\n" + "".join(f"{item}\n" for item in pool))
    asked = {"candidates": RawFile(tmp_path / "pool.csv")}
    with caplog.at_level(logging.WARNING, "sluice.training.predict"):
        write_lists(several, file, 4, Source(as_of="validation"), **asked)
    assert "pool.csv: 2 of 7 keys match nothing, the first 7" in caplog.text
    events = _draw_log(HELD_OUT).events
    for row in read(file):
        met = events[row["user"]][:-3]
        scores = {i: s for i, s in score(row["user"], met).items() if i in pool}
        assert row["items"] == find_best(scores, 4, met)
    given = [{"line": 4, "user_id": None, "gender": "F", "history": []},
             {"line": 9, "user_id": 1001, "gender": "M", "history": [104] * 10_000}]  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    write_lists(several, file, 3, Source(file=RawFile(rows, "line")), **asked)
    (tmp_path / "pool.csv").write_text("movie_id\n5\n6\n")
    with pytest.raises(InputDataError, match="no item of"):
        write_lists(several, tmp_path / "none.json.gz", 3, **asked)
    for row, entry in zip(given, read(file), strict=True):
        scores = score(row["user_id"], row["history"], row["gender"])
        pooled = {i: s for i, s in scores.items() if i in pool}
        assert (entry["id"], entry["items"]) == (row["line"], find_best(pooled, 3, []))


def test_candidates_that_bring_their_inputs_need_not_be_known(
    several: TrainedModel, tmp_path: Path
) -> None:
    described = [
        {"movie_id": 104, "genres": ["genre_3"]},
        {"movie_id": 9001, "genres": ["genre_1", "genre_all"]},
        {"movie_id": 9002, "genres": ["genre_2"]},
    ]
    pool, rows = tmp_path / "pool.jsonl", tmp_path / "rows.csv"
    pool.write_text("".join(json.dumps(row) + "\n" for row in described))
    rows.write_text("user_id,gender,history\n1001,M,104|105\n,F,\n")
    write_lists(
        several, tmp_path / "o.json.gz", 9, Source(file=RawFile(rows)), candidates=RawFile(pool)
    )
    genres, items = find_ids(several, "genres"), find_ids(several, "movie_id")
    vectors = {
        row["movie_id"]: several.model.embed_items(
            {
                "movie_id": np.array([items.get(row["movie_id"], 1)]),
                "genres": np.array([[genres[name] for name in row["genres"]]]),
            }
        ).numpy()[0]
        for row in described
    }
    users = several.model.embed_users(
        {
            "user_id": np.array([find_ids(several, "user_id")[1001], 1]),
            "gender": np.array([find_ids(several, "gender")[name] for name in "MF"]),
            "history": np.array([[items[104], items[105]], [0, 0]]),
        }
    ).numpy()
    for row, vector in zip(read(tmp_path / "o.json.gz"), users, strict=True):
        scores = {item: float(vectors[item] @ vector) for item in vectors}
        assert row["items"] == sorted(scores, key=lambda i: -scores[i])
        np.testing.assert_allclose(row["scores"], sorted(scores.values(), reverse=True), rtol=1e-5)
