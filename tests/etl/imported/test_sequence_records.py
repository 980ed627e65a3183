"""Files of `tf.train.SequenceExample`: found out by their bytes, checked, turned, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.etl.imported import ImportConfig
from etl.import_dataset import import_dataset
from tests.datasets import read_train_records

Lists = dict[str, list[Any]]
"""Steps by name: values, or lists of values."""
FEATURES: list[dict[str, Any]] = [
    {"name": "user", "role": "user", "offset": 0},
    {"name": "item", "role": "item", "offset": 0},
    {"name": "history", "role": "user", "max_len": 4, "table": "item"},
    {"name": "times", "role": "context", "max_len": 4},
    {"name": "click", "role": "label"},
]
LISTS = ("history", "times")
ROWS = 24


def fill(feature: tf.train.Feature, values: Sequence[Any]) -> None:
    lists = {float: feature.float_list, bytes: feature.bytes_list}
    lists.get(type(values[0]) if values else int, feature.int64_list).value.extend(values)


def make_sequence(context: dict[str, Any], lists: Lists) -> bytes:
    """A record as TensorFlow's own class writes it."""
    example = tf.train.SequenceExample()
    for name, value in context.items():
        fill(example.context.feature[name], value if isinstance(value, list) else [value])
    for name, steps in lists.items():
        feature_list = example.feature_lists.feature_list[name].feature
        for step in steps:
            fill(feature_list.add(), step if isinstance(step, list) else [step])
    return example.SerializeToString()


def make_plain(context: dict[str, Any], lists: Lists) -> bytes:
    """The same values as a `tf.train.Example`."""
    example = tf.train.Example()
    for name, value in context.items():
        fill(example.features.feature[name], [value])
    for name, values in lists.items():
        feature = example.features.feature[name]
        (feature.float_list if name == "times" else feature.int64_list).value.extend(values)
    return example.SerializeToString()


def make_row(i: int) -> tuple[dict[str, Any], Lists]:
    steps = i % 6
    context = {"user": 2 + i % 7, "item": 2 + i % 9, "click": i % 2}
    lists = {
        "history": [2 + (i + step) % 9 for step in range(steps)],
        "times": [float(100 * i + step) for step in range(steps)],
    }
    return context, lists


def write(path: Path, records: Sequence[bytes], compression: str | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    for name in ("train-0", "train-1", "test"):
        write(folder / f"{name}.tfrecord", [make_sequence(*make_row(i)) for i in range(ROWS)])
    return folder


def build(files: Path, **changes: Any) -> ImportConfig:
    data = {
        "name": "sessions",
        "data_dir": str(files),
        "splits": {"train": ["train-*"], "test": ["test.tfrecord"]},
        "features": FEATURES,
        "aligned": [["history", "times"]],
        "keys": {"user": "user", "item": "item", "history": "history"},
        "output": {"root": str(files.parent / "datasets")},
    }
    return ImportConfig.model_validate({**data, **changes})


def change(names: Sequence[str], **changes: Any) -> list[dict[str, Any]]:
    return [{**f, **changes} if f["name"] in names else f for f in FEATURES]


@pytest.mark.parametrize("declared", [None, "SequenceExample"])
def test_sequences_are_found_linked_and_counted_like_examples(files, declared):
    result = import_dataset(build(files, record_type=declared))
    manifest = read_manifest(result.version)
    assert manifest == result.manifest
    assert (manifest.record_type, manifest.feature_lists) == (
        "SequenceExample", ("history", "times")
    )  # fmt: skip
    assert dict(manifest.counts.kept) == {"train": 2 * ROWS, "test": ROWS}
    shards = manifest.split("train").shards
    assert (result.version / shards[0].path).samefile(files / "train-0.tfrecord")
    plain = files.parent / "plain"
    for name in ("train-0", "train-1", "test"):
        write(plain / f"{name}.tfrecord", [make_plain(*make_row(i)) for i in range(ROWS)])
    as_examples = import_dataset(build(plain, name="plain")).manifest
    assert as_examples.record_type == "Example"
    assert as_examples.feature_lists is None
    assert manifest.schema == as_examples.schema
    assert manifest.statistics == as_examples.statistics
    assert manifest.label_rate == as_examples.label_rate
    counts = {name: (file.bytes, file.crc32c) for name, file in manifest.train_counts.items()}
    assert counts == {n: (f.bytes, f.crc32c) for n, f in as_examples.train_counts.items()}
    # The same files again are no new version, a changed one is.
    assert not import_dataset(build(files, record_type=declared)).is_new
    write(files / "test.tfrecord", [make_sequence(*make_row(i)) for i in range(ROWS + 1)])
    assert import_dataset(build(files, record_type=declared)).is_new


def test_a_list_of_the_context_stays_there_and_a_catalogue_needs_no_sequence(files):
    # A name in both places that nobody asks for is passed over.
    context, lists = {"tags": [3, 4, 5], "note": 1}, {"note": [1.5]}
    rows = [make_row(i) for i in range(ROWS)]
    records = [make_sequence({**row[0], **context}, {**row[1], **lists}) for row in rows]
    write(files / "only.tfrecord", records)
    write(files / "items.tfrecord", [make_plain({"item": 2 + i}, {}) for i in range(9)])
    tags = {"name": "tags", "role": "item", "max_len": 3}
    config = build(
        files, splits={"train": ["only*"], "catalog": ["items*"]}, aligned=[],
        features=[*FEATURES[:3], tags, FEATURES[-1]], keys={"user": "user", "item": "item"},
    )  # fmt: skip
    manifest = read_manifest(import_dataset(config).version)
    assert manifest.feature_lists == ("history",)
    assert manifest.find_feature_lists() == {"history"}
    assert dict(manifest.counts.kept) == {"train": ROWS, "catalog": 9}


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_lists_turn_and_ids_move_in_records_written_anew(files, compression):
    records = [make_sequence(*make_row(i)) for i in range(ROWS)]
    write(files / "turned.tfrecord", records, compression)
    order, offset = change(LISTS, order="oldest_first"), change(("item", "history"), offset=1)
    features = [{**turned, **moved} for turned, moved in zip(order, offset, strict=True)]
    result = import_dataset(build(files, splits={"train": ["turned*"]}, features=features))
    assert result.manifest.record_type == "SequenceExample"
    rows = list(read_train_records(result.version, result.manifest))
    assert len(rows) == ROWS
    for i, row in enumerate(rows):
        context, lists = make_row(i)
        assert row["user"] == [context["user"]]
        assert row["item"] == [context["item"] + 1]
        assert row.get("history", []) == [value + 1 for value in reversed(lists["history"])]
        assert row.get("times", []) == list(reversed(lists["times"]))


def test_padding_is_left_out_of_lists_that_turn_and_told_of_where_it_comes_first(tmp_path, caplog):
    files = tmp_path / "files"
    histories = [[0, 0, 5], [0, 0, 0], [], [5, 0], [0, 7]]
    times = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [], [7.0, 0.0], [8.0, 9.0]]
    records = [
        make_plain({"user": 2, "item": 3, "click": i % 2}, {"history": history, "times": time})
        for i, (history, time) in enumerate(zip(histories, times, strict=True))
    ]
    write(files / "train-0.tfrecord", records)
    config: dict[str, Any] = {"splits": {"train": ["train-*"]}}
    import_dataset(build(files, **config))
    assert "history: 2 lists begin with padding" in caplog.text
    caplog.clear()
    turned = change(LISTS, order="oldest_first")
    result = import_dataset(build(files, features=turned, **config))
    rows = list(read_train_records(result.version, result.manifest))
    assert [row.get("history", []) for row in rows] == [[5, 0, 0], [], [], [5], [7, 0]]
    assert [row.get("times", []) for row in rows] == [[3, 2, 1], [], [], [7], [9, 8]]
    assert not caplog.text
    with pytest.raises(InputDataError):  # Nothing says that they have the same padding.
        import_dataset(build(files, features=turned, aligned=[], **config))


