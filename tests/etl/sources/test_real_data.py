"""Real logs, where the machine has them: every row is read, and is what the file says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pyspark.sql import functions as F

from etl.sources.bad_rows import count_rows
from tests.etl.sources.inputs import declare, read
from tests.real_data import require_data

pytestmark = pytest.mark.slow


def column(name: str, kind: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **options}


SESSION = [column("items", "list<int64>", separator=" "), column("next", "int64")]
CRITEO = [
    column("label", "int64"),
    *[column(f"i{i}", "int64", nullable=True) for i in range(13)],
    *[column(f"c{i}", "string", nullable=True) for i in range(26)],
]


@pytest.mark.parametrize(
    ("path", "rows", "columns", "options"),
    [
        ("a9a/a9a_123d_train.libsvm", 32_561, [], {"format": "libsvm"}),
        ("frappe/nfm/frappe.test.libfm", 28_860, [], {"format": "libfm"}),
        ("ipinyou-deepctr/test.fm.txt", 21_150, [], {"format": "libfm"}),
        ("diginetica-coder/train.tsv", 77_929, SESSION, {}),
        ("criteo-10k/train_examples.txt", 10_000, CRITEO, {}),
    ],
)
def test_every_row_is_read(spark, path, rows, columns, options):
    name, _, file = path.rpartition("/")
    folder = require_data(name)
    source = read(spark, folder, declare(*columns, path=file, **options))
    counts = count_rows(source)
    assert (counts.read, counts.bad) == (rows, {})
    lines = (folder / file).read_text().splitlines()
    if options:
        sizes = source.good.groupBy(F.size("indices").alias("n")).count().collect()
        assert {row["n"]: row["count"] for row in sizes} == Counter(
            line.count(":") for line in lines
        )
    elif columns is SESSION:
        total = source.good.agg(F.sum(F.size("items")), F.sum("next")).first()
        texts = [line.split("\t") for line in lines]
        assert tuple(total) == (
            sum(len(items.split(" ")) for items, _ in texts),
            sum(int(item) for _, item in texts),
        )
    else:
        empty = sum(not line.split("\t")[20] for line in lines)
        assert rows - counts.values["c6"] == empty
