"""TFRecord files of one's own become a dataset version; what does not fit is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from conf.artefacts.dataset import find_version, read_manifest, resolve_version
from conf.errors import ConfigError, InputDataError
from conf.etl.imported import ImportConfig
from etl.import_dataset import import_dataset
from etl.imported.mapping import find_files
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import write_table
from jobs.cli import main
from jobs.inspection.verify import verify_dataset
from tests.datasets import count_train_records, read_train_counts

ROWS = 40
FEATURES = [
    {"name": "user", "role": "user", "offset": 0},
    {"name": "item", "role": "item", "vocabulary_size": 30, "offset": 0},
    {"name": "history", "role": "user", "max_len": 3, "table": "item"},
    {"name": "price", "role": "item", "pad_value": 0},
    {"name": "profile", "role": "user", "length": 2},
    {"name": "age", "role": "context", "ids": False},
    {"name": "click", "role": "label"},
    {"name": "buy", "role": "label"},
    {"name": "stars", "role": "label"},
]


def make_table(rows: int = ROWS, **changes: Any) -> pa.Table:
    columns = {
        "feature": [[i % 7, i % 20] for i in range(rows)],
        "history": [[1 + i % 25] * (i % 4) for i in range(rows)],
        "price": pa.array([None if i % 5 == 0 else i / 2 for i in range(rows)], pa.float32()),
        "profile": pa.array([[i, -i] for i in range(rows)], pa.list_(pa.float32())),
        "age": [20 + i for i in range(rows)],
        "click": [i % 2 for i in range(rows)],
        "buy": [int(i % 4 == 0) for i in range(rows)],
        "stars": pa.array([i % 5 for i in range(rows)], pa.float32()),
    }
    return pa.table({**columns, **changes})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("train-0", "train-1", "test"):
        write_table(make_table(), folder / f"{name}.tfrecord")
    return folder


def build(files: Path, **changes: Any) -> ImportConfig:
    data = {
        "name": "ours",
        "data_dir": str(files),
        "splits": {"train": ["train-*"], "test": ["test.tfrecord"]},
        "features": FEATURES,
        "packed": {"feature": ["user", "item"]},
        "keys": {"user": "user"},
        "output": {"root": str(files.parent / "datasets")},
    }
    return ImportConfig.model_validate({**data, **changes})


def test_files_become_a_version_that_names_and_counts_them(files):
    result = import_dataset(build(files))
    manifest = read_manifest(resolve_version(files.parent / "datasets" / "ours"))
    assert manifest == result.manifest
    assert dict(manifest.counts.kept) == {"train": 2 * ROWS, "test": ROWS}
    found = {f.name: (f.dtype, f.shape, f.vocabulary_size) for f in manifest.schema.features}
    assert found == {
        "user": ("int64", (), 7),
        "item": ("int64", (), 30),
        "history": ("int64", (None,), 30),  # of the items' table
        "price": ("float32", (), None),
        "profile": ("float32", (2,), None),
        **dict.fromkeys(("age", "click", "buy"), ("int64", (), None)),
        "stars": ("float32", (), None),
    }
    assert (manifest.keys.user, manifest.keys.label) == ("user", "click")
    assert manifest.label_rate == {"train": 0.5, "test": 0.5}
    assert manifest.label_rates == {"buy": {"train": 0.25, "test": 0.25}}  # stars are no rate
    # Of the user alone: only that is named as a key.
    counted = read_train_counts(result.version, manifest)
    assert counted == count_train_records(result.version, manifest)
    assert counted.keys() == {"user"}
    paths = [shard.path for shard in manifest.split("train").shards]
    assert paths == ["train/00000-train-0.tfrecord", "train/00001-train-1.tfrecord"]
    # A second name, not a copy.
    assert (result.version / paths[0]).samefile(files / "train-0.tfrecord")
    again = import_dataset(build(files))
    assert (again.version, again.is_new) == (result.version, False)
    write_table(make_table(ROWS + 1), files / "test.tfrecord")
    second = import_dataset(build(files))
    assert second.is_new
    assert second.manifest.parent == manifest.dataset_version
    assert second.manifest.split("test").rows == ROWS + 1
    # The files of the first version are still those that it lists: a link outlives a new file.
    assert read_manifest(result.version).split("test").rows == ROWS


def test_links_that_cannot_be_hard_are_symbolic(files, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    result = import_dataset(build(files))
    shard = result.version / result.manifest.split("test").shards[0].path
    assert shard.readlink() == (files / "test.tfrecord").resolve()
    # By name the link lies in the version, wherever it leads.
    assert find_version(shard) == result.version
    assert verify_dataset(result.version, result.manifest).problems == ()


def test_hidden_files_and_folders_do_not_count_unless_they_are_named(files):
    for name in ("day=1/train-2", ".spark/train-3", "_temporary/0/train-4", "day=1/_train-5"):
        path = files / f"{name}.tfrecord"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(make_table(2), path)
    (files / "test.tfrecord").unlink()
    everywhere = ["day=1/train-2", "train-0", "train-1"]
    for glob, names in (
        ("**/train-*", everywhere),
        (".", everywhere),
        (".spark/*", [".spark/train-3"]),
    ):
        found = [Path(file.path) for file in find_files(build(files, splits={"train": [glob]}))]
        assert found == [files.resolve() / f"{name}.tfrecord" for name in names]


def test_what_a_build_has_made_is_left_alone(files):
    result = import_dataset(build(files))
    file = result.version / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["source"]["config"] = {"sources": {}}
    file.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError):
        import_dataset(build(files))


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"train": ["none-*"]}},
        {"splits": {"train": ["t*"], "test": ["test*"]}},
        {"features": [*FEATURES, {"name": "gone", "role": "user"}]},
        {"features": [*FEATURES[:3], {"name": "price", "role": "item"}]},
        {"features": [*FEATURES[:4], {"name": "profile", "role": "user", "length": 3}]},
        {"features": [*FEATURES[:2], {"name": "age", "role": "context", "dtype": "float32"}]},
        {"features": [*FEATURES[:2], {"name": "age", "role": "item", "vocabulary_size": 50}]},
        {"features": [*FEATURES[:2], {**FEATURES[3], "vocabulary_size": 50}]},
        {"features": [*FEATURES[:2], {"name": "history", "role": "user", "dtype": "int64"}]},
        {"features": [*FEATURES[:2], {"name": "profile", "role": "user", "pad_value": 9}]},
        {"packed": {"feature": ["user"]}, "features": FEATURES[:1]},
        {"features": [*FEATURES[:2], {**FEATURES[4], "ids": True}]},
    ],
)
def test_files_that_do_not_fit_are_refused_and_nothing_is_published(files, change):
    with pytest.raises(InputDataError):
        import_dataset(build(files, **change))
    base = files.parent / "datasets" / "ours"
    assert not (base / "CURRENT").exists()
    assert not list((base / "versions").glob(".staging-*"))


def test_all_features_whose_ids_need_an_offset_are_named_at_once(files):
    features = [{k: v for k, v in f.items() if k != "offset"} for f in FEATURES]
    with pytest.raises(InputDataError) as refused:
        import_dataset(build(files, features=features))
    told = str(refused.value.received)
    assert told.startswith("user: 0 (18 times); user: 1 (18 times); item: 0")
    assert "history: " in told


def test_unfinished_empty_and_unlike_files_are_refused(files):
    last = files / "test.tfrecord"
    whole = last.read_bytes()
    gzipped = files / "gzipped"
    write_table(make_table(), gzipped, options=ShardOptions(compression="GZIP"))
    for content in (whole[:-7], b"", gzipped.read_bytes()):
        last.write_bytes(content)
        with pytest.raises(InputDataError):
            import_dataset(build(files))


ITEM: dict[str, Any] = {"name": "item", "role": "item"}
HISTORY: dict[str, Any] = {"name": "history", "role": "user", "max_len": 4, "table": "item"}
TIMES: dict[str, Any] = {"name": "times", "role": "context", "max_len": 4}


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"test": ["test*"]}},
        {"splits": {"train": ["train*", "../x/*"]}},
        {"features": [ITEM, ITEM]},
        {"packed": {"feature": ["item", "other"]}},
        {"packed": {"feature": ["item", "history"]}},
        {"keys": {"user": "users"}},
        {"aligned": [["history", "gone"]]},
        {"aligned": [["history"]]},
        {"aligned": [["history", "history"]]},
        {"features": [HISTORY, {**TIMES, "order": "oldest_first"}],
         "aligned": [["history", "times"]]},
        {"record_type": "ByteArray"},
        {"features": [{**ITEM, "dtype": "bytes", "ids": True}]},
        {"features": [{**ITEM, "length": 2, "max_len": 2}]},
        {"features": [{**ITEM, "length": 2, "order": "oldest_first"}]},
        {"features": [{**ITEM, "offset": 1}, HISTORY]},
        {"features": [{**ITEM, "ids": "keys"}, HISTORY]},
        {"features": [{**ITEM, "ids": "keys", "offset": 1}]},
        {"features": [{**ITEM, "ids": "keys", "vocabulary_size": 9}]},
        {"features": [{**ITEM, "ids": False, "offset": 1}]},
        {"features": [{**ITEM, "offset": 3}]},
        {"features": [{**ITEM, "vocabulary_size": 2**62}]},
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves_are_refused(change):
    data = {"name": "ours", "splits": {"train": ["t"]}, "features": [ITEM, HISTORY, TIMES]}
    ImportConfig.model_validate(data)
    with pytest.raises(ValidationError):
        ImportConfig.model_validate({**data, **change})


def test_the_command_shows_its_plan_and_imports(files, tmp_path, capsys):
    config = tmp_path / "ours.yaml"
    config.write_text(json.dumps(build(files).model_dump(mode="json", exclude={"data_dir"})))
    arguments = ["data", "import", str(config), "--data", str(files)]
    assert main([*arguments, "--dry-run", "--log-format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)["features"]
    assert (planned["history"], planned["user"]) == ("list of int64", "int64")
    assert not (files.parent / "datasets").exists()
    assert main(arguments) == 0
    assert main(["data", "import", "none.yaml"]) == 2
