from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.vocabularies import read_key_vocabulary, read_plan, read_vocabulary


def test_tokens_come_back_by_id(tiny_version: Path, tiny_manifest: Manifest) -> None:
    vocabulary = read_key_vocabulary(tiny_version, tiny_manifest, "user_id")
    assert vocabulary is not None
    assert vocabulary.size == tiny_manifest.schema["user_id"].vocabulary_size
    first, *others = vocabulary.take(np.array([2, 0, 1, vocabulary.size, -3])).to_pylist()
    assert first >= 1000
    assert others == [None] * 4


def test_identity_keys_have_no_vocabulary(tiny_version: Path, tiny_manifest: Manifest) -> None:
    assert read_key_vocabulary(tiny_version, tiny_manifest, "label") is None


def test_an_unknown_feature_is_refused(tiny_version: Path, tiny_manifest: Manifest) -> None:
    with pytest.raises(InputDataError, match="does not say how"):
        read_key_vocabulary(tiny_version, tiny_manifest, "age")


def test_a_damaged_vocabulary_is_refused(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    version = Path(shutil.copytree(tiny_version, tmp_path / "v"))
    plan = read_plan(version, tiny_manifest)
    spec = plan.vocabulary("movie_id")
    file = version / "encoders" / spec.file
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(InputDataError, match="checksum"):
        read_vocabulary(version, spec)
    with pytest.raises(InputDataError, match="outside"):
        read_vocabulary(version, replace(spec, file="../../etc/passwd"))
    with pytest.raises(InputDataError, match="cannot read"):
        read_vocabulary(version, replace(spec, file="none.parquet"))


def test_a_vocabulary_of_another_size_or_type_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    spec = read_plan(tiny_version, tiny_manifest).vocabulary("movie_id")
    with pytest.raises(InputDataError, match="ids"):
        read_vocabulary(tiny_version, replace(spec, size=spec.size + 1))
    with pytest.raises(InputDataError, match="token type"):
        read_vocabulary(tiny_version, replace(spec, token_dtype="string"))


def test_a_plan_other_than_the_manifest_s_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match="not the one"):
        read_plan(tiny_version, replace(tiny_manifest, encoders_fingerprint="0"))
    with pytest.raises(InputDataError, match="cannot read"):
        read_plan(tiny_version / "nowhere", tiny_manifest)
