from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conf.errors import InputDataError
from etl.encoders.tables import build_table, load_table, write_table


def test_a_table_comes_back_and_same_values_give_same_bytes(tmp_path):
    table = build_table(np.array([[0.5, 0.25], [1.0, 2.0]]))
    spec = write_table(table, tmp_path / "rate.table.parquet")
    assert load_table(tmp_path, spec).equals(table)
    assert table.schema.names == ["all", "fold_0"]
    assert write_table(table.slice(0), tmp_path / "rate.table.parquet") == spec


def test_a_damaged_or_foreign_table_is_refused(tmp_path):
    spec = write_table(build_table(np.ones((3, 1))), tmp_path / "rate.table.parquet")
    with pytest.raises(InputDataError, match="not a table of statistics"):
        load_table(tmp_path, replace(spec, rows=4))
    with pytest.raises(InputDataError, match="outside"):
        load_table(tmp_path, replace(spec, file="../x"))
    (tmp_path / spec.file).write_bytes(b"PAR1")
    with pytest.raises(InputDataError, match="checksum"):
        load_table(tmp_path, spec)
