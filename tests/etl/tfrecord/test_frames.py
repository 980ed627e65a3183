from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from conf.errors import ConfigError
from etl.tfrecord.frames import read_frame, write_frame


def test_round_trip(tmp_path):
    frame = pd.DataFrame(
        {
            "user": [1, 2**53 + 1],
            "score": np.array([0.5, -1.5], np.float32),
            "name": ["a", "ü"],
            "history": [np.array([3, 1]), np.array([], np.int64)],
        },
        index=[7, 9],
    )
    path = tmp_path / "a.tfrecord"
    write_frame(frame, path)
    found = read_frame(path)
    assert list(found.columns) == list(frame.columns)
    assert found["user"].tolist() == frame["user"].tolist()
    assert found["score"].dtype == np.float32
    assert [list(h) for h in found["history"]] == [[3, 1], []]


def test_ids_with_nulls_do_not_pass_through_a_float(tmp_path):
    frame = pd.DataFrame({"id": pd.array([2**60 + 1, None], "Int64")})
    write_frame(frame, tmp_path / "a.tfrecord")
    found = read_frame(tmp_path / "a.tfrecord")
    assert found["id"].dtype == "Int64"
    assert found["id"][0] == 2**60 + 1
    assert found["id"].isna().tolist() == [False, True]


def test_a_column_of_mixed_types_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="astype"):
        write_frame(pd.DataFrame({"x": [1, "a"]}), tmp_path / "a.tfrecord")


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame([[1, 2]], columns=["a", "a"]),
        pd.DataFrame({"a": [1j]}),
        pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}),
    ],
)
def test_what_arrow_has_no_form_for_is_refused(frame, tmp_path) -> None:
    with pytest.raises(ConfigError, match="column of the frame"):
        write_frame(frame, tmp_path / "f")
    assert not (tmp_path / "f").exists()
