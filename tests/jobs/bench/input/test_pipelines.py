from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.bench.input.pipelines import (
    RAW,
    InputFiles,
    build_packed_pipelines,
    build_pipelines,
    drain,
    pack_shape,
)
from jobs.bench.input.shards import write_shards
from jobs.bench.tfrecord.shapes import SHAPES


@pytest.mark.parametrize("name", ["ctr", "history2"])
def test_all_pipelines_deliver_the_same_rows(name: str, tmp_path: Path) -> None:
    found = write_shards(name, 96, 2, tmp_path)
    assert found == write_shards(name, 96, 2, tmp_path)  # they are there
    files = InputFiles(SHAPES[name], tmp_path, found)
    assert files.rows == 96
    column = SHAPES[name].columns[-1].name
    slots = pack_shape(SHAPES[name])
    packed = InputFiles(SHAPES[name], tmp_path, write_shards(name, 96, 2, tmp_path, slots), slots)
    built = build_pipelines(files, 32, 64, (1, 2))
    seen = {}
    for key, build in {**built, **build_packed_pipelines(packed, 32, 64, (1,))}.items():
        assert drain(build(), 3) == 96
        if key != RAW:
            rows = np.concatenate([batch[column].numpy() for batch in build()])
            seen[key] = sorted(map(repr, rows.tolist()))
    first, *others = seen.values()
    assert len(others) >= 8
    assert all(rows == first for rows in others)
