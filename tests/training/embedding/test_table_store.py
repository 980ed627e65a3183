"""The parameter server: against a dictionary, its files, and a model trained through it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from conf.training.tables import NormalConfig
from etl.encoders.hashing import hash_values
from training.embedding import TableStore
from training.embedding.dynamic_table import draw_first_rows

DIM = 3
INT64 = np.iinfo(np.int64)
KEYS = st.sampled_from([0, 1, 2, -1, -7, INT64.min, INT64.max, *range(100, 140)])
BATCHES = st.tuples(
    st.sampled_from(["pull", "push", "delete"]), st.lists(KEYS, max_size=12).map(tuple)
)


def first_row(key: int) -> np.ndarray:
    keys = np.array([key], np.int64)
    how = {"seed": 0, "table": "table", "initializer": NormalConfig()}
    return draw_first_rows(keys, DIM, **how, has_oov=False)[0]


class Dictionary:
    """The same by a dictionary of vectors, key by key."""

    def __init__(self) -> None:
        self.rows: dict[int, np.ndarray] = {}

    def pull(self, keys: tuple[int, ...]) -> np.ndarray:
        for key in keys:
            self.rows.setdefault(key, first_row(key))
        return np.array([self.rows[key] for key in keys]).reshape(-1, DIM)

    def push(self, keys: tuple[int, ...], values: np.ndarray) -> None:
        for key in keys:  # a key's place is that of its first sight
            self.rows.setdefault(key, np.zeros(DIM))
        self.rows |= dict(zip(keys, values, strict=True))

    def delete(self, keys: tuple[int, ...]) -> int:
        return sum(self.rows.pop(key, None) is not None for key in keys)


@settings(max_examples=150, deadline=None)
@given(st.lists(BATCHES, max_size=20))
def test_it_does_what_a_dictionary_of_vectors_does(batches):
    store, model = TableStore(DIM), Dictionary()
    for number, (method, keys) in enumerate(batches):
        values = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM) + 1000 * number
        if method == "pull":
            np.testing.assert_array_equal(store.pull(keys), model.pull(keys))
        elif method == "push":
            store.push(keys, values)
            model.push(keys, values)
        else:
            assert store.delete(keys) == model.delete(keys)
        assert len(store) == len(model.rows)
    held = tuple(model.rows)
    np.testing.assert_array_equal(store.pull(held), model.pull(held))
    every = [0, 1, -1, INT64.min, INT64.max, *held]
    assert [key in store for key in every] == [key in model.rows for key in every]


def test_text_is_hashed_by_the_recipe_of_the_message_to_what_a_build_makes_of_it():
    texts = ["a", "", "\u00e9", "a longer text than sixteen bytes"]
    with pytest.raises(ConfigError, match=r"received: +<U\d+, such as .*'a'") as caught:
        TableStore(DIM).pull(texts)
    recipe = re.search(r"`(.*?)`", caught.value.fix)[1]
    keys = eval(recipe, {"tf": tf, "texts": texts})
    encoded = hash_values(pa.array(texts), None)
    assert keys.tolist() == encoded.to_pylist()
    store = TableStore(DIM)
    store.push(keys, np.ones((4, DIM)))
    assert len(store) == 4


def test_rows_have_the_shape_of_the_keys_and_are_copies():
    store = TableStore(DIM)
    pulled = store.pull([[5, 6], [0, 5]])  # 0 is a key as any other.
    assert (pulled.shape, pulled.dtype) == ((2, 2, DIM), np.float32)
    np.testing.assert_array_equal(pulled[0, 0], pulled[1, 1])
    pulled[:] = 9
    np.testing.assert_array_equal(store.pull([5, 0]), [first_row(5), first_row(0)])
    assert store.pull(np.empty((2, 0), np.int32)).shape == (2, 0, DIM)


def test_deleted_rows_are_used_again_and_start_anew():
    store = TableStore(DIM)
    store.push(np.arange(1, 5001), np.ones((5000, DIM)))
    before = store.bytes
    for first in range(5001, 50_001, 5000):
        assert store.delete(np.arange(first - 5000, first)) == 5000
        values = np.arange(first, first + 5000)
        store.push(values, np.stack([values] * DIM, axis=1))
    assert (len(store), store.bytes) == (5000, before)
    np.testing.assert_array_equal(store.pull(values)[:, 0], values)  # Each has a row of its own.
    np.testing.assert_array_equal(store.pull([3]), [first_row(3)])


@pytest.fixture
def filled() -> TableStore:
    store = TableStore(DIM)
    store.pull([9, -4, INT64.max, 7])
    store.delete([9])
    store.push([12, 9], [[1, -2, 0.123456789], [0, 1e-3, 5]])
    return store


def test_the_text_form_has_a_line_per_key_in_order_of_creation(filled, tmp_path: Path, capsys):
    assert filled.save(tmp_path / "t.txt") == 5
    assert capsys.readouterr().out == "5 keys\n"
    lines = (tmp_path / "t.txt").read_text().splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == [-4, INT64.max, 7, 12, 9]
    assert all(re.fullmatch(r"-?\d+\t-?\d+\.\d{8}(,-?\d+\.\d{8}){2}", line) for line in lines)
    assert lines[3] == "12\t1.00000000,-2.00000000,0.12345679"
    read = pd.read_csv(tmp_path / "t.txt", sep="[\t,]", header=None, engine="python")
    np.testing.assert_allclose(read.iloc[:, 1:], filled.pull(read[0]), atol=1e-8)


def test_what_is_saved_is_loaded(filled, tmp_path: Path):
    for ending, accuracy in (("", 1e-8), (".txt", 1e-8), (".parquet", 0), (".npz", 0)):
        filled.save(tmp_path / f"t{ending}")
        store = TableStore(DIM)
        store.pull([1, 2])
        assert store.load(tmp_path / f"t{ending}") == len(store) == 5
        keys = [-4, INT64.max, 7, 12, 9]
        np.testing.assert_allclose(store.pull(keys), filled.pull(keys), rtol=0, atol=accuracy)
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert list(frame["key"]) == keys
    np.testing.assert_array_equal(np.stack(frame["vector"]), filled.pull(keys))
    with np.load(tmp_path / "t.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["keys"], keys)
        np.testing.assert_array_equal(arrays["rows"], filled.pull(keys))
    for name in ("none.txt", "none.npz"):
        TableStore(DIM).save(tmp_path / name)
        assert store.load(tmp_path / name) == len(store) == 0


VECTORS = [[1.0, 2.0, 3.0]] * 2
ROWS = np.ones((2, DIM), np.float32)
NO_FILES = {
    "word.txt": "5\t1,2,3\nx\t1,2,3\n",
    "short.txt": "5\t1,2,3\n6\t1,2\n",
    "nan.txt": "5\t1,2,nan\n",
    "large.txt": "9999999999999999999\t1,2,3\n",
    "empty line.txt": "5\t1,2,3\n\n",
    "no key.txt": "5\t1,2,3\n\t1,2,3\n",
    "digits.txt": "4_0\t1,2,3\n5\t1,2,3\n",
    "no tab.txt": "5 1,2,3\n",
    "twice.txt": "5\t1,2,3\n5\t1,2,4\n",
    "columns.parquet": {"id": [1]},
    "no key.parquet": {"key": [5, None], "vector": VECTORS},
    "no vector.parquet": {"key": [5, 6], "vector": [None, VECTORS[0]]},
    "rounded.parquet": {"key": [5.0, 2.0**60], "vector": VECTORS},
    "truth.parquet": {"key": [True, False], "vector": VECTORS},
    "twice.parquet": {"key": [5, 5], "vector": VECTORS},
    "no rows.npz": {"keys": np.array([5, 6])},
    "column.npz": {"keys": np.array([[5], [6]]), "rows": ROWS},
    "rounded.npz": {"keys": np.array([5.0, 6.0]), "rows": ROWS},
    "fewer.npz": {"keys": np.array([5, 6]), "rows": ROWS[:1]},
    "short.npz": {"keys": np.array([5, 6]), "rows": ROWS[:, :1]},
    "flat.npz": {"keys": np.array([5, 6]), "rows": ROWS[:, 0]},
    "one.npz": {"keys": np.array(5), "rows": ROWS},
    "nan.npz": {"keys": np.array([5, 6]), "rows": np.array([[1, 2, 3], [4, np.nan, 6]], "f4")},
    "object.npz": {"keys": np.array([{}]), "rows": ROWS},
    "twice.npz": {"keys": np.array([5, 5]), "rows": ROWS},
}


def write_file(path: Path, content) -> None:
    if path.suffix == ".txt":
        path.write_text(content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        pq.write_table(pa.table(content), path)


@pytest.mark.parametrize("name", NO_FILES)
def test_a_bad_file_is_refused_and_loses_nothing(filled, tmp_path: Path, name: str):
    write_file(tmp_path / name, NO_FILES[name])
    before = filled.pull([7])
    with pytest.raises(InputDataError):
        filled.load(tmp_path / name)
    assert len(filled) == 5
    np.testing.assert_array_equal(filled.pull([7]), before)


@pytest.mark.parametrize("ending", [".parquet", ".npz"])
def test_half_a_file_and_rows_of_another_length_are_refused(filled, tmp_path: Path, ending: str):
    path = tmp_path / f"t{ending}"
    filled.save(path)
    with pytest.raises(InputDataError, match="row 1"):
        TableStore(DIM + 1).load(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputDataError, match="cannot be read"):
        filled.load(path)


def test_the_guides_model_is_trained_through_it():
    page = Path(__file__).parents[3] / "docs" / "guide" / "training-dynamic.md"
    section = page.read_text().split("## A parameter server for trainers of one's own")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, 2)), rng.normal(size=(60, 2))
    users, items = rng.integers(0, 40, 4000), rng.integers(0, 60, 4000)
    ratings = np.sum(truth[0][users] * truth[1][items], axis=1)
    names = {"users": users + 10**12, "items": items - 10**12, "ratings": ratings}
    exec(code, names)
    assert names["rmse"] < 0.1 * np.std(ratings)
    assert len(names["user_rows"]) == len(np.unique(users))
