"""Ids of imported records: what stands for none is asked for, ids move, tables have a bound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.run import read_json
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError
from conf.etl.imported import ImportConfig
from conf.schema import OOV_ID, PAD_ID
from etl.encoders.pipeline import read_pipeline
from etl.import_dataset import ImportResult, import_dataset
from etl.imported import mapping
from etl.imported.survey import move_ids
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import read_table, write_table
from jobs.inspection.verify import verify_dataset

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
