"""libsvm, libfm and libffm: aligned lists, or a bad row that says which part does not fit."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.etl.sources.inputs import declare, good, outcomes, read


def write(folder, *lines):
    (folder / "in").write_text("\n".join(lines) + "\n")


def test_libsvm_lines_and_their_faults(spark, tmp_path):
    write(
        tmp_path,
        "+1 3:1 11:0.5  14:-2e-1 ",
        "-1",
        "0 7:1 # a comment 9",
        "1 3:1 4",
        "1 3:1:2",
        "1 3: 4:1",
        "1 x:1",
        "1 -3:1",
        "1 3:x",
        "1 3:inf",
        "yes 3:1",
        "",
        "1 9223372036854775808:1",
        "1 9223372036854775807:1\r",
    )
    assert outcomes(read(spark, tmp_path, declare(format="libsvm"))) == [
        (1.0, [3, 11, 14], [1.0, 0.5, -0.20000000298023224]),
        (-1.0, [], []),
        (0.0, [7], [1.0]),
        "malformed_pair",
        "malformed_pair",
        "malformed_pair",
        "not_list<int64>:indices",
        "below_minimum:indices",
        "not_list<float32>:values",
        "not_finite:values",
        "not_float32:label",
        "empty_line",
        "not_list<int64>:indices",
        (1.0, [2**63 - 1], [1.0]),
    ]


def test_libffm_has_fields(spark, tmp_path):
    write(tmp_path, "1 0:3:1 2:11:0.5", "0 3:1")
    source = read(spark, tmp_path, declare(format="libffm"))
    assert outcomes(source) == [(1.0, [0, 2], [3, 11], [1.0, 0.5]), "malformed_pair"]
    assert source.good.columns[:4] == ["label", "fields", "indices", "values"]


def test_query_ids_are_read_where_they_are_declared_and_passed_over_else(spark, tmp_path):
    write(tmp_path, "2 qid:7 1:1 2:0.5", "1 1:1", "0 qid:x 1:1", "2 qid:7 1:1 qid:8")
    columns = [
        {"name": "clicked", "field": "label", "type": "int64"},
        {"name": "query", "field": "qid", "type": "int64", "nullable": True},
        {"name": "indices", "type": "list<int64>"},
        {"name": "values", "type": "list<float32>"},
    ]
    source = read(spark, tmp_path, declare(*columns, format="libsvm"))
    assert outcomes(source) == [
        (2, 7, [1, 2], [1.0, 0.5]),
        (1, None, [1], [1.0]),
        "not_int64:query",
        "not_list<int64>:indices",
    ]
    plain = read(spark, tmp_path, declare(format="libsvm"))
    assert outcomes(plain)[:2] == [(2.0, [1, 2], [1.0, 0.5]), (1.0, [1], [1.0])]


PAIRS = st.lists(
    st.tuples(
        st.integers(0, 2**63 - 1), st.floats(width=32, allow_nan=False, allow_infinity=False)
    ),
    max_size=6,
)


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(-5, 5), PAIRS), min_size=100, max_size=100))
def test_what_is_written_is_read_back(spark, tmp_path, rows):
    lines = (f"{label} {' '.join(f'{i}:{v!r}' for i, v in pairs)}" for label, pairs in rows)
    write(tmp_path, *lines)
    read_back = good(read(spark, tmp_path, declare(format="libfm")))
    assert read_back == [
        (float(label), [i for i, _ in pairs], [v for _, v in pairs]) for label, pairs in rows
    ]
