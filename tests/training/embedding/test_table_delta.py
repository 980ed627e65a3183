"""Deltas of tables, beside a dictionary of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.delta import DELTA_FILE, DELTA_FORMAT_VERSION
from conf.artefacts.export import TABLES_DIR, list_files
from conf.artefacts.run import write_json
from conf.errors import ConfigError, InputDataError
from conf.schema import fingerprint
from training.embedding import TableStore
from training.embedding.table_files import compare_tables, write_delta_rows

KEYS = st.sampled_from([-(2**63), -7, 1, 2, 3, 8, 2**63 - 1])
VALUES = st.sampled_from([0.0, -0.0, 1.5, -2.0])
TABLES = st.dictionaries(KEYS, st.tuples(VALUES, VALUES))
Table = dict[int, tuple[float, float]]


def to_arrays(table: Table) -> tuple[np.ndarray, np.ndarray]:
    rows = np.array(list(table.values()), np.float32).reshape(len(table), 2)
    return np.array(list(table), np.int64), rows


def to_bits(table: Table) -> dict[int, bytes]:
    return {key: np.array(row, np.float32).tobytes() for key, row in table.items()}


@settings(max_examples=150, deadline=None)
@given(TABLES, TABLES)
def test_a_delta_leads_from_one_table_to_the_other(before: Table, after: Table) -> None:
    delta = compare_tables(to_arrays(before), to_arrays(after))
    old, new = to_bits(before), to_bits(after)
    assert set(delta.changed[0]) == {key for key in new if old.get(key) != new[key]}
    assert set(delta.removed) == set(old) - set(new)
    keys, rows = (column[::-1] for column in to_arrays(before))  # In any order.
    keys, rows = delta.apply((keys, rows))
    assert {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)} == new
    assert list(keys) == sorted(new)
    if old != new:
        with pytest.raises(InputDataError, match="another state"):
            delta.apply(to_arrays(after))


def write_delta(directory: Path, before: Table, after: Table) -> None:
    """A delta's directory with one table, `items`."""
    delta = compare_tables(to_arrays(before), to_arrays(after))
    (directory / TABLES_DIR).mkdir(parents=True)
    write_delta_rows(directory / TABLES_DIR, "items", delta)
    about = {
        "format_version": DELTA_FORMAT_VERSION,
        "tables": {"items": {"dim": 2, "base": delta.base, "result": delta.result}},
        "files": list_files(directory),
    }
    write_json(directory / DELTA_FILE, {**about, "fingerprint": fingerprint(about)})


def test_a_store_takes_deltas_in_order_and_refuses_all_others(tmp_path: Path) -> None:
    days: list[Table] = [{}, {3: (1.0, 2.0), 4: (3.0, 4.0)}, {4: (3.0, 5.0), -6: (0.5, 0.5)}]
    for number in (1, 2):
        write_delta(tmp_path / str(number), days[number - 1], days[number])
    store = TableStore(dim=2)
    with pytest.raises(InputDataError, match="another state"):
        store.apply(tmp_path / "2", "items")
    assert len(store) == 0
    assert store.apply(tmp_path / "1", "items") == 2
    assert store.apply(tmp_path, "items") == 3  # the newest of a directory of deltas
    assert len(store) == 2
    np.testing.assert_array_equal(store.pull([4, -6]), [[3.0, 5.0], [0.5, 0.5]])
    with pytest.raises(InputDataError, match="another state"):
        store.apply(tmp_path / "2", "items")
    with pytest.raises(ConfigError, match="no such table"):
        store.apply(tmp_path / "2", "users")
    with pytest.raises(ConfigError, match="of this length"):
        TableStore(dim=3).apply(tmp_path / "2", "items")
    file = tmp_path / "2" / TABLES_DIR / "items.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputDataError, match="not those that were written"):
        store.apply(tmp_path / "2", "items")
    np.testing.assert_array_equal(store.pull([4, -6]), [[3.0, 5.0], [0.5, 0.5]])
