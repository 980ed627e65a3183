"""Rows that other systems saved: files of TFRA and mxRec, tensors of checkpoints.

`tests/contract/golden/tfra` was written by tensorflow-recommenders-addons 0.8.1 (TensorFlow
2.16.2): a `de.Variable` of int64 keys and three float32 numbers on two devices, once by
`save_to_file_system`, once by `tf.train.Checkpoint`. All other files are written here, byte for
byte as those systems describe them.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError, SluiceError
from training.embedding import TableStore
from training.embedding.table_files import load_table

GOLDEN = Path(__file__).parents[2] / "contract" / "golden" / "tfra"
KEYS = [5, -7, 2**62, 9, 11, 8]
ROWS = (np.arange(18, dtype=np.float32).reshape(6, 3) / 8).tolist()
TFRA = "rows_mht_{shard}of{shards}_rank{rank}_size{size}"


def write_bare(stem: Path, keys: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
    """A pair of files, number by number."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    numbers = [number for row in rows for number in row]
    Path(f"{stem}-keys").write_bytes(struct.pack(f"<{len(keys)}q", *keys))
    Path(f"{stem}-values").write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))


def write_tfra(folder: Path, shards: int = 2, size: int = 1) -> None:
    parts = shards * size
    for part in range(parts):
        rank, shard = divmod(part, shards)
        name = TFRA.format(shard=shard + 1, shards=shards, rank=rank, size=size)
        write_bare(folder / name, KEYS[part::parts], ROWS[part::parts])


def write_mxrec(
    folder: Path, names: Sequence[str] = ("slice",), attributes: str | None = "int64"
) -> None:
    """The folder of a table, with the state of LazyAdam beside."""
    parts = len(names)
    for part, name in enumerate(names):
        keys, rows = KEYS[part::parts], ROWS[part::parts]
        for kind in ("key", "embedding", "LazyAdam_momentum", "LazyAdam_velocity"):
            own = folder / kind
            own.mkdir(parents=True, exist_ok=True)
            numbers = keys if kind == "key" else [number for row in rows for number in row]
            form = "q" if kind == "key" else "f"
            (own / f"{name}.data").write_bytes(struct.pack(f"<{len(numbers)}{form}", *numbers))
            if attributes is None:
                continue
            shape = [len(keys), 8] if kind == "key" else [len(rows), 3, 4]
            about = struct.pack(f"<{len(shape)}q", *shape)
            if attributes == "json" and kind != "key":
                about = json.dumps({"data_type": "float32", "shape": shape[:2]}).encode()
            (own / f"{name}.attribute").write_bytes(about)


def write_checkpoint(prefix: Path, **tables: tuple[np.ndarray, np.ndarray]) -> None:
    """Tensors by name, as Estimators of TFRA and DeepRec write them."""
    names = [f"{table}{end}" for table in tables for end in ("-keys", "-values")]
    tensors = [tf.constant(one) for pair in tables.values() for one in pair]
    tf.raw_ops.SaveV2(
        prefix=str(prefix), tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors
    )


def check(path: Path | str, keys: Sequence[int] = KEYS, rows: Sequence = ROWS) -> None:
    """A store holds these rows, and so does what a warm start reads."""
    store = TableStore(3)
    assert store.load(path) == len(keys)
    np.testing.assert_array_equal(store.pull(keys), rows)
    if 0 not in keys:
        found = dict(zip(*(part.tolist() for part in load_table(Path(path), 3)), strict=True))
        assert found == dict(zip(keys, rows, strict=True))


@pytest.mark.parametrize("name", ["user_rows", "model", "model#ck", "model.index"])
def test_what_tfra_wrote_itself_is_read(name: str) -> None:
    check(GOLDEN / name, [5, -7, 2**62, 0, 11, 8])
    # In a model's table 0 is padding.
    with pytest.raises(InputDataError, match="a key twice, or key 0"):
        load_table(GOLDEN / name, 3)


def test_a_checkpoint_whose_tables_lie_beside_it_says_so(tmp_path):
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "w"), tensor_names=["v"], shape_and_slices=[""], tensors=[[1.0]]
    )
    assert "TFRADynamicEmbedding" in str(refuse(tmp_path / "w", ConfigError, "no such table").fix)


