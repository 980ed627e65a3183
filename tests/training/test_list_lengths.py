from __future__ import annotations

from dataclasses import replace

import pytest

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.list_lengths import bound_list, list_length

OPEN = FeatureSpec("history", "int64", "user", (None,), None, "v", 9)
BOUND = replace(OPEN, max_len=4)
FIXED = FeatureSpec("scores", "float32", "user", (5,))
SCALAR = FeatureSpec("age", "int64", "user")


@pytest.mark.parametrize("longest", [None, 0, 7])
def test_only_lists_without_a_bound_take_that_of_the_statistics(
    tiny_manifest: Manifest, longest: int | None
) -> None:
    lengths = {"length": {"max": longest}}
    statistics = {"train": {spec.name: lengths for spec in (OPEN, FIXED, SCALAR)}}
    manifest = replace(tiny_manifest, statistics=statistics)
    assert bound_list(manifest, OPEN).max_len == (longest or None)
    for spec in (BOUND, FIXED, SCALAR):
        assert bound_list(manifest, spec) == spec
    assert bound_list(tiny_manifest, OPEN) == OPEN


def test_the_length_of_a_list() -> None:
    assert [list_length(spec) for spec in (OPEN, BOUND, FIXED)] == [None, 4, 5]
