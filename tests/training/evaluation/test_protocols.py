from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.manifest import Manifest
from training.evaluation import protocols
from training.evaluation.item_index import MISSING, ItemIndex, Pairs, build_pairs
from training.evaluation.protocols import (
    RankingReader,
    UniformNegatives,
    headline_protocol,
)

SEEN = st.lists(st.sets(st.integers(0, 19), max_size=20), min_size=1, max_size=6)


def _pairs(seen: list[set[int]], targets: np.ndarray) -> Pairs:
    rows = np.repeat(np.arange(len(seen)), [len(s) for s in seen])
    columns = np.array([c for s in seen for c in sorted(s)], np.int64)
    return build_pairs(rows, columns, targets, 20)


def _by_row(pairs: Pairs, rows: int) -> list[list[int]]:
    return [pairs.columns[pairs.rows == row].tolist() for row in range(rows)]


@settings(max_examples=60)
@given(SEEN, st.integers(1, 12), st.integers(0, 5), st.integers(-1, 19))
def test_candidates_are_unseen_distinct_and_as_many_as_there_are(
    seen: list[set[int]], count: int, seed: int, target: int
) -> None:
    targets = np.full(len(seen), target)
    drawn = UniformNegatives(20, count, seed).draw(_pairs(seen, targets), targets)
    for row, columns in enumerate(_by_row(drawn, len(seen))):
        allowed = set(range(20)) - (seen[row] | {target})
        assert len(set(columns)) == len(columns) == min(count, len(allowed))
        assert set(columns) <= allowed


def test_draws_do_not_depend_on_the_batch_size() -> None:
    rng = np.random.default_rng(0)
    seen = [set(rng.choice(20, 12, replace=False).tolist()) for _ in range(30)]
    targets = np.zeros(30, np.int64)
    whole = _by_row(UniformNegatives(20, 6, 1).draw(_pairs(seen, targets), targets), 30)
    sampler, parts = UniformNegatives(20, 6, 1), []
    for start in range(0, 30, 7):
        part, rows = seen[start : start + 7], targets[start : start + 7]
        parts += _by_row(sampler.draw(_pairs(part, rows), rows), len(part))
    assert whole == parts


def test_every_unseen_item_is_drawn_equally_often() -> None:
    rows = 4000
    targets = np.zeros(rows, np.int64)
    seen = _pairs([{1, 2, 3}] * rows, targets)
    drawn = UniformNegatives(20, 4, 5).draw(seen, targets)
    counts = np.bincount(drawn.columns, minlength=20)
    assert counts[:4].sum() == 0
    expected = rows * 4 / 16
    assert np.abs(counts[4:] - expected).max() < 5 * np.sqrt(expected)


def _reader(version: Path, manifest: Manifest, items: int = 40) -> RankingReader:
    index = ItemIndex(np.arange(2, 2 + items), np.zeros((items, 1), np.float32))
    return RankingReader(version, manifest, index, ("user_id",), 1024)


def test_batches_shrink_with_the_catalogue(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = _reader(tiny_version, tiny_manifest).read("test", seen=True)
    monkeypatch.setattr(protocols, "BLOCK_CELLS", 40 * 25)
    parts = list(_reader(tiny_version, tiny_manifest).read("test", seen=True))
    assert [part.rows for part in parts] == [25, 25, 10]
    assert np.concatenate([part.targets for part in parts]).tolist() == whole.targets.tolist()


def test_targets_and_seen_items_outside_the_catalogue_are_missing(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    [batch] = _reader(tiny_version, tiny_manifest, items=3).read("test", seen=True)
    ids = batch.features["movie_id"].numpy()
    assert ((batch.targets == MISSING) == ((ids < 2) | (ids > 4))).all()
    missing = batch.targets == MISSING
    assert np.sum(missing) > 0
    assert batch.seen is not None
    assert set(batch.seen.columns.tolist()) <= {0, 1, 2}
    assert not (batch.seen.columns == batch.targets[batch.seen.rows]).any()


def test_the_headline_follows_the_config_as_far_as_the_data_goes(
    tiny_manifest: Manifest,
) -> None:
    blind = replace(tiny_manifest, keys=replace(tiny_manifest.keys, seen=None))
    assert headline_protocol(tiny_manifest, True, "test") == "full_unseen"
    assert headline_protocol(tiny_manifest, False, "test") == "full_all"
    assert headline_protocol(blind, True, "test") == "full_all"
    assert headline_protocol(tiny_manifest, True, "train") == "full_all"
