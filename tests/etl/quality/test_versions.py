"""What the checks know of a version: ids are told by the tokens that have them."""

from __future__ import annotations

import pyarrow as pa

from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import write_vocabulary
from etl.quality.versions import VersionView


def test_tokens_behind_oov_buckets_keep_their_names(tmp_path):
    directory = tmp_path / ENCODERS_DIR
    directory.mkdir()
    table = pa.table({"token": ["a", "b"], "id": [5, 6], "count": [3, 2]})
    spec = write_vocabulary(table, directory / "brand.parquet", oov_buckets=3)
    feature = FeatureSpec("brand", "int64", "item", encoding="brand", vocabulary_size=spec.size)
    schema = FeatureSchema((feature,))
    plan = EncoderPlan(schema, (ColumnEncoding("brand", "brand", "string", "brand"),), (spec,))
    (directory / ENCODERS_FILE).write_text(plan.dumps())
    view = VersionView(tmp_path, schema, {}, {})
    assert view.tokens("brand", [0, 1, 2, 4, 5, 6, 7]) == {
        0: "(pad)",
        1: "(oov)",
        2: "(oov 0)",
        4: "(oov 2)",
        5: "a",
        6: "b",
    }
