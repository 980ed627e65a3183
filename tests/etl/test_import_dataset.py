"""TFRecord files of one's own become a dataset version; ids move; what does not fit is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from conf.artefacts.dataset import find_version, read_manifest, resolve_version
from conf.artefacts.run import read_json
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import ConfigError, InputDataError
from conf.etl.imported import ImportConfig
from conf.schema import OOV_ID, PAD_ID
from etl.encoders.pipeline import read_pipeline
from etl.import_dataset import ImportResult, import_dataset
from etl.imported import mapping
from etl.imported.survey import move_ids
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import read_table, write_table
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


ANY_ITEM: dict[str, Any] = {"name": "item", "role": "item"}
ANY_HISTORY: dict[str, Any] = {"name": "history", "role": "user", "max_len": 4, "table": "item"}
TIMES: dict[str, Any] = {"name": "times", "role": "context", "max_len": 4}


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"test": ["test*"]}},
        {"splits": {"train": ["train*", "../x/*"]}},
        {"features": [ANY_ITEM, ANY_ITEM]},
        {"packed": {"feature": ["item", "other"]}},
        {"packed": {"feature": ["item", "history"]}},
        {"keys": {"user": "users"}},
        {"aligned": [["history", "gone"]]},
        {"aligned": [["history"]]},
        {"aligned": [["history", "history"]]},
        {"features": [ANY_HISTORY, {**TIMES, "order": "oldest_first"}],
         "aligned": [["history", "times"]]},
        {"record_type": "ByteArray"},
        {"features": [{**ANY_ITEM, "dtype": "bytes", "ids": True}]},
        {"features": [{**ANY_ITEM, "length": 2, "max_len": 2}]},
        {"features": [{**ANY_ITEM, "length": 2, "order": "oldest_first"}]},
        {"features": [{**ANY_ITEM, "offset": 1}, ANY_HISTORY]},
        {"features": [{**ANY_ITEM, "ids": "keys"}, ANY_HISTORY]},
        {"features": [{**ANY_ITEM, "ids": "keys", "offset": 1}]},
        {"features": [{**ANY_ITEM, "ids": "keys", "vocabulary_size": 9}]},
        {"features": [{**ANY_ITEM, "ids": False, "offset": 1}]},
        {"features": [{**ANY_ITEM, "offset": 3}]},
        {"features": [{**ANY_ITEM, "vocabulary_size": 2**62}]},
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves_are_refused(change):
    data = {"name": "ours", "splits": {"train": ["t"]}, "features": [ANY_ITEM, ANY_HISTORY, TIMES]}
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


CLICKS = {"name": "click", "role": "label"}


def publish(
    tmp_path: Path, columns: dict[str, Any], features: list[dict[str, Any]], **changes: Any
) -> ImportResult:
    (tmp_path / "files").mkdir(exist_ok=True)
    rows = len(next(iter(columns.values())))
    table = pa.table({**columns, "click": [i % 2 for i in range(rows)]})
    options = ShardOptions(compression=changes.pop("compression", None))
    write_table(table, tmp_path / "files" / "train.tfrecord", options=options)
    config = {
        "name": "ours",
        "data_dir": str(tmp_path / "files"),
        "splits": {"train": ["train.tfrecord"]},
        "features": [*features, CLICKS],
        "output": {"root": str(tmp_path / "datasets")},
    }
    return import_dataset(ImportConfig.model_validate({**config, **changes}))


def read_records(result: ImportResult) -> dict[str, list[Any]]:
    [shard] = result.manifest.split("train").shards
    schema = pa.schema(
        [
            pa.field(s.name, pa.list_(pa.int64()) if s.is_list else pa.int64())
            for s in result.manifest.schema.features
        ]
    )
    return read_table(result.version / shard.path, schema=schema).to_pydict()


ITEM: dict[str, Any] = {"name": "item", "role": "item"}
HISTORY: dict[str, Any] = {"name": "history", "role": "user", "max_len": 4, "table": "item"}


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize(("offset", "first"), [(2, 0), (1, 1)])
def test_ids_move_to_where_ids_start_and_are_a_vocabulary_of_the_files_ids(
    tmp_path, offset, first, compression
):
    none = first - 1
    items = [first, first + 1, first + 4, none, None]
    histories = [[first], [first + 4, first + 1, none, none], [], [none] * 2, None]
    result = publish(
        tmp_path,
        {"item": pa.array(items, pa.int64()), "history": pa.array(histories)},
        [{**ITEM, "offset": offset}, {**HISTORY, "offset": offset}],
        keys={"item": "item", "history": "history"},
        compression=compression,
    )
    records, manifest = read_records(result), result.manifest
    assert records["item"] == [2, 3, 6, OOV_ID, None]
    assert records["history"][:4] == [[2], [6, 3, PAD_ID, PAD_ID], [], [PAD_ID] * 2]
    assert {spec.vocabulary_size for spec in manifest.schema.by_role("item", "user")} == {7}
    assert verify_dataset(result.version, manifest).problems == ()
    plan = EncoderPlan.from_json(read_json(result.version / ENCODERS_DIR / ENCODERS_FILE))
    [vocabulary] = plan.vocabularies
    assert (vocabulary.name, vocabulary.size, vocabulary.pad_token) == ("item", 7, none)
    table = pq.read_table(result.version / ENCODERS_DIR / vocabulary.file).to_pydict()
    assert table["token"] == list(range(first, first + 5))
    assert table["count"] == [1, 1, 0, 0, 1]  # of the items, not of the histories
    assert vocabulary.file in [Path(file.path).name for file in manifest.encoder_files]
    # The files themselves are as they were.
    source = read_table(tmp_path / "files" / "train.tfrecord").to_pydict()
    assert source["item"] == items


@given(st.sampled_from([1, 2]), st.lists(st.lists(st.integers(-1, 50), max_size=4), min_size=1))
def test_moving_is_adding_in_which_none_stays_none(offset, lists):
    lists = [[v for v in values if v >= 1 - offset] for values in lists]
    scalars = [values[0] if values else None for values in lists]
    half, none = len(lists) // 2, 1 - offset
    moved = move_ids(pa.array(scalars, pa.int64()).slice(half), offset).to_pylist()
    assert moved == [None if v is None else v + offset for v in scalars[half:]]
    moved = move_ids(pa.array(lists, pa.list_(pa.int64())).slice(half), offset).to_pylist()
    assert moved == [[0 if v == none else v + offset for v in row] for row in lists[half:]]


def test_the_encoders_make_of_the_files_ids_what_the_records_hold(tmp_path):
    columns = {"item": [1, 3, 0, 2], "history": [[1, 2], [3, 0], [0, 0], [2]]}
    features = [{**ITEM, "offset": 1}, {**HISTORY, "offset": 1}]
    result = publish(tmp_path, columns, features)
    pipeline = read_pipeline(result.version / ENCODERS_DIR, ("item", "history"))
    batch = pa.record_batch({k: pa.array(v) for k, v in columns.items()})
    records = read_records(result)
    assert pipeline.apply(batch).to_pydict() == {k: records[k] for k in columns}
    unknown = pa.record_batch({"item": [9, -7], "history": [[9, 0], [None]]})
    assert pipeline.apply(unknown).to_pydict() == {"item": [1, 1], "history": [[1, 0], [1]]}


@pytest.mark.parametrize(
    ("columns", "feature", "received"),
    [
        ({"item": [0, 5, 6, 0]}, ITEM, r"item: 0 \(2 times\)$"),
        ({"item": [1, 5, 6, 7]}, ITEM, r"item: 1 \(1 times\)$"),
        ({"item": [0, 1, 1, 2]}, ITEM, r"item: 0 \(1 times\); item: 1 \(2 times\)"),
        ({"item": [0, 5, 6, 7]}, {**ITEM, "vocabulary_size": 50}, r"0 \(1 times\)"),
        ({"history": [[5, 0], [1, 0]]}, HISTORY, r"1 \(1 times\)"),
        ({"item": [1, 2**62]}, {**ITEM, "ids": "keys"}, r"1 \(1 times\)"),
    ],
)
def test_ids_that_would_be_read_as_none_are_refused(tmp_path, columns, feature, received):
    with pytest.raises(InputDataError) as caught:
        publish(tmp_path, columns, [feature])
    assert re.search(received, str(caught.value.received))


def test_padded_lists_and_what_the_config_says_pass(tmp_path):
    assert publish(tmp_path, {"history": [[5, 0], [0, 0]]}, [HISTORY]).is_new
    assert publish(tmp_path, {"item": [0, 1, 2]}, [{**ITEM, "offset": 0}]).is_new
    # What is said of a table holds for each of its features.
    said = [{**ITEM, "offset": 0}, HISTORY]
    assert publish(tmp_path, {"item": [1, 2], "history": [[1], [2]]}, said).is_new
    numbers = [{**ITEM, "ids": False}]
    assert publish(tmp_path, {"item": [0, 1]}, numbers).is_new


def test_a_hash_is_no_id_and_is_a_key(tmp_path):
    hashes = [2**62 + 5, 7, 2**63 - 1, -(2**63)]
    with pytest.raises(InputDataError, match="ids: keys"):
        publish(tmp_path, {"item": hashes[:3]}, [ITEM])
    result = publish(
        tmp_path,
        {"item": hashes, "history": [[h, 0] for h in hashes]},
        [{**ITEM, "ids": "keys"}, {**HISTORY, "ids": "keys"}],
    )
    item, history = (result.manifest.schema[name] for name in ("item", "history"))
    assert (item.vocabulary_size, item.encoding, item.pad_value) == (None, "key:item", OOV_ID)
    assert (history.vocabulary_size, history.pad_value) == (None, PAD_ID)
    assert read_records(result)["item"] == hashes
    # A second name of the file: nothing is written anew.
    [shard] = result.manifest.split("train").shards
    assert (result.version / shard.path).samefile(tmp_path / "files" / "train.tfrecord")


@pytest.mark.parametrize(
    ("items", "declared", "size", "received"),
    [
        ([2, 999], {"offset": 0}, 1000, None),
        ([2, 997], {"offset": 2}, 1000, None),
        ([2, 1000], {"offset": 0, "vocabulary_size": 5000}, 5000, None),
        # A declared size is of the files' ids.
        ([2, 4], {"offset": 2, "vocabulary_size": 5}, 7, None),
        ([7, 1000], {}, None, 1000),
        ([7, 999], {"offset": 1}, None, 999),
        ([7, 998], {"offset": 2}, None, 998),
        # There is a file with a row for each.
        ([7, 8], {"offset": 2, "vocabulary_size": 5000}, None, 4999),
        # A sum beyond 64 bits is too many ids, not a negative one.
        ([3, 2**63 - 1], {"offset": 2}, None, 2**63 - 3),
        ([3, -2], {"offset": 2}, None, -2),
        ([3, -1], {"offset": 1}, None, -1),
        ([0, 5], {"offset": 2, "vocabulary_size": 5}, None, 5),
        ([3, -1], {"offset": 0}, None, -1),
    ],
)
def test_ids_outside_their_table_are_refused(
    tmp_path, monkeypatch, items, declared, size, received
):
    monkeypatch.setattr(mapping, "MOST_IDS", 1000)
    features = [{**ITEM, **declared}]
    if received is None:
        result = publish(tmp_path, {"item": items}, features)
        assert result.manifest.schema["item"].vocabulary_size == size
        return
    with pytest.raises(InputDataError) as caught:
        publish(tmp_path, {"item": items}, features)
    assert caught.value.received == received


def test_packed_scalars_move_too_and_a_key_is_one_whole_number(tmp_path):
    moved = [{"name": "user", "role": "user", "offset": 2}, ITEM]
    packed = {"pair": ["user", "item"]}
    result = publish(tmp_path, {"pair": [[0, 5], [3, 6]]}, moved, packed=packed)
    assert result.manifest.slots == ()
    assert read_records(result)["user"] == [2, 5]
    assert read_records(result)["item"] == [5, 6]
    with pytest.raises(InputDataError):
        publish(tmp_path, {"item": [0.5]}, [{**ITEM, "offset": 2}])
    with pytest.raises(InputDataError):
        publish(tmp_path, {"item": [[5], [6, 7]]}, [ITEM], keys={"item": "item"})
