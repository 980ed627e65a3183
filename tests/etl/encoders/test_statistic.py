from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from etl.encoders.lookup import build_lookup
from etl.encoders.statistic import StatisticEncoder
from etl.encoders.tables import build_table


def test_train_rows_read_the_other_folds_and_all_else_the_whole():
    values = np.array([[0.0, 0.0, 0.0], [0.5, 0.4, 0.6], [0.75, 0.25, 1.0]])
    encoder = StatisticEncoder(build_lookup(pa.array(["a"])), build_table(values))
    found = encoder.encode([pa.array(["a", "a", "a", "?"]), pa.array([0, 1, None, None])])
    assert found.to_pylist() == [0.25, 1.0, 0.75, 0.5]
    assert encoder.encode([pa.array(["a"])]).to_pylist() == [0.75]
    with pytest.raises(pa.ArrowInvalid, match="2 were fitted"):
        encoder.encode([pa.array(["a"]), pa.array([2])])
