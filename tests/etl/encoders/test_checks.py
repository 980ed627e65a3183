from __future__ import annotations

from dataclasses import replace

import pytest

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.errors import InputDataError
from conf.operations import Bucketize, Hash, MultiHot, Statistic
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.checks import check_plan

SPEC = FeatureSpec("x", "int64", "user", encoding="hash:x", vocabulary_size=12)
COLUMN = ColumnEncoding("x", "a", "int64", "hash:x", Hash(10), (RawColumn("a", "int64"),))


def check(spec=SPEC, column=COLUMN, tables=()):
    check_plan(EncoderPlan(FeatureSchema((spec,)), (column,), ()), (), tables)


def test_a_sound_plan_passes():
    check()


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        (SPEC, replace(COLUMN, inputs=()), "which columns"),
        (replace(SPEC, vocabulary_size=13), COLUMN, "not what its encoder makes"),
        (replace(SPEC, dtype="float32"), COLUMN, "not what its encoder makes"),
        (SPEC, replace(COLUMN, inputs=(RawColumn("a", "float32"),)), "does not take"),
        (replace(SPEC, vocabulary_size=4), replace(COLUMN, operation=Bucketize(())), "makes"),
        (
            FeatureSpec("x", "float32", "user", (3,)),
            replace(COLUMN, operation=MultiHot("v", 3)),
            "unknown encoder",
        ),
        (
            FeatureSpec("x", "float32", "user"),
            replace(COLUMN, operation=Statistic("v", "t")),
            "unknown table",
        ),
    ],
)
def test_contradictions_are_refused(spec, column, message):
    with pytest.raises(InputDataError, match=message):
        check(spec, column)


def test_files_must_be_those_of_the_plan():
    with pytest.raises(InputDataError, match="tables are not those"):
        check(tables=("other",))
