from __future__ import annotations

from pathlib import Path

import pytest

from conf.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.mixed_ids import check_mixed_ids

NAMES = ["user_id", "history", "movie_id", "label"]


def check(version: Path, manifest: Manifest, other: Path, names: list[str] = NAMES) -> None:
    check_mixed_ids(version, manifest, [(other, read_manifest(other))], names)


def test_the_same_tokens_under_the_same_ids_pass(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    check(tiny_version, tiny_manifest, write_tiny_dataset(tmp_path, "again"))
    # Encoders of other columns may differ: of fewer events, the same users are numbered alike.
    other = write_tiny_dataset(tmp_path, "longer", TinyConfig(events_per_user=12))
    assert read_manifest(other).encoders_fingerprint != tiny_manifest.encoders_fingerprint
    check(tiny_version, tiny_manifest, other, ["user_id", "label"])


def test_other_tokens_under_as_many_ids_are_refused(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    other = write_tiny_dataset(tmp_path, "other", TinyConfig(seed=9))
    sizes = [m.schema["movie_id"].vocabulary_size for m in (read_manifest(other), tiny_manifest)]
    assert sizes[0] == sizes[1]
    with pytest.raises(InputDataError, match=r"'(history|movie_id)'") as caught:
        check(tiny_version, tiny_manifest, other)
    assert "'other'" in caught.value.render()
    check(tiny_version, tiny_manifest, other, ["user_id"])


def test_keys_by_hash_are_the_same_everywhere(tmp_path: Path) -> None:
    one = write_tiny_dataset(tmp_path, "one", TinyConfig(keyed=True))
    two = write_tiny_dataset(tmp_path, "two", TinyConfig(keyed=True, seed=9))
    check(one, read_manifest(one), two, ["user_id", "movie_id", "history"])
