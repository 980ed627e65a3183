"""What a job of scores plans before Spark is started."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training.scoring.plan import Exported, read_candidates

from conf.artefacts.export import KEY
from conf.errors import InputDataError
from training.raw_inputs.inputs import InputColumn


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """An export whose catalogue has the items 10 to 19."""
    pq.write_table(pa.table({KEY: pa.array(range(10, 20), pa.int64())}), tmp_path / "items.parquet")
    item = InputColumn("item", "item", "movie", "int64", False, None, None, None)
    return Exported(tmp_path, {"lists": {"item": item.to_json()}})


def test_candidates_are_sorted_and_each_named_once(exported: Exported, tmp_path: Path) -> None:
    file = tmp_path / "few.csv"
    file.write_text('\ufeffmovie\n15\n "13" \n', encoding="utf-8")
    assert read_candidates(exported, "items.parquet", file) == (13, 15)
    file.write_text("movie\n15\n13\n15\n")
    with pytest.raises(InputDataError, match="a key twice") as caught:
        read_candidates(exported, "items.parquet", file)
    assert "rows 1 and 3: 15" in str(caught.value.received)


def test_candidates_that_the_catalogue_lacks_are_left_out_and_told(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "few.csv"
    file.write_text("movie\n15\n999\n13\n")
    assert read_candidates(exported, "items.parquet", file) == (13, 15)
    assert "few.csv: 1 of 3 keys match nothing, the first 999" in caplog.text
    file.write_text("movie\n998\n999\n")
    with pytest.raises(InputDataError, match="no candidate"):
        read_candidates(exported, "items.parquet", file)
