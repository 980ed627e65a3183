"""Lists by vectors: which rows get them, of which items, against brute force."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError
from conf.training.train import TrainConfig
from tests.training.apply.predictions import open_export, write_lists
from tests.training.tiny_dataset import TinyConfig, _draw_log, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.apply.answers import Asked, Source
from training.apply.predict import predict_rows
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index
from training.raw_inputs.files import RawFile

HELD_OUT = TinyConfig(leave_out=3, events_per_user=20, own_group=0.6, items=60)
Embed = Callable[..., np.ndarray]
Score = Callable[..., dict[int, float]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A dataset with three events of each user in validation, and three in test."""
    version = write_tiny_dataset(tmp_path_factory.mktemp("several"), config=HELD_OUT)
    values = {"dataset": "d", "name": "n", "evaluation": {"batch_size": 17}}
    manifest, config = read_manifest(version), TrainConfig.model_validate(values)
    return TrainedModel(Path(), TinyTowers(manifest), config, manifest, version)


@pytest.fixture(scope="module")
def ids(trained: TrainedModel) -> dict[str, dict]:
    """Ids of raw values, by feature."""
    found = {}
    for name in ("user_id", "movie_id", "gender", "genres"):
        table = pq.read_table(trained.version_dir / "encoders" / f"{name}.parquet")
        found[name] = dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))
    return found


@pytest.fixture(scope="module")
def embed(trained: TrainedModel, ids: dict[str, dict]) -> Embed:
    """The vector of a user who did something, earliest first."""

    def find(user: int | None, history: list[int], gender: str | None = None) -> np.ndarray:
        recent = [ids["movie_id"].get(item, 1) for item in history[::-1]][: HELD_OUT.max_len]
        gender = gender or "FM"[((user or 1000) - 1000) % 2]
        features = {
            "user_id": np.array([ids["user_id"].get(user, 1)]),
            "gender": np.array([ids["gender"][gender]]),
            "history": np.array([recent + [0] * (HELD_OUT.max_len - len(recent))]),
        }
        return trained.model.embed_users(features).numpy()[0]

    return find


@pytest.fixture(scope="module")
def score(trained: TrainedModel, ids: dict[str, dict], embed: Embed) -> Score:
    """Scores of the catalogue by raw item."""
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    raw = {number: item for item, number in ids["movie_id"].items()}

    def find(*user: Any) -> dict[int, float]:
        scores = index.vectors @ embed(*user)
        return {raw[int(i)]: float(s) for i, s in zip(index.ids, scores, strict=True)}

    return find


def find_best(scores: dict[int, float], k: int, without: list[int]) -> list[int]:
    return [i for i in sorted(scores, key=lambda i: -scores[i]) if i not in set(without)][:k]


def read(file: Path) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("as_of", "later", "k", "keep_seen"),
    [("train", 6, 7, False), ("validation", 3, 1000, False), ("test", 0, 7, True)],
)
def test_users_get_the_best_items_that_they_had_not_met_by_a_split(
    trained: TrainedModel, score: Score, tmp_path: Path, as_of: str, later: int, k: int,
    keep_seen: bool,
) -> None:  # fmt: skip
    file, again = tmp_path / "lists.json.gz", tmp_path / "again.json.gz"
    write_lists(trained, file, k, Source(as_of=as_of), keep_seen=keep_seen)
    rows, events = read(file), _draw_log(HELD_OUT).events
    assert len(rows) == len({row["user"] for row in rows}) == len(events)
    for row in rows:
        known = events[row["user"]][: len(events[row["user"]]) - later]
        scores = score(row["user"], known)
        assert row["items"] == find_best(scores, k, [] if keep_seen else known)
        np.testing.assert_allclose(row["scores"], [scores[i] for i in row["items"]], rtol=1e-4)
    source = Source(as_of=as_of) if later else Source()  # Without one: as of the end of the log.
    write_lists(trained, again, k, source, keep_seen=keep_seen)
    assert again.read_bytes() == file.read_bytes()


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