@pytest.mark.parametrize(("shards", "size"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_files_of_tfra_are_read_by_folder_and_by_name(tmp_path, shards, size):
    write_tfra(tmp_path / "files", shards, size)
    for path in (tmp_path / "files", tmp_path / "files" / "rows"):
        check(path)


def test_one_pair_of_files_is_read_whatever_its_name(tmp_path):
    write_bare(tmp_path / "mine", KEYS, ROWS)
    for name in ("mine", "mine-keys", "mine-values"):
        check(tmp_path / name)
    empty = tmp_path / "none"
    write_bare(empty, [], [])
    check(empty, [], np.empty((0, 3)))


EVERY_RANK = tuple(f"slice_{rank}" for rank in range(11))


@pytest.mark.parametrize("names", [("slice_1",), ("slice_0", "slice_2"), ("slice", "slice_0")])
def test_a_folder_of_mxrec_without_a_rank_is_refused(tmp_path, names):
    write_mxrec(tmp_path / "users", names, None)
    refuse(tmp_path / "users", InputDataError, "keys and rows of one table")


@pytest.mark.parametrize("attributes", ["int64", "json", None])
@pytest.mark.parametrize("names", [("slice",), ("slice_0",), EVERY_RANK])
def test_folders_of_mxrec_are_read(tmp_path, names, attributes):
    write_mxrec(tmp_path / "users", names, attributes)
    check(tmp_path / "users")


def test_a_table_of_a_checkpoint_is_read_by_its_name(tmp_path):
    keys, rows = np.array(KEYS), np.array(ROWS, np.float32)
    write_checkpoint(
        tmp_path / "model",
        **{
            "users_mht_1of2": (keys[:2], rows[:2]),
            "users_mht_2of2": (keys[2:], rows[2:]),
            "deep/items/part_0": (keys[3:], rows[3:].astype(np.float16)),
            "deep/items/part_1": (keys[:3], rows[:3].astype(np.float16)),
        },
    )
    check(tmp_path / "model#users")
    check(tmp_path / "model#items")
    check(tmp_path / "model#deep/items")
    with pytest.raises(ConfigError, match="holds several tables") as refused:
        TableStore(3).load(tmp_path / "model")
    assert "model#users" in str(refused.value.allowed)
    with pytest.raises(ConfigError, match="no such table"):
        TableStore(3).load(tmp_path / "model#item")
    with pytest.raises(InputDataError, match="no rows of this table"):
        TableStore(4).load(tmp_path / "model#users")


def test_a_saved_model_and_a_folder_of_checkpoints_are_read(tmp_path):
    saved = tmp_path / "saved" / "variables"
    saved.mkdir(parents=True)
    for end in ("index", "data-00000-of-00001"):
        shutil.copy(GOLDEN / f"model.{end}", saved / f"variables.{end}")
        shutil.copy(GOLDEN / f"model.{end}", tmp_path / f"model.{end}")
    check(tmp_path / "saved", [5, -7, 2**62, 0, 11, 8])
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model"\n')
    check(tmp_path, [5, -7, 2**62, 0, 11, 8])


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_a_damaged_checkpoint_is_refused(tmp_path):
    for end in ("index", "data-00000-of-00001"):
        shutil.copy(GOLDEN / f"model.{end}", tmp_path / f"model.{end}")
    data = tmp_path / "model.data-00000-of-00001"
    data.write_bytes(bytes(len(data.read_bytes())))
    refuse(tmp_path / "model", InputDataError, "model cannot be read")
    cut(tmp_path / "model.index", 40)
    refuse(tmp_path / "model", InputDataError, "model cannot be read")


def refuse(path: Path, kind: type[SluiceError], message: str, dim: int = 3) -> SluiceError:
    """Refused by the store, which keeps its rows, and by warm starts."""
    store = TableStore(dim)
    store.push([1], [[0.5] * dim])
    with pytest.raises(kind, match=message) as refused:
        store.load(path)
    assert len(store) == 1
    np.testing.assert_array_equal(store.pull([1]), [[0.5] * dim])
    with pytest.raises(kind):
        load_table(path, dim)
    return refused.value


def with_row(row: list[float], key: int = 8) -> Callable[[Path], None]:
    return lambda folder: write_bare(folder / "rows", [*KEYS[:5], key], [*ROWS[:5], row])


BAD_FILES: list[tuple[Callable[[Path], object], str, str]] = [
    (with_row([1.0, float("nan"), 2.0]), "row 6: no row of this table", "key 8: [1.0, nan, 2.0]"),
    (with_row([1.0, float("inf"), 2.0]), "row 6: no row of this table", "inf"),
    (with_row([1.0, 2.0, 3.0], key=5), "a key twice", "6 rows of 5 keys"),
    (lambda folder: cut(folder / "rows-keys", 3), "ends within a key", "45 bytes"),
    (lambda folder: cut(folder / "rows-keys", 8), "a row of this table for each key", "14.4 a key"),
    (lambda folder: cut(folder / "rows-values", 4), "a row of this table for each key", "68 bytes"),
    (lambda folder: (folder / "rows-values").unlink(), "keys without their rows", "rows-values"),
    (lambda folder: (folder / "rows-keys").unlink(), "keys without their rows", "rows-keys"),
]


@pytest.mark.parametrize(("damage", "message", "received"), BAD_FILES)
def test_files_that_do_not_fit_are_refused(tmp_path, damage, message, received):
    write_bare(tmp_path / "rows", KEYS, ROWS)
    damage(tmp_path)
    assert received in str(refuse(tmp_path / "rows", InputDataError, message).received)


def test_rows_of_another_length_are_refused(tmp_path):
    write_bare(tmp_path / "rows", KEYS, ROWS)
    write_mxrec(tmp_path / "users", attributes=None)
    for path in (tmp_path / "rows", tmp_path / "users", GOLDEN / "user_rows", GOLDEN / "model"):
        error = refuse(path, InputDataError, "no rows of this table|a row of this table", dim=4)
        assert "16 bytes a key" in str(error.allowed) or "[n, 4]" in str(error.allowed)


def test_shards_that_are_missing_or_too_many_are_refused(tmp_path):
    write_tfra(tmp_path, 2, 2)
    lost = TFRA.format(shard=2, shards=2, rank=1, size=2)
    for end in ("-keys", "-values"):
        (tmp_path / f"{lost}{end}").unlink()
    error = refuse(tmp_path, InputDataError, "1 of 4 shards of .*rows are missing")
    assert "_mht_2of2_rank1_size2-keys" in str(error.received)
    write_tfra(tmp_path, 1)
    refuse(tmp_path / "rows", InputDataError, "saved twice, in other shards")
    # By the full beginning of one of its files.
    check(tmp_path / TFRA.format(shard=1, shards=1, rank=0, size=1))
    sound = TFRA.format(shard=1, shards=2, rank=0, size=2)
    refuse(tmp_path / f"{sound}-keys", InputDataError, "1 of 4 shards of .*rows are missing")
    write_tfra(tmp_path, 2, 2)
    check(tmp_path / sound)


def test_a_folder_with_the_mark_of_tables_in_its_name_is_a_path(tmp_path):
    folder = tmp_path / "run#3"
    folder.mkdir()
    write_checkpoint(folder / "ck", users=(np.array(KEYS), np.array(ROWS, np.float32)))
    for name in ("ck", "ck#users"):
        check(folder / name)
    write_tfra(folder / "rows")
    check(folder / "rows" / "rows")


@pytest.mark.parametrize(
    ("shard", "rank"), [(3, 0), (0, 0), (1, 1)], ids=["behind the last", "shard 0", "rank"]
)
def test_a_shard_that_its_own_name_does_not_count_is_refused(tmp_path, shard, rank):
    write_tfra(tmp_path, 2, 1)
    write_bare(tmp_path / TFRA.format(shard=shard, shards=2, rank=rank, size=1), [77], ROWS[:1])
    error = refuse(tmp_path, InputDataError, "none of those that its name counts")
    assert f"_mht_{shard}of2_rank{rank}_size1-keys" in str(error.received)
    assert error.allowed == "shards 1 to 2 of ranks 0 to 0"


def test_a_name_that_counts_more_shards_than_memory_has_room_for_is_refused(tmp_path):
    name = TFRA.format(shard=1, shards=10**9, rank=0, size=10**6)
    write_bare(tmp_path / name, KEYS, ROWS)
    error = refuse(tmp_path, InputDataError, "shards of .*rows are missing")
    assert f"_mht_2of{10**9}_rank0_size{10**6}-keys" in str(error.received)


def test_the_folder_that_one_is_in_is_a_path(tmp_path, monkeypatch):
    write_tfra(tmp_path / "rows")
    monkeypatch.chdir(tmp_path / "rows")
    check(".")
    monkeypatch.chdir(tmp_path)
    refuse(Path(), ConfigError, "no table that Sluice reads")


def test_folders_that_are_no_table_are_refused(tmp_path):
    write_tfra(tmp_path / "two")
    write_bare(tmp_path / "two" / "items_mht_1of1_rank0_size1", KEYS, ROWS)
    error = refuse(tmp_path / "two", ConfigError, "files of several tables")
    assert str(tmp_path / "two" / "items") in str(error.allowed)
    error = refuse(tmp_path / "two" / "item", ConfigError, "no files of this table")
    assert str(tmp_path / "two" / "items") in str(error.allowed)
    write_mxrec(tmp_path / "sparse-model" / "HashTable" / "HBM" / "users")
    error = refuse(tmp_path / "sparse-model", ConfigError, "no table that Sluice reads")
    assert str(error.allowed).endswith("HBM/users")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", ConfigError, "no table that Sluice reads")
    refuse(tmp_path / "nothing", ConfigError, "no such file of a table")
    refuse(Path("/"), ConfigError, "no table that Sluice reads")
    refuse(tmp_path / "nothing#users", ConfigError, "no such file of a table")


def drop(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("embedding/slice.data"), "keys and rows of one table"),
        (drop("key/slice.data"), "keys and rows of one table"),
        (write("key/slice_0.data", b""), "keys and rows of one table"),
        (lambda folder: cut(folder / "key" / "slice.data", 8), "key/slice.data is not as long"),
        (lambda folder: cut(folder / "embedding" / "slice.data", 4), "slice.data is not as long"),
        (write("key/slice.attribute", struct.pack("<2q", 3, 2)), "key/slice.data is not as long"),
        (write("embedding/slice.attribute", struct.pack("<3q", 18, 1, 4)), "not as many rows"),
        (write("embedding/slice.attribute", b"\x01\x02"), "does not describe a file"),
        (write("embedding/slice.attribute", b'{"data_type": "float16", "shape": [6, 3]}'),
         "does not describe a file"),
        (write("embedding/slice.attribute", b'{"data_type": "float32"}'),
         "does not describe a file"),
        (write("embedding/slice.attribute", b"{"), "does not describe a file"),
        (write("embedding/slice.attribute", b'{"data_type": ' + b"[" * 100_000),
         "does not describe a file"),
        (write("embedding/slice.attribute", b'{"data_type": "float32", "shape": [Infinity, 3]}'),
         "does not describe a file"),
    ],
)  # fmt: skip
def test_folders_of_mxrec_that_contradict_themselves_are_refused(tmp_path, damage, message):
    write_mxrec(tmp_path / "users")
    damage(tmp_path / "users")
    refuse(tmp_path / "users", InputDataError, message)


def test_text_and_other_types_of_a_checkpoint_are_refused(tmp_path):
    write_checkpoint(
        tmp_path / "model",
        texts=(np.array(["a", "b"]), np.ones((2, 3), np.float32)),
        doubles=(np.array([4, 5]), np.ones((2, 3))),
        fewer=(np.array([4, 5]), np.ones((3, 3), np.float32)),
    )
    for name in ("texts", "doubles", "fewer"):
        refuse(tmp_path / f"model#{name}", InputDataError, "no rows of this table")
    write_checkpoint(tmp_path / "twice", rows=(np.array([4, 4]), np.ones((2, 3), np.float32)))
    refuse(tmp_path / "twice", InputDataError, "a key twice")
