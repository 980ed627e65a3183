"""Three days of training, each from the tables of the day before, and what is served of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.delta import DELTA_FILE
from conf.artefacts.export import EXPORT_FILE, ExportOptions, list_files, read_card
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.publication.working_copy import WORK_DIR_VARIABLE
from conf.training.train import TrainConfig
from tests.fake_store import reached_as
from tests.training.tiny_dataset import TinyConfig, hash_key, write_tiny_dataset
from training.checkpoint.restore import load_run
from training.embedding import TableStore
from training.export.delta import apply_delta, find_base, write_delta
from training.export.saved_model import write_export
from training.export.stored_models import bring_export, describe, find_place
from training.fit import fit_run
from training.monitoring.progress import TrainingProgress
from training.serving.served_version import ServedVersion

pytestmark = pytest.mark.exhaustive

USERS = (60, 40, 50)  # of the users 0, 1, …: some stay away, and some come back
TABLES = {
    "user_id": {
        "admission": {"count": 2},
        "eviction": {"timestamp": "time", "unused_time": 500, "every": 4},
        "capacity": 4,
    },
    "items": {"features": ["movie_id", "history"], "max_rows": 30,
              "eviction": {"when_full": "least_recent"}},
}  # fmt: skip
NAMED_BY_PROCESS = ("saved_model.pb", "fingerprint.pb", "export.json", "variables/")


@dataclass(frozen=True)
class Days:
    """What three days leave: runs, full exports, deltas, and versions made by applying these."""

    runs: list[Path]
    full: list[Path]
    deltas: list[Path]
    served: list[Path]


def configure(version: Path, root: Path, before: Path | None) -> TrainConfig:
    warm = None if before is None else {"path": str(before), "moments": "transfer"}
    return TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "m",
            "root": str(root),
            "model": {"kind": "ranking", "network": "deepfm", "params": {"hidden_units": [4]},
                      "embedding_dim": 4, "embeddings": TABLES},
            "input": {"batch_size": 64, "shuffle_buffer": 300},
            "optimizer": {"learning_rate": 0.05},
            "fit": {"epochs": 1, "early_stopping": None, "steps_per_loop": 4, "warm_start": warm},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def days(tmp_path_factory) -> Days:
    root = tmp_path_factory.mktemp("days")
    found = Days([], [], [], [])
    for number, users in enumerate(USERS):
        tiny = TinyConfig(users=users, keyed=True, timed=True, first_time=1000 * number,
                          seed=number)  # fmt: skip
        version = write_tiny_dataset(root, f"day{number}", tiny)
        config = configure(version, root / "runs", found.runs[-1] if number else None)
        found.runs.append(fit_run(config, TrainingProgress()))
        full = ExportOptions(root / "full", "m", tables=True)
        found.full.append(write_export(load_run(found.runs[-1]), full))
        if number == 0:
            shutil.copytree(root / "full", root / "models")
            found.served.append(root / "models" / "m" / "1")
            continue
        trained = load_run(found.runs[-1])
        options = ExportOptions(root / "deltas", "m")
        found.deltas.append(write_delta(trained, find_base(trained, "start"), options))
        found.served.append(apply_delta(root / "deltas" / "m", root / "models" / "m"))
    return found


def read_variables(version: Path) -> list[bytes]:
    """The bits of all variables, in no order: Keras numbers layers through the process."""
    reader = tf.train.load_checkpoint(str(version / "variables" / "variables"))
    names = reader.get_variable_to_shape_map()
    return sorted(reader.get_tensor(name).tobytes() for name in names if not name.startswith("_"))


def predict(version: Path) -> bytes:
    users, items = np.meshgrid(np.arange(1000, 1063), np.arange(100, 143))
    count = users.size
    encoded = tf.saved_model.load(str(version)).signatures["serving_default"]
    scores = encoded(
        user_id=tf.constant(users.ravel()),
        movie_id=tf.constant(items.ravel()),
        history=tf.constant(np.stack([items.ravel(), items.ravel()[::-1]], axis=1)),
        gender=tf.constant(["F"] * count),
        genres=tf.constant([["genre_1"]] * count),
    )["label"]
    return bytes(scores.numpy().tobytes())


def test_what_is_served_is_the_full_export_bit_for_bit(days: Days) -> None:
    assert [path.name for path in days.served] == ["1", "2", "3"]
    for full, served in zip(days.full[1:], days.served[1:], strict=True):
        assert read_variables(full) == read_variables(served)
        files = [list_files(path) for path in (full, served)]
        assert files[0].keys() == files[1].keys()
        for name, about in files[0].items():
            if not name.startswith(NAMED_BY_PROCESS):
                assert files[1][name] == about, name
        assert any(name.startswith("tables/") for name in files[0])
        assert read_card(served)["files"].keys() == read_card(full)["files"].keys()
        listed = {name: about for name, about in files[1].items() if name != EXPORT_FILE}
        assert read_card(served)["files"] == listed
        assert read_card(served)["tables"] == read_card(full)["tables"]
    scores = [predict(path) for path in days.served]
    assert scores == [predict(path) for path in days.full]
    assert len(set(scores)) == 3


def test_users_lose_their_rows_by_the_time_of_the_data(days: Days) -> None:
    keys = [set(load_run(run).model.tables["user_id"].keys.read_keys()) - {0} for run in days.runs]
    of = [{hash_key(1000 + user) for user in range(users)} for users in USERS]
    assert keys == of
    tables = [json.loads((path / DELTA_FILE).read_text())["tables"] for path in days.deltas]
    users = [(table["user_id"]["removed"], table["user_id"]["rows"]) for table in tables]
    assert users == [(20, 40), (0, 50)]
    assert tables[1]["items"]["rows"] <= 30
    assert tables[1]["gender"]["keys"] is None


def test_a_store_follows_the_deltas(days: Days, tmp_path: Path) -> None:
    for table in ("user_id", "items", "user_id_bias", "gender"):
        dim = 1 if table.endswith("_bias") else 4
        store, wanted = TableStore(dim), TableStore(dim)
        store.load(days.full[0] / "tables" / f"{table}.parquet")
        for delta in days.deltas:
            store.apply(delta, table)
        wanted.load(days.full[2] / "tables" / f"{table}.parquet")
        assert len(store) == wanted.save(tmp_path / f"{table}.npz")
        with np.load(tmp_path / f"{table}.npz") as full:
            np.testing.assert_array_equal(store.pull(full["keys"]), full["rows"])


def test_what_was_applied_is_served(days: Days) -> None:
    for path in days.served[1:]:
        assert (path / "tables").is_dir()
        assert ServedVersion(path).warm_up() > 0


def test_a_delta_is_applied_in_a_store(
    days: Days, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, deltas = find_place("s3://bucket/models"), find_place("s3://bucket/deltas")
    first, second = (load_run(run) for run in days.runs[:2])
    with reached_as("s3", monkeypatch) as store:
        monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / "first"))
        write_export(first, ExportOptions(models, "m", tables=True))
        delta = write_delta(second, find_base(second, "start"), ExportOptions(deltas, "m"))
        assert describe(delta) == "s3://bucket/deltas/m/1"
        monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / "second"))
        served = apply_delta(deltas / "m", models / "m")
        assert describe(served) == "s3://bucket/models/m/2"
        assert read_variables(served) == read_variables(days.served[1])
        monkeypatch.setenv(WORK_DIR_VARIABLE, str(tmp_path / "third"))
        files = read_card(served)["files"]
        found = list_files(bring_export(str(models)))
        assert {name: found[name] for name in files} == files
        before = store.objects("bucket/models")
        assert describe(apply_delta(deltas / "m", models / "m")) == "s3://bucket/models/m/2"
        assert store.objects("bucket/models") == before


def test_other_bases_and_damage_are_refused(days: Days, tmp_path: Path) -> None:
    models, delta = tmp_path / "models", tmp_path / "delta"
    with pytest.raises(UpstreamNotReadyError, match="no exported model"):
        apply_delta(days.deltas[1], models / "m")
    shutil.copytree(days.served[0], models / "m" / "1")
    before = list_files(models)
    with pytest.raises(InputDataError, match="another version") as caught:
        apply_delta(days.deltas[1], models / "m")
    assert days.runs[1].name in caught.value.render()
    shutil.copytree(days.deltas[0], delta)
    (delta / DELTA_FILE).rename(delta / "later.json")
    with pytest.raises(UpstreamNotReadyError, match="there is no delta"):
        apply_delta(delta, models / "m")
    (delta / "later.json").rename(delta / DELTA_FILE)
    [of_delta] = delta.glob("weights.data*")
    [of_base] = (models / "m" / "1" / "variables").glob("*.data*")
    for file, said in ((of_delta, "not those that were written"), (of_base, "restore the file")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"?")
        with pytest.raises(InputDataError, match=said):
            apply_delta(delta, models / "m")
        file.write_bytes(whole)
    shutil.copytree(models / "m", models / "other")
    with pytest.raises(ConfigError, match="another name"):
        apply_delta(delta, models / "other")
    shutil.rmtree(models / "other")
    assert {k: v for k, v in list_files(models).items() if not k.endswith(".lock")} == before
    assert apply_delta(delta, models / "m", keep=1).name == "2"
    assert not (models / "m" / "1").exists()


def test_bases_that_are_none_are_refused(days: Days, tmp_path: Path) -> None:
    first, second = (load_run(run) for run in days.runs[:2])
    with pytest.raises(ConfigError, match="did not start from another"):
        find_base(first, "start")
    base = find_base(second, str(days.runs[0]))
    assert base == find_base(second, "start")
    with pytest.raises(ConfigError, match="versions of the model"):
        write_delta(second, base, ExportOptions(days.full[0].parents[1], "m"))
    del second.model.tables["gender_bias"]
    with pytest.raises(ConfigError, match="not the same"):
        write_delta(second, base, ExportOptions(tmp_path, "m"))