def test_users_of_a_file_alone_get_lists(
    trained: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users, file = tmp_path / "users.csv", tmp_path / "o.json.gz"
    users.write_text('\ufeffuser_id,note\n1007,x\n5,y\n "1003",\n6,\n')
    source = Source(as_of="validation", users=RawFile(users))
    with caplog.at_level(logging.WARNING, "sluice.training.predict"):
        write_lists(trained, file, 5, source)
    assert sorted(row["user"] for row in read(file)) == [1003, 1007]
    assert "users.csv: 2 of 4 keys match nothing, the first 5" in caplog.text
    for bad, said in (("1007\n5\n 1007\n", "a key twice"), ('1007\n""\n', "row 2: there is no key"),
                      ("5\n", "no user of")):  # fmt: skip
        users.write_text(f"user_id\n{bad}")
        with pytest.raises(InputDataError, match=said):
            write_lists(trained, file, 5, source)


def test_candidates_of_a_file_are_ranked(
    trained: TrainedModel, score: Score, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, file = [104, 131, 120, 7, 117, 100, 8], tmp_path / "o.json.gz"
    (tmp_path / "pool.csv").write_text("movie_id\n" + "".join(f"{item}\n" for item in pool))
    asked = {"candidates": RawFile(tmp_path / "pool.csv")}
    write_lists(trained, file, 4, Source(as_of="validation"), **asked)
    assert "pool.csv: 2 of 7 keys match nothing, the first 7" in caplog.text
    events = _draw_log(HELD_OUT).events
    for row in read(file):
        met = events[row["user"]][:-3]
        scores = {i: s for i, s in score(row["user"], met).items() if i in pool}
        assert row["items"] == find_best(scores, 4, met)
    export, own = open_export(trained), tmp_path / "export.json.gz"
    for more in (asked, {}):  # Users of an export get the lists of its run.
        predict_rows(export, Source(), Asked(k=4, **more), own)
        write_lists(trained, file, 4, Source(), **more)
        assert own.read_bytes() == file.read_bytes()
    with pytest.raises(ConfigError, match="no split"):
        predict_rows(export, Source(as_of="test"), Asked(), own)
    (tmp_path / "pool.csv").write_text("movie_id\n5\n6\n")
    with pytest.raises(InputDataError, match="no item of"):
        write_lists(trained, file, 3, **asked)


def test_candidates_that_bring_their_inputs_need_not_be_known(
    trained: TrainedModel, ids: dict[str, dict], embed: Embed, tmp_path: Path
) -> None:
    described = {104: ["genre_3"], 9001: ["genre_1", "genre_all"], 9002: ["genre_2"]}
    pool, rows, file = (tmp_path / name for name in ("pool.jsonl", "rows.csv", "o.json.gz"))
    pool.write_text("".join(f"{json.dumps({'movie_id': item, 'genres': names})}\n"
                            for item, names in described.items()))  # fmt: skip
    rows.write_text("line,user_id,gender,history\n4,1001,M,105|104\n9,,F,\n")
    write_lists(trained, file, 9, Source(file=RawFile(rows, "line")), candidates=RawFile(pool))
    vectors = {}
    for item, names in described.items():
        features = {"movie_id": np.array([ids["movie_id"].get(item, 1)]),
                    "genres": np.array([[ids["genres"][name] for name in names]])}  # fmt: skip
        vectors[item] = trained.model.embed_items(features).numpy()[0]
    users = [embed(1001, [104, 105], "M"), embed(None, [], "F")]
    for name, vector, row in zip(("4", "9"), users, read(file), strict=True):
        scores = {item: float(vectors[item] @ vector) for item in vectors}
        assert (row["id"], row["items"]) == (name, find_best(scores, 9, []))
        np.testing.assert_allclose(row["scores"], sorted(scores.values(), reverse=True), rtol=1e-5)
