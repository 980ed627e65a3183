"""What gc takes: never the current version, never what a limit protects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.dataset import DatasetPaths, published_versions
from conf.errors import ConfigError, UpstreamNotReadyError
from etl.publish import hold_lock, make_current
from etl.versions import VersionInfo, collect_garbage, list_versions, select_garbage
from tests.etl.versions.versions import publish

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
        assert (info.version_id in chosen) == (not info.is_current and not newest and not young)


def test_without_a_limit_nothing_is_chosen():
    with pytest.raises(ConfigError, match="--keep"):
        select_garbage([version(1)], None, None)
    with pytest.raises(ConfigError, match="out of range"):
        select_garbage([version(1)], 0, None)


def test_gc_removes_files_sweeps_and_respects_the_lock(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2", "v3"):
        publish(paths, name)
    make_current(paths, "v1")
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
