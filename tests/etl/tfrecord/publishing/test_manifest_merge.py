"""One description for all shards of a directory, or a refusal that says what differs."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import Committed, CommittedShard, read_committed
from etl.tfrecord.features import WireFeature
from etl.tfrecord.publishing.manifest_merge import describe_features, merge_description

SHARD = CommittedShard("d=1/part-0", 3, 99, "00000000", "j", 0, {"d": "1"}, (16, 32), {"a": {}})
OLD = Committed(
    "Example", None, (WireFeature("a", "int64"),), {"layout": "columns"}, (("d", "int"),), (SHARD,)
)


def test_features_of_every_arrow_type() -> None:
    schema = pa.schema([
        ("b", pa.bool_()), ("f", pa.decimal128(5, 2)), ("s", pa.dictionary(pa.int8(), pa.string())),
        ("l", pa.list_(pa.float64())), ("x", pa.list_(pa.int64(), 3)),
        ("q", pa.list_(pa.list_(pa.binary()))),
    ])  # fmt: skip
    assert describe_features(schema, "SequenceExample") == (
        WireFeature("b", "int64"), WireFeature("f", "float32"), WireFeature("s", "bytes"),
        WireFeature("l", "float32", True), WireFeature("x", "int64", True),
        WireFeature("q", "bytes", False, True),
    )  # fmt: skip
    assert describe_features(schema, "ByteArray") == ()


def test_features_add_up() -> None:
    new = replace(OLD, features=(WireFeature("z", "bytes"), *OLD.features), shards=())
    merged = merge_description(OLD, new, "out")
    assert [f.name for f in merged.features] == ["a", "z"]
    assert merged.shards == (SHARD,)
    assert merge_description(None, new, "out") == new
    assert merge_description(replace(OLD, shards=()), new, "out") == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": "GZIP"}, r"(?s)compression gzip.*compression none"),
        ({"record_type": "ByteArray"}, "record type"),
        ({"partition_columns": ()}, "partition columns"),
        ({"lowering": {"layout": "packed"}}, "layout packed"),
        ({"lowering": {"columns": {"t": {"timestamps": "ms"}}}}, "timestamps"),
        ({"features": (WireFeature("a", "int64", True),)}, "'a': list of int64"),
    ],
)
def test_what_no_reader_could_follow_is_refused(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_description(OLD, replace(OLD, **change), "out")


def test_a_feature_in_another_case_is_refused() -> None:
    both = (WireFeature("a", "int64"), WireFeature("A", "int64"))
    with pytest.raises(ConfigError, match=r"(?s)another case.*received: A.*allowed:  a"):
        merge_description(OLD, replace(OLD, features=both[1:]), "out")
    # Those of a directory that has had both are told apart.
    merged = merge_description(replace(OLD, features=both), replace(OLD, features=both), "out")
    assert merged.features == both


def test_the_manifest_round_trips(tmp_path) -> None:
    assert read_committed(tmp_path) is None
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps())
    assert read_committed(tmp_path) == OLD
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps().replace('"rows"', '"lines"'))
    with pytest.raises(InputDataError, match="damaged"):
        read_committed(tmp_path)
