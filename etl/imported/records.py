"""Records of imported files as rows of values: decoded, checked, with lists in Sluice's order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.imported.features import ImportedFeatures
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import RecordBlock
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.parts import join_steps, list_lengths


class RecordReader:
    """Decodes records; a value per step of a feature list becomes a list of values.

    Args:
        features: How features lie in the records.

    Attributes:
        schema: A column per feature: a value, or a list of values.
    """

    def __init__(self, features: ImportedFeatures) -> None:
        self._decoder = build_decoder(features.wire, features.record_type, features.slots)
        self._feature_lists = features.feature_lists
        self._aligned = features.config.aligned
        self._turned = [feature.name for feature in features.config.features if feature.turns]
        pads = features.id_lists
        self._pads = {name: pads[name] for name in self._turned if name in pads}
        self._ids_beside = {
            name: next(ids for ids in group if ids in self._pads)
            for group in (*((name,) for name in self._pads), *self._aligned)
            for name in group
            if self._pads.keys() & set(group)
        }
        plain = [WireFeature(f.name, f.kind, f.is_list) for f in features.wire]
        self.schema = pa.schema([(feature.name, feature.arrow_type) for feature in plain])

    def read(self, block: RecordBlock, path: str) -> pa.RecordBatch:
        """Decodes a block.

        Args:
            block: Records.
            path: Their file, for errors.

        Returns:
            A row per record.

        Raises:
            CorruptRecordError: A record is not of the record type.
            InputDataError: A feature holds another kind of values, a step other than one value,
                lists that are to be aligned are not equally long, or nothing says which of those
                to be turned end where the ids beside them are padded.
        """
        batch = self._decoder.decode_block(block, path)
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self._feature_lists:
            _check_steps(name, columns[name], block, path)
            columns[name] = _join(columns[name])
        for group in self._aligned:
            _check_aligned(columns, group, block, path)
        columns |= self._turn(columns, path)
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=self.schema)

    def _turn(self, columns: dict[str, pa.Array], path: str) -> dict[str, pa.Array]:
        """Turns lists round, each up to where its ids, or those beside it, are padded."""
        lengths = {name: list_lengths(columns[name]) for name in self._turned}
        ends = {ids: count_unpadded(columns[ids], pad) for ids, pad in self._pads.items()}
        padded = [ids for ids, kept in ends.items() if (kept < lengths[ids]).any()]
        for name in lengths.keys() - self._ids_beside.keys():
            beside = [ids for ids in padded if np.array_equal(lengths[ids], lengths[name])]
            if beside:
                raise InputDataError(
                    f"{path}: {beside[0]!r} is padded at its end, and {name!r} is as long",
                    received=f"order: oldest_first of {name}",
                    fix=f"name them by `aligned: [[{beside[0]}, {name}]]`, so that both are cut",
                )
        ends |= {name: ends[ids] for name, ids in self._ids_beside.items()}
        return {name: _turn(columns[name], ends.get(name, lengths[name])) for name in lengths}


def _check_steps(name: str, column: pa.ListArray, block: RecordBlock, path: str) -> None:
    """Refuses steps of several values: a row of Sluice holds a list of values at most."""
    values = list_lengths(column.flatten())
    wrong = values != 1
    if not wrong.any():
        return
    step = int(np.argmax(wrong))
    ends = np.cumsum(list_lengths(column))
    raise InputDataError(
        f"{path}: feature list {name!r} has a step of other than one value",
        received=f"{int(values[step])} values, in record "
        f"{block.first_record + int(np.searchsorted(ends, step, side='right'))}",
        allowed="one value per step",
        fix="write a feature list for each place of a step, or flat lists; or leave it out of "
        "`features`",
    )


def _join(column: pa.ListArray) -> pa.ListArray:
    """Steps of one value as a list of values; a feature list that is absent stays so."""
    joined = join_steps(column)
    if not column.null_count:
        return joined
    return pa.ListArray.from_arrays(joined.offsets, joined.values, mask=column.is_null())


def _check_aligned(
    columns: dict[str, pa.Array], group: tuple[str, ...], block: RecordBlock, path: str
) -> None:
    lengths = {name: list_lengths(columns[name]) for name in group}
    first = lengths[group[0]]
    wrong = np.any([each != first for each in lengths.values()], axis=0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputDataError(
            f"{path}: lists that are to be aligned are not equally long",
            received=f"{', '.join(f'{name} {int(each[row])}' for name, each in lengths.items())} "
            f"values, in record {block.first_record + row}; {int(wrong.sum()):,} such records in "
            "this part of the file",
            allowed=f"as many values in each of {', '.join(group)}",
            fix="correct the files, or `aligned`",
        )


def count_unpadded(column: pa.ListArray, pad: int) -> np.ndarray:
    """Number of values of each list without the padding at its end, int64 `[rows]`."""
    lengths = list_lengths(column)
    ends, values = np.cumsum(lengths), column.flatten().to_numpy()
    seen = np.maximum.accumulate(np.where(values == pad, -1, np.arange(len(values))))
    last = np.concatenate([[-1], seen])[ends]
    return np.maximum(last + 1 - (ends - lengths), 0)


def count_padded_in_front(column: pa.ListArray, pad: int) -> int:
    """Number of lists that begin with padding and hold other values behind it."""
    lengths, values = list_lengths(column), column.flatten().to_numpy()
    held = count_unpadded(column, pad) > 0
    return int((values[(np.cumsum(lengths) - lengths)[held]] == pad).sum())


def _turn(column: pa.ListArray, kept: np.ndarray) -> pa.ListArray:
    """Turns the first values of each list round; the others are padding, and left out."""
    lengths = list_lengths(column)
    ends = np.cumsum(kept)
    # Of value k, in a list that ends before e: the value at b + e - 1 - k, b where it begins now.
    places = np.repeat(np.cumsum(lengths) - lengths + ends - 1, kept) - np.arange(kept.sum())
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    mask = column.is_null() if column.null_count else None
    values = column.flatten().take(pa.array(places))
    return pa.ListArray.from_arrays(offsets, values, type=column.type, mask=mask)
