"""The search for items beside NumPy: kinds of indexes, filters, recall."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from conf.artefacts.export import IndexKind
from conf.errors import InputDataError
from training.index import vector_index
from training.index.item_columns import (
    ItemColumns,
    WrongFilterError,
    align_columns,
    are_empty,
    read_table,
)
from training.index.vector_index import fit_index, tune

ITEMS, DIM = 3000, 8


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    rng = np.random.default_rng(4)
    centers = rng.standard_normal((20, DIM))[rng.integers(0, 20, ITEMS)]
    return (centers + 0.4 * rng.standard_normal((ITEMS, DIM))).astype(np.float32)


@pytest.mark.parametrize("kind", IndexKind)
def test_lists_are_those_of_the_allowed_items(kind, vectors, monkeypatch) -> None:
    monkeypatch.setattr(vector_index, "EXACT_ITEMS", 40)
    queries = vectors[::300] + np.float32(0.05)
    index, recall, _ = tune(fit_index(kind, vectors), queries, 20, 0.99)
    assert recall >= 0.99
    rng = np.random.default_rng(5)
    for share in (1.0, 0.5, 0.1, 0.01, 0.001):
        found = []
        for query in queries:
            allowed = rng.random(ITEMS) < share
            positions, scores = index.search(query, 20, allowed)
            assert allowed[positions].all()
            assert len(positions) == min(20, allowed.sum())
            np.testing.assert_allclose(scores, vectors[positions] @ query, rtol=1e-5)
            assert (np.diff(scores) <= 0).all()
            own = np.where(allowed, vectors.astype(np.float64) @ query, -np.inf)
            expected = np.argsort(-own, kind="stable")[: len(positions)]
            found.append(np.isin(expected, positions).mean() if len(expected) else 1.0)
        assert np.mean(found) >= (1.0 if kind == "exact" or share < 0.02 else 0.95)
    assert len(index.search(queries[0], 20, np.zeros(ITEMS, bool))[0]) == 0


def test_the_first_of_equal_items_has_the_last_place(vectors) -> None:
    """Each vector twice, in another order: a list may end between the two."""
    order = np.random.default_rng(6).permutation(600)
    twice = np.concatenate([vectors[:300], vectors[:300]])[order]
    index, allowed = fit_index(IndexKind.EXACT, twice), np.arange(600) % 7 > 0
    for query in (*vectors[::100], np.zeros(DIM, np.float32)):
        for k, some in ((1, allowed), (9, allowed), (72, np.ones(600, bool)), (599, allowed)):
            scores = np.where(some, index.exact.reconstruct_n(0, 600) @ query, -np.inf)
            expected = np.lexsort((np.arange(600), -scores))[: min(k, some.sum())]
            assert index.search(query, k, some)[0].tolist() == expected.tolist()


def test_the_effort_grows_until_the_recall_is_reached(vectors) -> None:
    queries = vectors[::50] + np.float32(0.1)
    index = fit_index(IndexKind.IVF, vectors)
    least, few, _ = tune(index, queries, 10, 0.0)
    chosen, enough, milliseconds = tune(index, queries, 10, 0.9)
    every, whole, _ = tune(index, queries, 10, 1.0)
    assert least.effort == 1 < chosen.effort <= every.effort <= 64  # 46 cells.
    assert few < 0.9 <= enough <= whole == 1.0
    assert milliseconds > 0


def test_hashes_of_a_csv_file_are_text(tmp_path) -> None:
    path, hashes = tmp_path / "items.csv", ["12345678901234567890", "12345678901234567891"]
    rows = [f"{n},0.5,{hash_}" for n, hash_ in enumerate(hashes)]
    path.write_text("\n".join(["id,score,hash", *rows]) + "\n")
    table = read_table(path)
    assert table.schema.types == [pa.string(), pa.float64(), pa.string()]
    assert table["hash"].to_pylist() == hashes
    late = ["id,score", *(f"{n},0.5" for n in range(300_000)), f"x,{hashes[0]}"]
    path.write_text("\n".join(late) + "\n")
    assert read_table(path)["score"].to_pylist()[-1] == hashes[0]
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(f'{{"id": {h}, "hash": {h}, "score": 0.5}}\n' for h in hashes))
    assert read_table(lines).to_pydict() == {"id": hashes, "hash": hashes, "score": [0.5, 0.5]}
    path.write_text('id,title\n1,x\n2,"abc\n')
    with pytest.raises(InputDataError):
        read_table(path)


def test_columns_filter_by_values_of_any_kind() -> None:
    table = pa.table({
        "key": [3, 1, 7], "title": ["A|B", None, "C"], "year": [1990, 1991, None],
        # pandas makes floats of whole numbers beside a null, and Arrow writes 1e+10 for them.
        "score": [0.5, 2.0, None], "at": [1e10, None, 5.0],
        "tags": [["x", "y"], [], ["y"]], "new": [True, False, None],
        "price": pa.array([Decimal("10.00"), Decimal("9.50"), None], pa.decimal128(10, 2)),
        "code": pa.array([Decimal(10**20 + 1), Decimal(10**20), None], pa.decimal128(38, 0)),
        "hash": pa.array([2**63 + 1, 2**63, None], pa.uint64()),
        "sales": [1e10, 0.5, -0.0], "size": pa.array([0.1, 3e10, None], pa.float32()),
    })  # fmt: skip
    columns = ItemColumns(align_columns(table, pa.array(["1", "3", "5", "7"])))
    for wanted, expected in (
        ({"title": "A"}, [1]), ({"title": ["B", "C"]}, [1, 3]), ({"score": "2.0"}, [0]),
        ({"year": 1991}, [0]), ({"year": "1991"}, [0]), ({"score": 0.5}, [1]), ({"score": 2}, [0]),
        ({"tags": "y"}, [1, 3]), ({"tags": "y", "title": "C"}, [3]), ({"tags": []}, []),
        ({"tags": "x|y"}, []), ({"new": "true"}, [1]), ({}, [0, 1, 2, 3]),
        *(({"at": at}, [1]) for at in (10_000_000_000, 1e10, "10000000000")),
        *(({"price": price}, [1]) for price in (10, 10.0, "10.00")), ({"price": 9.5}, [0]),
        *(({"code": code}, [0]) for code in (10**20, str(10**20))),
        *(({"hash": hash_}, [0]) for hash_ in (2**63, str(2**63))),
        # Fractions beside them, so that they stay floats.
        *(({"sales": sales}, [1]) for sales in (10_000_000_000, 1e10, "1e10")),
        *(({"sales": nothing}, [3]) for nothing in (0, 0.0, -0.0, "0")), ({"sales": 0.5}, [0]),
        ({"size": 0.1}, [1]), ({"size": 3e10}, [0]),
        ({"year": 2**80}, []), ({"title": "\ud800"}, []), ({"score": float("nan")}, []),
    ):  # fmt: skip
        values = {n: one if isinstance(one, list) else [one] for n, one in wanted.items()}
        assert np.flatnonzero(columns.find(values)).tolist() == expected, wanted
    for wrong in (
        {"colour": [1]}, {"title": ["A|B"]},
        *({"year": [text]} for text in ("new", "1_990", "\u0661")),
    ):  # fmt: skip
        with pytest.raises(WrongFilterError):
            columns.find(wrong)
    first, unknown, last = columns.get(np.array([1, 2, 3]))
    assert first == {"title": "A|B", "year": 1990, "score": 0.5, "at": 1e10, "tags": ["x", "y"],
                     "new": True, "price": "10.00", "code": str(10**20 + 1),
                     "hash": 2**63 + 1, "sales": 1e10, "size": float(np.float32(0.1))}  # fmt: skip
    assert (unknown, last["year"]) == ({}, None)


def test_an_item_has_one_row_in_a_file(tmp_path) -> None:
    """Of a row for each genre the first would count alone."""
    path = tmp_path / "items.csv"
    path.write_text("id,genre\n7,Drama\n,War\n,War\n7,War\n")
    with pytest.raises(InputDataError, match="rows 1 and 4: '7'"):
        read_table(path)
    lines = path.with_suffix(".jsonl")
    lines.write_text('{"genres": ["Drama"], "id": 7}\n')
    with pytest.raises(InputDataError):
        read_table(lines)
    path.write_text("id,genre,genre\n7,Drama,War\n")
    with pytest.raises(InputDataError, match="two columns of one name"):
        align_columns(read_table(path), pa.array([7]))


@pytest.mark.parametrize(
    ("text", "is_empty"), [("title,id\nA,7\n", True), ("id,title\n7,A\n", False)]
)
def test_a_file_with_the_key_in_another_column_is_told(tmp_path, text, is_empty) -> None:
    (tmp_path / "items.csv").write_text(text)
    columns = align_columns(read_table(tmp_path / "items.csv"), pa.array([7, 8]))
    assert are_empty(columns) == is_empty
