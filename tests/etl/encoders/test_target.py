"""Target and count encoding: their tables, and their values out of fold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.encoders.target import (
    TargetEncoder,
    build_statistic_table,
    load_statistic_table,
    write_statistic_table,
)
from etl.encoders.token_lookup import build_lookup


def test_a_table_comes_back_and_same_values_give_same_bytes(tmp_path):
    table = build_statistic_table(np.array([[0.5, 0.25], [1.0, 2.0]]))
    spec = write_statistic_table(table, tmp_path / "rate.table.parquet")
    assert load_statistic_table(tmp_path, spec).equals(table)
    assert table.schema.names == ["all", "fold_0"]
    assert write_statistic_table(table.slice(0), tmp_path / "rate.table.parquet") == spec


def test_a_damaged_or_foreign_table_is_refused(tmp_path):
    spec = write_statistic_table(
        build_statistic_table(np.ones((3, 1))), tmp_path / "rate.table.parquet"
    )
    with pytest.raises(InputDataError, match="another statistics"):
        load_statistic_table(tmp_path, replace(spec, rows=4))
    with pytest.raises(InputDataError, match="outside"):
        load_statistic_table(tmp_path, replace(spec, file="../x"))
    (tmp_path / spec.file).write_bytes(b"PAR1")
    with pytest.raises(InputDataError, match="checksum"):
        load_statistic_table(tmp_path, spec)


def test_train_rows_read_the_other_folds_and_all_else_the_whole():
    values = np.array([[0.0, 0.0, 0.0], [0.5, 0.4, 0.6], [0.75, 0.25, 1.0]])
    encoder = TargetEncoder(build_lookup(pa.array(["a"])), build_statistic_table(values))
    found = encoder.encode([pa.array(["a", "a", "a", "?"]), pa.array([0, 1, None, None])])
    assert found.to_pylist() == [0.25, 1.0, 0.75, 0.5]
    assert encoder.encode([pa.array(["a"])]).to_pylist() == [0.75]
    with pytest.raises(pa.ArrowInvalid, match="2 were fitted"):
        encoder.encode([pa.array(["a"]), pa.array([2])])
