"""Versions compared, and those that may go: never the current one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.errors import UpstreamNotReadyError
from conf.manifest import RowCounts, ShardInfo, SourceSnapshot, SplitInfo
from conf.publication.entries import set_pointer
from conf.schema import FeatureSchema, FeatureSpec
from etl.versions.history import (
    VersionInfo,
    collect_garbage,
    diff_manifests,
    list_versions,
    select_garbage,
)
from etl.versions.publish import hold_lock
from tests.datasets import build_manifest
from tests.etl.built_versions import publish


def test_rows_schema_vocabularies_config_and_statistics():
    old = build_manifest("a")
    assert diff_manifests(old, build_manifest("b")) == {}
    spec = FeatureSpec("u", "int64", "user", vocabulary_size=7, encoding="u")
    found = {"rows": 4, "values": 4, "mean": 2.0, "missing": 0, "oov": 3}
    raw = {"missing": 2, "nan": 0, "bucketed": 0}
    new = replace(
        old,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 3, 16, "0"),)),),
        schema=FeatureSchema((spec, FeatureSpec("x", "float32", "context"))),
        source=SourceSnapshot((), None, {"name": "d", "joins": [{"name": "a", "size": 5}]}, "1"),
        counts=RowCounts({"log": 4}, {"log": {}}, 1, {"train": 3}, {"duplicate": 1}),
        statistics={"train": {"u": {**found, "raw": raw}}},
    )
    assert diff_manifests(old, new) == {
        "rows": {"train": [1, 3]},
        "read": {"log": [1, 4]},
        "dropped": {"duplicate": [None, 1]},
        "schema": {
            "u": ["int64 [] user identity", "int64 [] user u"],
            "x": [None, "float32 [] context identity"],
        },
        "vocabularies": {"identity": [5, None], "u": [None, 7]},
        "config": {"joins.a.name": [None, "a"], "joins.a.size": [None, 5]},
        "statistics": {
            # Of three ids 1 two are nulls.
            "train.u": {"mean": [None, 2.0], "missing_rate": [None, 0.5], "oov_rate": [None, 0.5]}
        },
    }


def test_small_moves_of_a_mean_are_no_highlight():
    old = replace(build_manifest("a"), statistics={"train": {"u": {"rows": 9, "mean": 1.0}}})
    for mean, wanted in ((1.005, {}), (1.5, {"statistics": {"train.u": {"mean": [1.0, 1.5]}}})):
        new = replace(old, statistics={"train": {"u": {"rows": 9, "mean": mean}}})
        assert diff_manifests(old, new) == wanted


NOW = datetime(2026, 3, 1, tzinfo=UTC)


def version(age_days: int, *, current: bool = False) -> VersionInfo:
    created = NOW - timedelta(days=age_days)
    return VersionInfo(f"{created:%Y%m%dT%H%M%S%f}Z-x", current, created.isoformat())


@given(
    st.integers(1, 12), st.data(), st.one_of(st.none(), st.integers(1, 14)),
    st.one_of(st.none(), st.integers(0, 14)),
)  # fmt: skip
def test_limits_hold_and_the_current_version_stays(count, data, keep, older_than):
    current = data.draw(st.integers(0, count - 1))
    versions = [version(count - k, current=k == current) for k in range(count)]
    if keep is None and older_than is None:
        return
    chosen = select_garbage(versions, keep, older_than, NOW)
    for place, info in enumerate(versions):
        newest = keep is not None and place >= count - keep
        young = older_than is not None and count - place <= older_than
        assert (info in chosen) == (not info.is_current and not newest and not young)


def test_gc_removes_files_sweeps_and_respects_the_lock(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2", "v3"):
        publish(paths, name)
    set_pointer(paths.base, "v1")
    assert [v.version_id for v in collect_garbage(paths, 1, None, dry_run=True)] == ["v2"]
    assert published_versions(paths.base) == ["v1", "v2", "v3"]
    with hold_lock(paths), pytest.raises(UpstreamNotReadyError):
        collect_garbage(paths, 1, None)
    (paths.versions / ".trash-v0").mkdir()  # a removal that was killed
    assert [v.version_id for v in collect_garbage(paths, 1, None)] == ["v2"]
    assert sorted(entry.name for entry in paths.versions.iterdir()) == ["v1", "v3"]
    assert [v.is_current for v in list_versions(paths)] == [True, False]


def test_a_wrong_path_is_refused_and_left_alone(tmp_path):
    with pytest.raises(UpstreamNotReadyError, match="no published dataset version"):
        collect_garbage(DatasetPaths(tmp_path, "nothing"), 1, None)
    assert not list(tmp_path.iterdir())


def test_the_list_names_a_current_version_that_is_not_there(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    set_pointer(paths.base, "v2")
    here, gone = list_versions(paths)
    assert (here.is_current, gone.version_id, gone.is_current) == (False, "v2", True)
    assert gone.damage == "CURRENT names it, and it is not there"
