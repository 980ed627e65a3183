from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import Manifest
from conf.training import DSSMConfig
from training.models import build_model
from training.weight_samples import read_weight_samples, sample_ids


@given(st.integers(1, 500), st.integers(1, 200))
def test_ids_are_distinct_spread_and_never_padding(size: int, count: int) -> None:
    ids = sample_ids(size, count)
    assert len(ids) == min(count, size - 1)
    assert len(set(ids)) == len(ids)
    if len(ids):
        assert ids[0] == 1
        assert ids[-1] < size
        gaps = np.diff(np.append(ids, size))
        assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("sampled_rows", [7, 100_000])
def test_values_are_those_of_the_weights(
    sampled_rows: int, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    model = build_model(DSSMConfig(embedding_dim=4), tiny_manifest, 1)
    samples = read_weight_samples(model, sampled_rows)
    assert len(samples) == len(model.dense_variables) + len(model.tables)
    for name, table in model.tables.items():
        rows = table.rows.numpy().astype(np.float64)
        expected = np.sqrt((rows**2).sum(axis=1))[sample_ids(len(rows), sampled_rows)]
        np.testing.assert_allclose(samples[f"row_norms/{name}"], expected, rtol=1e-6)
    assert all(tag.startswith(("weights/", "row_norms/")) for tag in samples)
