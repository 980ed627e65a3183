"""Times of a sequence's items under HSTU: ages, bad times, requests with raw times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.export import ExportOptions, IndexOptions
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import HSTUConfig
from conf.training.train import TrainConfig
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.models.sequence import UNKNOWN_AGE, ItemTimes, SequenceModel, find_item_times
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import ServerConfig

Array = np.ndarray
GAPS = {"times": "history_age"}
KNOWN = {"times": "history_time", "request_time": "asked_at"}
OWN = {"times": "history_time"}


def configure(**changes: Any) -> TrainConfig:
    model = {"name": "hstu", "embedding_dim": 8, "heads": 2, "item_features": ["movie_id"]}
    return TrainConfig.model_validate(
        {"dataset": "tiny", "name": "timed", "model": {**model, **changes}}
    )


def build(manifest: Manifest, **changes: Any) -> SequenceModel:
    """A model of two blocks whose biases of times are large."""
    model = build_model(configure(**changes).model, manifest, 1)
    assert isinstance(model, SequenceModel)
    for name, variable in model.named_weights.items():
        if name.endswith("/times"):
            variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    return model


def embed(model: SequenceModel, items: Any, **times: Any) -> Array:
    dtypes = {"history_age": tf.float32}
    given = {n: tf.constant(v, dtypes.get(n, tf.int64)) for n, v in times.items()}
    return model.embed_users({"history": tf.constant(items, tf.int64), **given}).numpy()


def test_gaps_and_times_of_the_log_say_the_same(
    timed_version: Path, timed_manifest: Manifest
) -> None:
    [batch] = build_eval_dataset(timed_version, timed_manifest, "test", 100)
    found = [build(timed_manifest, **names).embed_users(batch).numpy() for names in (GAPS, KNOWN)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    own = build(timed_manifest, **OWN).embed_users(batch).numpy()
    assert np.abs(own - found[0]).max() > 1e-3  # It does not know when it is asked.
    later = {**batch, "asked_at": batch["asked_at"] + 86_400}
    assert np.abs(build(timed_manifest, **KNOWN).embed_users(later) - found[0]).max() > 1e-3
    assert build(timed_manifest).user_inputs == ("history",)
    assert build(timed_manifest, **KNOWN).user_inputs == ("history", "history_time", "asked_at")


def test_ages_by_hand() -> None:
    ids = tf.constant([[5, 6, 7, 0], [5, 1, 0, 0]], tf.int64)
    gaps = ItemTimes("gaps", None, 3600.0, are_gaps=True)
    given = {"gaps": tf.ragged.constant([[0.5, 2.0, -3.0], [np.nan, 1.0]])}
    unknown = UNKNOWN_AGE  # Behind the end, after the event, and no number.
    expected = [[1800, 7200, unknown, unknown], [unknown, 3600, unknown, unknown]]
    np.testing.assert_array_equal(gaps.read_ages(given, ids), expected)
    short = {"gaps": tf.constant([[0.5], [1.0]])}
    expected = [[1800, 0, 0, unknown], [3600, 0, unknown, unknown]]
    np.testing.assert_array_equal(gaps.read_ages(short, ids), expected)
    now = 1_700_000_000
    times = {"t": tf.constant([[now - 1, now - 3, 0, 0], [now + 4, now - 9, 7, 7]], tf.int64)}
    own = ItemTimes("t", None, 1.0, are_gaps=False)
    expected = [[0, 2, unknown, unknown], [0, 13, unknown, unknown]]
    np.testing.assert_array_equal(own.read_ages(times, ids), expected)
    asked = ItemTimes("t", "now", 1.0, are_gaps=False)
    given = {**times, "now": tf.constant([now, now], tf.int64)}
    expected = [[1, 3, unknown, unknown], [unknown, 9, unknown, unknown]]
    np.testing.assert_array_equal(asked.read_ages(given, ids), expected)


def test_times_that_are_equal_run_backwards_or_are_missing_give_finite_vectors(
    timed_manifest: Manifest,
) -> None:
    model, items = build(timed_manifest, **GAPS), [[5, 6, 7, 8]]

    def of(*ages: float) -> Array:
        return embed(model, items, history_age=[list(ages)])

    equal = of(60, 60, 60, 60)
    assert np.abs(of(60, 3600, 7200, 86_400) - equal).max() > 1e-3
    missing = of(-1, -1, -1, -1)
    plain = build(timed_manifest)
    for name, variable in plain.named_variables.items():
        variable.assign(model.named_variables[name])
    # Without a time there is no bias of it: what is left is the network of positions alone.
    np.testing.assert_allclose(missing, embed(plain, items), atol=1e-6)
    for found in (equal, missing, of(0, 0, 0, 0), of(90, 60, 30, 0), of(1e30, 1e30, 1e30, 1e30)):
        assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"times": "history_ages"}, "did you mean 'history_age'"),
        ({"times": "asked_at"}, "model.times names no times"),
        ({"times": "history"}, "model.times names no times"),
        ({**OWN, "request_time": "history_time"}, "model.request_time names no times"),
        ({**GAPS, "user_features": ["history_age"]}, "neither joined nor pooled"),
    ],
)
def test_features_that_hold_no_times_are_refused(
    names: dict[str, Any], message: str, timed_manifest: Manifest
) -> None:
    with pytest.raises(ConfigError) as refused:
        build(timed_manifest, **names)
    assert message in refused.value.render()


def test_the_unit_is_that_of_the_build(timed_manifest: Manifest) -> None:
    def find(unit: str) -> float:
        built = {
            "histories": [{"name": "history", "gaps": unit}],
            "features": [{"name": "history_age", "column": "history_age"}],
            "events": {"source": "log", "time": "ts"},
            "sources": {"log": {"columns": [{"name": "ts", "type": "int64", "unit": "ms"}]}},
        }
        where = replace(timed_manifest, source=replace(timed_manifest.source, config=built))
        history = timed_manifest.schema["history"]
        of_times, of_gaps = (
            find_item_times(HSTUConfig(**names), where, history) for names in (OWN, GAPS)
        )
        assert of_times is not None
        assert of_gaps is not None
        assert of_times.seconds == 1e-3
        return of_gaps.seconds

    assert [find(unit) for unit in "smhd"] == [1, 60, 3600, 86_400]


def test_requests_with_raw_times_get_the_trainer_s_lists(
    timed_version: Path, timed_manifest: Manifest, tmp_path: Path
) -> None:
    """`/v1/recommend`, ranked by the export's index: the same scores as of encoded rows."""
    model = build(timed_manifest, **KNOWN)
    model.tables["movie_id"].rows.assign_add(
        tf.random.stateless_normal(model.tables["movie_id"].rows.shape, [1, 2])
    )
    movies = pq.read_table(timed_version / "encoders" / "movie_id.parquet")["token"].to_pylist()
    trained = TrainedModel(tmp_path, model, configure(**KNOWN), timed_manifest, timed_version)
    write_export(trained, ExportOptions(tmp_path / "m", index=IndexOptions()))
    now, ids = 1_700_900_000, [5, 2, 9]
    times = [now - 40, now - 4000, now - 400_000]
    index = build_item_index(model, timed_version, timed_manifest, 64)
    app = build_app(Server(ServerConfig(tmp_path / "m", 60.0)))
    with TestClient(app, "http://localhost") as client:
        tops = []
        for asked_at in (now, now + 30 * 86_400):
            features = {"history": [movies[n - 2] for n in ids], "history_time": times}
            body = {"k": 40, "features": {**features, "asked_at": asked_at}}
            answer = client.post("/v1/recommend", json=body)
            assert answer.status_code == 200, answer.text
            tops.append({row["item"]: row["retrieval_score"] for row in answer.json()["items"]})
            user = embed(model, [ids], history_time=[times], asked_at=[asked_at])[0]
            scores = dict(zip(index.ids.tolist(), index.vectors @ user, strict=True))
            assert tops[-1]
            for item, score in tops[-1].items():
                assert score == pytest.approx(scores[movies.index(item) + 2], abs=1e-5)
        assert tops[0] != tops[1]