def longer_by_one(i: int) -> bytes:
    context, lists = make_row(i)
    times = [*lists["times"], 7.0] if i == 9 else lists["times"]
    return make_sequence(context, {**lists, "times": times})


def with_lists(**changes: Any) -> bytes:
    context, lists = make_row(5)
    return make_sequence(context, {**lists, **changes})


PLAIN = [make_plain(*make_row(i)) for i in range(ROWS)]
TWICE = [make_sequence({**make_row(5)[0], "history": [2]}, make_row(5)[1])]
WORDS = {"name": "words", "role": "user", "dtype": "bytes", "max_len": 3}


@pytest.mark.parametrize(
    ("records", "change", "told"),
    [
        ([longer_by_one(i) for i in range(ROWS)], {}, "history 3, times 4 values, in row 9; 1"),
        ([with_lists(times=[[1.0, 2.0], 1.0, 2.0, 3.0, 4.0])], {}, "2 values, in row 0"),
        ([with_lists(), with_lists(history=[2, [], 3, 4, 5])], {}, "0 values, in row 1"),
        ([with_lists(times=[1, 2, 3, 4, 5])], {}, "float32, int64"),
        ([with_lists(history=[2, 3, 4, 5, -6])], {}, "-6"),
        ([b"\x0a\x05abc"], {}, "not a tf.train.SequenceExample"),
        (PLAIN, {}, "occurs twice"),
        (TWICE, {}, "'history' occurs twice"),
        ([], {"features": change(["times"], dtype="int64")},
         "'times' holds another kind of values"),
        ([], {"features": [*FEATURES, WORDS]}, "lack feature 'words'"),
        ([], {"features": change(["click"], order="oldest_first")}, "'click' holds one value"),
        ([], {"aligned": [["history", "click"]]}, "'click' holds one value"),
        ([], {"record_type": "Example", "features": FEATURES[:2], "aligned": [],
              "keys": {"user": "user"}}, "feature lists in 24 of 24 records"),
    ],
)  # fmt: skip
def test_records_that_do_not_fit_are_refused_and_nothing_is_published(files, records, change, told):
    write(files / "train-1.tfrecord", records or [with_lists()])
    with pytest.raises(InputDataError, match=told):
        import_dataset(build(files, **change))
    base = files.parent / "datasets" / "sessions"
    assert not (base / "CURRENT").exists()
    assert not list((base / "versions").glob(".staging-*"))


def test_sequences_without_a_step_are_taken_where_that_is_declared(files):
    bare = [make_sequence(make_row(i)[0], {}) for i in range(4)]
    assert bare == [make_plain(make_row(i)[0], {}) for i in range(4)]
    write(files / "train-1.tfrecord", bare)
    with pytest.raises(InputDataError, match="feature lists in 0 of 4 records"):
        import_dataset(build(files))
    manifest = import_dataset(build(files, record_type="SequenceExample")).manifest
    assert manifest.statistics["train"]["history"]["missing"] == 4
