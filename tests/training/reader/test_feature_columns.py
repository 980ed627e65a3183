from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.reader.feature_columns import (
    check_specs,
    fill_absent,
    plan_columns,
)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"max_len": 50}, ("max_len 8", "max_len 50")),
        ({"vocabulary_size": 7}, ("42 ids", "7 ids")),
        ({"shape": (8,), "max_len": None}, (r"shape \(None,\)", r"shape \(8,\)")),
    ],
)
def test_a_feature_that_a_model_does_not_fit(change, both, tiny_manifest: Manifest) -> None:
    other = replace(tiny_manifest.schema["history"], **change)
    with pytest.raises(InputDataError, match=rf"'history'[\s\S]*{both[0]}[\s\S]*{both[1]}"):
        check_specs(tiny_manifest, [other])


INTS = pa.list_(pa.int64())


LIST = FeatureSpec("f", "int64", "user", (2,))
NUMBER = FeatureSpec("f", "float32", "user")


@pytest.mark.parametrize(
    ("spec", "given", "kind", "message"),
    [
        (NUMBER, [1.0, None], pa.float32(), "no value in here"),
        (LIST, [[1, 2], []], INTS, "a list of 0 in here"),
        (replace(LIST, vocabulary_size=9), [[1, 2, 3], []], INTS, "a list of 3 in here"),
    ],
)
def test_what_does_not_fit_is_named(spec, given, kind, message, tiny_manifest: Manifest) -> None:
    [column] = plan_columns(tiny_manifest, [spec])
    with pytest.raises(InputDataError, match=rf"'f'[\s\S]*{message}"):
        fill_absent(column, pa.array(given, kind), "here")
