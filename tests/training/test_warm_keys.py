from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.dataset import read_manifest
from conf.encoders import IDENTITY
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import KeySpace
from training.row_matching import EncodedVersion, read_encoded_version
from training.warm_keys import MatchedKeys, match_dynamic_table, set_keys

EARLIER = np.array([-1, 40, 7])


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> EncodedVersion:
    path = write_tiny_dataset(tmp_path_factory.mktemp("keyed"), config=TinyConfig(keyed=True))
    return read_encoded_version(Path(path), read_manifest(path))


def build(**keys: Any) -> tuple[Any, DynamicTable]:
    table = DynamicTable("items", KeySpace("items", **keys), 3, seed=1)
    bias = DynamicTable("bias", table.keys, 1, seed=1, stddev=None)
    tables = {"items": table, "bias": bias}
    model = SimpleNamespace(embedded_features={"movie_id": table}, tables=tables)
    return model, table


def test_all_keys_come_over_in_their_order(version: EncodedVersion) -> None:
    model, table = build()
    for of_same_keys in (table, model.tables["bias"]):
        found = match_dynamic_table(model, of_same_keys, EARLIER, (version, version))
        assert isinstance(found, MatchedKeys)
        assert found.keys.tolist() == EARLIER.tolist()
        assert found.rows.tolist() == [0, 1, 2, 3, 4]


def test_tokens_that_are_gone_stay_behind(tiny_version: Path, tmp_path: Path) -> None:
    old = read_encoded_version(tiny_version, read_manifest(tiny_version))
    small = write_tiny_dataset(tmp_path, config=TinyConfig(items=8))
    new = read_encoded_version(small, read_manifest(small))
    model, table = build()
    earlier = np.arange(1, 42)  # null, and all items
    found = match_dynamic_table(model, table, earlier, (new, old))
    assert sorted(found.keys) == list(range(1, 10))
    assert len(found.rows) == 2 + 9
    assert found.rows[2] == 2  # that of null


def test_what_does_not_fit_is_said(version: EncodedVersion) -> None:
    model, table = build(max_rows=2)
    said = match_dynamic_table(model, table, EARLIER, (version, version))
    assert said == "3 keys there, and max_rows is 2"
    columns = [replace(column, operation=None, encoder=IDENTITY) for column in version.plan.columns]
    other = replace(version, plan=replace(version.plan, columns=tuple(columns)))
    said = match_dynamic_table(model, table, EARLIER, (version, other))
    assert said == "its keys are made in another way: those of feature 'movie_id'"


def test_rows_of_keys_start_as_if_training_had_met_them() -> None:
    model, table = build(capacity=1)
    slot = table.rows.fill_like(0.5, "slot")
    set_keys(model, table.keys, EARLIER)
    np.testing.assert_array_equal(table.rows.numpy()[2:], table.draw_rows(EARLIER))
    assert not table.rows.numpy()[:2].any()
    assert model.tables["bias"].rows.numpy().shape == (5, 1)
    np.testing.assert_array_equal(slot.numpy(), np.full((5, 3), 0.5))
