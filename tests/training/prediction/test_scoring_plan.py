"""What a job of scores plans before Spark is started."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.export import KEY
from conf.errors import InputDataError
from training.raw_inputs.input_columns import InputColumn
from training.scoring.plan import Exported, read_candidates


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """An export whose catalogue has the items 10 to 19."""
    pq.write_table(pa.table({KEY: pa.array(range(10, 20), pa.int64())}), tmp_path / "items.parquet")
    item = InputColumn("item", "item", "movie", "int64", False, None, None, None)
    return Exported(tmp_path, {"lists": {"item": item.to_json()}})


def test_candidates_are_each_named_once_and_in_order(exported: Exported, tmp_path: Path) -> None:
    file = tmp_path / "few.csv"
    file.write_text("movie\n15\n13\n15\n")
    assert read_candidates(exported, "items.parquet", file) == (13, 15)


def test_candidates_that_the_catalogue_lacks_are_left_out_and_told(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "few.csv"
    file.write_text("movie\n15\n999\n13\n")
    assert read_candidates(exported, "items.parquet", file) == (13, 15)
    assert "1 of 3 candidates" in caplog.text
    assert "999" in caplog.text
    file.write_text("movie\n998\n999\n")
    with pytest.raises(InputDataError, match="no candidate"):
        read_candidates(exported, "items.parquet", file)
