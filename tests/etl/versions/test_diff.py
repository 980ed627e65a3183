"""What two versions differ in, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from conf.manifest import ShardInfo, SplitInfo
from conf.provenance import RowCounts, SourceSnapshot
from conf.schema import FeatureSchema, FeatureSpec
from etl.versions import diff_manifests
from etl.versions.diff import flatten
from tests.conf.manifests import build_manifest


def test_equal_versions_do_not_differ():
    assert diff_manifests(build_manifest("a"), build_manifest("b")) == {}


def test_rows_schema_vocabularies_config_and_statistics():
    old = build_manifest("a")
    spec = FeatureSpec("u", "int64", "user", vocabulary_size=7, encoding="identity")
    new = replace(
        old,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 3, 10, "0"),)),),
        schema=FeatureSchema((spec, FeatureSpec("x", "float32", "context"))),
        source=SourceSnapshot((), None, {"name": "d", "history": {"max_len": 5}}, "1"),
        counts=RowCounts({"log": 4}, {"log": {}}, 1, {"train": 3}, {"duplicate": 1}),
        statistics={"train": {"u": {"rows": 3, "mean": 2.0, "missing": 1}}},
    )
    assert diff_manifests(old, new) == {
        "rows": {"train": [1, 3]},
        "read": {"log": [1, 4]},
        "dropped": {"duplicate": [None, 1]},
        "schema": {"x": [None, "float32 [] context identity"]},
        "vocabularies": {"identity": [5, 7]},
        "config": {"history.max_len": [None, 5]},
        "statistics": {"train.u": {"mean": [None, 2.0], "missing_rate": [None, 1 / 3]}},
    }


def test_small_moves_of_a_mean_are_no_highlight():
    old = replace(build_manifest("a"), statistics={"train": {"u": {"rows": 9, "mean": 1.0}}})
    for mean, wanted in ((1.005, {}), (1.5, {"statistics": {"train.u": {"mean": [1.0, 1.5]}}})):
        new = replace(old, statistics={"train": {"u": {"rows": 9, "mean": mean}}})
        assert diff_manifests(old, new) == wanted


def test_lists_of_named_things_are_compared_by_name():
    old = {"features": [{"name": "a", "role": "user"}, {"name": "b", "role": "item"}]}
    assert flatten(old) == {
        "features.a.name": "a", "features.a.role": "user",
        "features.b.name": "b", "features.b.role": "item",
    }  # fmt: skip
