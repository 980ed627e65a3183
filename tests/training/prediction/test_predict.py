from __future__ import annotations

import functools
import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training.prediction import rankers, rows_to_rank
from training.prediction.predict import write_recommendations
from training.prediction.rows_to_rank import ListSource

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, _draw_log, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import Vocabulary
from training.evaluation.item_index import ItemIndex, build_item_index, read_user_vectors
from training.input.batches import build_eval_dataset
from training.raw_inputs.files import RawFile


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
    whole = rows_to_rank.read_key_vocabulary

    def without_last_users(version_dir: Path, manifest: Manifest, feature: str) -> Vocabulary:
        vocabulary = whole(version_dir, manifest, feature)
        assert vocabulary is not None
        left_out = 5 if feature == "user_id" else 0
        return replace(vocabulary, tokens=vocabulary.tokens[: len(vocabulary.tokens) - left_out])

    monkeypatch.setattr(rows_to_rank, "read_key_vocabulary", without_last_users)
    file, counts = write_recommendations(replace(trained, run_dir=tmp_path), 5, True)
    assert (counts.users, counts.users_outside_vocabulary) == (55, 5)
    assert len(_read(file)) == 55


def test_text_tokens_are_json(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(version_dir: Path, manifest: Manifest, feature: str) -> Vocabulary:
        size = manifest.schema[feature].vocabulary_size or 0
        return Vocabulary("v", "string", pa.array([f'"{i}\\\n\u00e9' for i in range(size - 2)]))

    monkeypatch.setattr(rankers, "read_key_vocabulary", texts)
    monkeypatch.setattr(rows_to_rank, "read_key_vocabulary", texts)
    rows = _read(write_recommendations(replace(trained, run_dir=tmp_path), 5, True)[0])
    assert all(row["items"][0].endswith("\\\n\u00e9") for row in rows)


HELD_OUT = TinyConfig(leave_out=3, events_per_user=20, own_group=0.6, items=60)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A dataset with three events of each user in validation, and three in test."""
    version = write_tiny_dataset(tmp_path_factory.mktemp("several"), config=HELD_OUT)
    manifest = read_manifest(version)
    config = TrainConfig.model_validate({"dataset": "d", "name": "n"})
    return TrainedModel(Path(), TinyTowers(manifest), config, manifest, version)


def _ids(trained: TrainedModel, name: str) -> dict:
    return _read_ids(Path(str(trained.version_dir)), name)


@functools.cache
def _read_ids(version: Path, name: str) -> dict:
    table = pq.read_table(version / "encoders" / f"{name}.parquet")
    return dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))


_INDEXES: dict[str, ItemIndex] = {}


def _index(version: str, trained: TrainedModel) -> ItemIndex:
    if version not in _INDEXES:
        _INDEXES[version] = build_item_index(
            trained.model, trained.version_dir, trained.manifest, 64
        )
    return _INDEXES[version]


def _score(
    trained: TrainedModel, user: int | None, history: list[int], gender: str | None = None
) -> dict[int, float]:
    """Scores of the catalogue by raw item, for what a user did, earliest first."""
    items, users = _ids(trained, "movie_id"), _ids(trained, "user_id")
    recent = [items.get(item, 1) for item in history[::-1]][: HELD_OUT.max_len]
    gender = gender or "FM"[((user or 1000) - 1000) % 2]
    vector = trained.model.embed_users(
        {
            "user_id": np.array([users.get(user, 1)]),
            "gender": np.array([_ids(trained, "gender")[gender]]),
            "history": np.array([recent + [0] * (HELD_OUT.max_len - len(recent))]),
        }
    ).numpy()[0]
    index = _index(str(trained.version_dir), trained)
    raw = {number: item for item, number in items.items()}
    scores = index.vectors @ vector
    return {raw[int(i)]: float(s) for i, s in zip(index.ids, scores, strict=True)}


def _best(scores: dict[int, float], k: int, without: list[int]) -> list[int]:
    met = set(without)
    return [i for i in sorted(scores, key=lambda i: -scores[i]) if i not in met][:k]


@pytest.mark.parametrize(("as_of", "later"), [("train", 6), ("validation", 3), ("test", 0)])
def test_users_are_ranked_as_of_a_split(
    several: TrainedModel, tmp_path: Path, as_of: str, later: int
) -> None:
    target = tmp_path / "lists.json.gz"
    file, counts = write_recommendations(several, 7, True, ListSource(as_of=as_of), target=target)
    rows, events = _read(file), _draw_log(HELD_OUT).events
    assert counts.users == len(rows) == len({row["user"] for row in rows}) == len(events)
    for row in rows:
        known = events[row["user"]][: len(events[row["user"]]) - later]
        assert row["items"] == _best(_score(several, row["user"], known), 7, known)


def test_the_end_of_test_is_the_end_of_the_log(several: TrainedModel, tmp_path: Path) -> None:
    now, _ = write_recommendations(several, 5, True, target=tmp_path / "a.json.gz")
    source = ListSource(as_of="test")
    end, _ = write_recommendations(several, 5, True, source, target=tmp_path / "b.json.gz")
    assert end.read_bytes() == now.read_bytes()


def test_as_of_needs_users_and_seen_items(several: TrainedModel, tmp_path: Path) -> None:
    without = {"has no user": {"user": None, "seen": None}, "seen items": {"seen": None}}
    for said, keys in without.items():
        manifest = replace(several.manifest, keys=replace(several.manifest.keys, **keys))
        with pytest.raises(ConfigError, match=said):
            write_recommendations(
                replace(several, manifest=manifest, run_dir=tmp_path), 5, False,
                ListSource(as_of="train"),
            )  # fmt: skip


def test_users_of_a_file_alone_get_lists(
    several: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "users.csv").write_text('\ufeffuser_id,note\n1007,x\n5,y\n "1003",\n6,\n')
    source = ListSource(as_of="validation", users=RawFile(tmp_path / "users.csv"))
    with caplog.at_level(logging.WARNING, "sluice.training.predict"):
        file, _ = write_recommendations(several, 5, True, source, target=tmp_path / "o.json.gz")
    assert sorted(row["user"] for row in _read(file)) == [1003, 1007]
    assert "users.csv: 2 of 4 keys match nothing, the first 5" in caplog.text
    for bad, said in (
        ("1007\n5\n 1007\n", "a key twice"),
        ('1007\n""\n', "row 2: there is no key"),
    ):
        (tmp_path / "users.csv").write_text(f"user_id\n{bad}")
        with pytest.raises(InputDataError, match=said):
            write_recommendations(several, 5, True, source, target=tmp_path / "o.json.gz")
    (tmp_path / "users.csv").write_text("user_id\n5\n")
    with pytest.raises(InputDataError, match="no user of"):
        write_recommendations(several, 5, True, source, target=tmp_path / "o.json.gz")


def test_candidates_of_a_file_are_ranked(
    several: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = [104, 131, 120, 7, 117, 100, 8]
    (tmp_path / "pool.csv").write_text("movie_id\n" + "".join(f"{item}\n" for item in pool))
    file = RawFile(tmp_path / "pool.csv")
    source = ListSource(as_of="validation")
    with caplog.at_level(logging.WARNING, "sluice.training.predict"):
        written, _ = write_recommendations(
            several, 4, True, source, candidates=file, target=tmp_path / "o.json.gz"
        )
    assert "pool.csv: 2 of 7 keys match nothing, the first 7" in caplog.text
    events = _draw_log(HELD_OUT).events
    known = set(_ids(several, "movie_id"))
    for row in _read(written):
        met = events[row["user"]][:-3]
        scores = {i: s for i, s in _score(several, row["user"], met).items() if i in pool}
        assert row["items"] == _best(scores, 4, met)
        assert set(row["items"]) <= known
    sequences = [{"line": 4, "user_id": None, "gender": "F", "history": []}]
    sequences.append({"line": 9, "user_id": 1001, "gender": "M", "history": [104] * 10_000})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in sequences))
    source = ListSource(file=RawFile(rows, "line"))
    written, _ = write_recommendations(
        several, 3, True, source, candidates=file, target=tmp_path / "o.json.gz"
    )
    lists = {row["id"]: row["items"] for row in _read(written)}
    pooled = [i for i in pool if i in known]
    for line, user, history, gender in ((4, None, [], "F"), (9, 1001, [104] * 10_000, "M")):
        scores = _score(several, user, history, gender)
        assert lists[line] == _best({i: scores[i] for i in pooled}, 3, [])


def test_candidates_that_bring_their_inputs_need_not_be_known(
    several: TrainedModel, tmp_path: Path
) -> None:
    described = [
        {"movie_id": 104, "genres": ["genre_3"]},
        {"movie_id": 9001, "genres": ["genre_1", "genre_all"]},
        {"movie_id": 9002, "genres": ["genre_2"]},
    ]
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in described))
    (tmp_path / "rows.csv").write_text("user_id,gender,history\n1001,M,104|105\n,F,\n")
    source = ListSource(file=RawFile(tmp_path / "rows.csv"))
    written, _ = write_recommendations(
        several, 9, True, source, candidates=RawFile(path), target=tmp_path / "o.json.gz"
    )
    genres, items = _ids(several, "genres"), _ids(several, "movie_id")
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
            "user_id": np.array([_ids(several, "user_id")[1001], 1]),
            "gender": np.array([_ids(several, "gender")[name] for name in "MF"]),
            "history": np.array([[items[104], items[105]], [0, 0]]),
        }
    ).numpy()
    for row, vector in zip(_read(written), users, strict=True):
        scores = {item: float(vectors[item] @ vector) for item in vectors}
        assert row["items"] == sorted(scores, key=lambda i: -scores[i])
        np.testing.assert_allclose(row["scores"], sorted(scores.values(), reverse=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("movie_id\n", "has no rows"),
        ("movie\n104\n", "lacks columns"),
        ("movie_id\n5\n6\n", "is in the catalogue"),
        ("movie_id,x\n104,1\n,2\n", "row 2: there is no key"),
        ("movie_id\n104\n5\n 104\n", "a key twice"),
        ("movie_id\nx\n", "must be whole numbers"),
    ],
)
def test_candidates_that_cannot_be_ranked_are_refused(
    several: TrainedModel, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "pool.csv").write_text(content)
    pool = RawFile(tmp_path / "pool.csv")
    with pytest.raises(InputDataError, match=said):
        write_recommendations(several, 5, True, candidates=pool, target=tmp_path / "o.json.gz")
    assert not (tmp_path / "o.json.gz").exists()
