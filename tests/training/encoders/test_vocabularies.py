"""Vocabularies of a version: tokens by id, and equal tokens in two versions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from conf.artefacts.dataset import read_manifest
from conf.encoders import ColumnEncoding
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.encoders.vocabularies import (
    EncodedVersion,
    Vocabulary,
    find_named_ids,
    is_named,
    match_keys,
    match_rows,
    match_tokens,
    read_encoded_version,
    read_key_vocabulary,
    read_plan,
    read_vocabulary,
)


def test_tokens_come_back_by_id(tiny_version: Path, tiny_manifest: Manifest) -> None:
    vocabulary = read_key_vocabulary(tiny_version, tiny_manifest, "user_id")
    assert vocabulary is not None
    assert vocabulary.size == tiny_manifest.schema["user_id"].vocabulary_size
    first, *others = vocabulary.take(np.array([2, 0, 1, vocabulary.size, -3])).to_pylist()
    assert first >= 1000
    assert others == [None] * 4


def test_ids_that_name_one_token_are_found_without_the_tokens(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    version = Path(shutil.copytree(tiny_version, tmp_path / "v"))
    for file in (version / "encoders").glob("*.parquet"):
        file.unlink()
    named = find_named_ids(version, tiny_manifest, "user_id")
    assert named == range(2, tiny_manifest.schema["user_id"].vocabulary_size or 0)
    assert find_named_ids(version, tiny_manifest, "label") is None
    ids = np.array([0, 1, 2, 4, 5, named.stop - 1, named.stop])
    assert is_named(ids, range(5, named.stop)).tolist() == [False] * 4 + [True, True, False]
    assert is_named(ids, None).tolist() == [False] * 2 + [True] * 5


def test_a_plan_other_than_the_manifest_s_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match="not the one"):
        read_plan(tiny_version, replace(tiny_manifest, encoders_fingerprint="0"))
    with pytest.raises(InputDataError, match="cannot read"):
        read_plan(tiny_version / "nowhere", tiny_manifest)


def vocabulary(tokens: list, buckets: int | None = None) -> Vocabulary:
    kind = "int64" if isinstance(tokens[0], int) else "string"
    return Vocabulary("v", kind, pa.array(tokens), buckets)


@pytest.mark.parametrize(
    ("new", "old", "rows"),
    [
        (vocabulary(["b", "a", "c"]), vocabulary(["a", "b"]), [0, 1, 3, 2, -1]),
        (vocabulary(["a"]), vocabulary(["x", "y"]), [0, 1, -1]),
        (vocabulary(["a", "b"], 2), vocabulary(["b", "a"], 2), [0, 1, 2, 3, 5, 4]),
        (vocabulary(["a", "b"], 3), vocabulary(["b", "a"], 2), [0, 1, -1, -1, -1, 5, 4]),
        (vocabulary(["a"]), vocabulary(["b", "a"], 2), [0, 1, 5]),
        (vocabulary([7, 8]), vocabulary(["8", "9"]), [0, 1, -1, 2]),
    ],
)
def test_rows_follow_their_tokens(new: Vocabulary, old: Vocabulary, rows: list[int]) -> None:
    assert match_tokens(new, old).tolist() == rows


def write(root: Path, config: TinyConfig) -> tuple[Path, EncodedVersion]:
    version = write_tiny_dataset(root, config=config)
    return version, read_encoded_version(version, read_manifest(version))


def test_two_versions_of_a_dataset(tiny_version: Path, tiny_manifest: Manifest, tmp_path) -> None:
    grown, new = write(tmp_path, TinyConfig(users=70, items=55, seed=5))
    old = read_encoded_version(tiny_version, tiny_manifest)
    for table in ("user_id", "movie_id", "gender", "genres"):
        rows = match_rows(table, new, old)
        assert rows is not None
        tokens = read_vocabulary(grown, new.plan.vocabulary(table))
        before = read_vocabulary(tiny_version, old.plan.vocabulary(table))
        ids = {token: id_ for id_, token in enumerate(before.tokens.to_pylist(), before.first_id)}
        expected = [ids.get(token, -1) for token in tokens.tokens.to_pylist()]
        assert rows[tokens.first_id :].tolist() == expected
    assert match_rows("nothing", new, old) is None


def computed(size: int, operation: object) -> EncodedVersion:
    """A version whose ids of table `t` an operation computes."""
    spec = FeatureSpec("t", "int64", "user", encoding="hash:t", vocabulary_size=size)
    column = ColumnEncoding("t", "t", "string", "hash:t", operation)  # type: ignore[arg-type]
    manifest = SimpleNamespace(schema=FeatureSchema((spec,)))
    plan = SimpleNamespace(column=lambda name: column)
    return EncodedVersion(Path(), manifest, plan)  # type: ignore[arg-type]


def test_ids_that_are_computed_alike_keep_their_rows(tiny_version, tiny_manifest) -> None:
    operation, other = SimpleNamespace(buckets=5), SimpleNamespace(buckets=6)
    version = computed(7, operation)
    np.testing.assert_array_equal(match_rows("t", version, version), np.arange(7))
    assert match_rows("t", version, computed(8, operation)) is None
    assert match_rows("t", version, computed(7, other)) is None
    tokens = read_encoded_version(tiny_version, tiny_manifest)
    renamed = replace(tokens.manifest.schema["gender"], name="t", shared_embedding=None)
    mixed = EncodedVersion(
        tiny_version,
        SimpleNamespace(schema=FeatureSchema((renamed,))),  # type: ignore[arg-type]
        SimpleNamespace(
            column=lambda name: tokens.plan.column("gender"), vocabulary=tokens.plan.vocabulary
        ),  # type: ignore[arg-type]
    )
    assert match_rows("t", version, mixed) is None
    assert match_rows("t", mixed, version) is None


def test_keys_that_are_ids_are_matched_by_token(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    grown, new = write(tmp_path, TinyConfig(users=70, items=25, seed=5))
    old = read_encoded_version(tiny_version, tiny_manifest)
    keys = np.array([9, 2, 1, 7, 10**9, -3])
    found = match_keys("history", keys, new, old)
    tokens = read_vocabulary(grown, new.plan.vocabulary("movie_id")).tokens.to_pylist()
    before = read_vocabulary(tiny_version, old.plan.vocabulary("movie_id")).tokens.to_pylist()
    expected = [
        tokens.index(before[key - 2]) + 2 if before[key - 2] in tokens else -1 for key in (9, 2, 7)
    ]
    assert found[[0, 1, 3]].tolist() == expected
    assert found[[2, 4, 5]].tolist() == [1, -1, -1]


def test_computed_keys_stay_and_others_have_nothing_to_do_with_each_other(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    _, new = write(tmp_path, TinyConfig(keyed=True))
    old = read_encoded_version(tiny_version, tiny_manifest)
    keys = np.array([-1, 5, -(2**63)])
    assert match_keys("movie_id", keys, new, new) is keys
    assert match_keys("movie_id", keys, new, old) is None
    assert match_keys("no such feature", keys, new, old) is None
