"""Rolling back: to the version that was current before, never to a damaged one."""

from __future__ import annotations

import pytest

from conf.dataset import DatasetPaths, resolve_version
from conf.errors import ConfigError, InputDataError
from etl.publish import make_current
from etl.versions import list_versions, roll_back
from tests.etl.versions.versions import publish


def test_previous_is_what_was_current_before_whatever_lies_between(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2"):
        publish(paths, name)
    make_current(paths, "v1")
    publish(paths, "v3")  # its parent is v1, for v2 had been rolled back
    assert roll_back(paths) == "v1"
    assert resolve_version(paths.base).name == "v1"
    with pytest.raises(ConfigError, match="before the current one"):
        roll_back(paths)


def test_a_damaged_or_unknown_version_is_refused_and_the_current_one_stays(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    first, second = publish(paths, "v1"), publish(paths, "v2")
    (first / "train" / "part-0").write_bytes(b"x")
    with pytest.raises(InputDataError, match="not as long as"):
        roll_back(paths, "v1")
    with pytest.raises(ConfigError, match="did you mean 'v2'"):
        roll_back(paths, "v22")
    assert resolve_version(paths.base) == second
    assert [v.damage is None for v in list_versions(paths)] == [False, True]


def test_a_damaged_current_version_is_left_by_rolling_back(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    (publish(paths, "v2") / "manifest.json").write_text("{")
    assert roll_back(paths) == "v1"
