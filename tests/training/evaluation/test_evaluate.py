from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from tests.training.evaluation.measured import build_measured, read_rows, rewrite_records
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation import protocols
from training.evaluation.evaluate import FullRanking, evaluate_full, evaluate_split
from training.evaluation.item_index import MISSING, ItemIndex, Pairs, build_pairs
from training.evaluation.metrics import RankMeasures
from training.evaluation.protocols import RankingReader, UniformNegatives
from training.reader.training_data import TrainingData

KS = (1, 5, 10)


def _trained(version: Path, manifest: Manifest, **evaluation: Any) -> TrainedModel:
    return build_measured(version, manifest=manifest, evaluation={"ks": KS, **evaluation})


def _brute_ranks(version: Path, manifest: Manifest, split: str, mask_seen: bool) -> list[float]:
    model = TinyTowers(manifest)
    tables = {name: table.rows.numpy().astype(np.float64) for name, table in model.tables.items()}

    def pool(name: str, value: Any) -> np.ndarray:
        ids = [i for i in np.atleast_1d(value) if i != 0]
        rows = tables[model.table_of[name]][ids]
        return rows.mean(0) if len(ids) else np.zeros(6)

    catalog = {
        int(row["movie_id"]): sum(pool(n, row[n]) for n in model.item_inputs)
        for row in read_rows(version, manifest, "catalog", model.item_inputs)
    }
    ranks = []
    for row in read_rows(version, manifest, split):
        user = sum(pool(name, row[name]) for name in model.user_inputs)
        target = int(row["movie_id"])
        if target not in catalog:
            ranks.append(np.inf)
            continue
        out = {target, *(row["seen"].tolist() if mask_seen else ())}
        scores = {item: float(user @ vector) for item, vector in catalog.items()}
        rivals = [score for item, score in scores.items() if item not in out]
        ranks.append(1.0 + sum(score >= scores[target] for score in rivals))
    return ranks


@pytest.mark.parametrize("mask_seen", [True, False])
@pytest.mark.parametrize(("batches", "rows"), [(None, 60), (1, 20), (2, 40), (9, 60)])
def test_full_ranking_equals_brute_force_however_large_the_catalogue_is(
    mask_seen: bool, batches: int | None, rows: int, tiny_version: Path, tiny_manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ranks = np.array(_brute_ranks(tiny_version, tiny_manifest, "test", mask_seen))[:rows]
    model, data = TinyTowers(tiny_manifest), TrainingData(tiny_version, tiny_manifest)
    for cells in (protocols.BLOCK_CELLS, 7 * (_items(tiny_manifest) - 2)):
        monkeypatch.setattr(protocols, "BLOCK_CELLS", cells)
        ranking = FullRanking(RankMeasures(KS), mask_seen, 20, batches=batches)
        found = evaluate_full(model, data, "test", ranking)
        assert found["mrr"] == pytest.approx(np.mean(1 / ranks), abs=1e-12)
        for k in KS:
            assert found[f"hit_rate@{k}"] == found[f"recall@{k}"] == np.mean(ranks <= k)
            gains = np.where(ranks <= k, 1 / np.log2(1 + ranks), 0.0)
            assert found[f"ndcg@{k}"] == pytest.approx(gains.mean(), abs=1e-12)


def test_the_report_has_every_protocol_and_system(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    trained = _trained(tiny_version, tiny_manifest, sampled_negatives=15)
    report = evaluate_split(trained, "test")
    json.dumps(report, allow_nan=False)
    by_name = {protocol["name"]: protocol for protocol in report["protocols"]}
    assert list(by_name) == ["full_unseen", "full_all", "sampled_15"]
    assert report["headline"] == "full_unseen"
    assert report["rows"] == report["users"] == 60
    assert by_name["sampled_15"]["candidates"] == 16
    assert by_name["full_all"]["candidates"] == _items(tiny_manifest) - 2
    assert all(set(p["systems"]) == {"model", "popularity", "random"} for p in by_name.values())
    model = {name: by_name[name]["systems"]["model"]["mrr"] for name in by_name}
    for name, mask_seen in (("full_unseen", True), ("full_all", False)):
        ranks = np.array(_brute_ranks(tiny_version, tiny_manifest, "test", mask_seen))
        assert model[name] == pytest.approx(np.mean(1 / ranks), abs=1e-12)
    # Fewer candidates can only make a rank better.
    assert model["full_unseen"] <= model["sampled_15"]


def _items(manifest: Manifest) -> int:
    size = manifest.schema["movie_id"].vocabulary_size
    assert size is not None
    return size


def test_the_report_does_not_depend_on_the_batch_size(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    small, large = (
        evaluate_split(
            _trained(tiny_version, tiny_manifest, batch_size=size, sampled_negatives=6), "test"
        )
        for size in (7, 500)
    )
    for one, other in zip(small["protocols"], large["protocols"], strict=True):
        for system in one["systems"]:
            assert one["systems"][system] == pytest.approx(other["systems"][system], abs=1e-12)
    assert small["beyond_accuracy"] == pytest.approx(large["beyond_accuracy"])


def test_popularity_and_lists_are_those_of_the_training_counts(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    report = evaluate_split(_trained(tiny_version, tiny_manifest), "test")
    rows = read_rows(tiny_version, tiny_manifest, "test")
    ids = np.array([int(row["movie_id"]) for row in rows])
    train = [int(row["movie_id"]) for row in read_rows(tiny_version, tiny_manifest, "train")]
    counts = np.bincount(train, minlength=_items(tiny_manifest))[2:]
    own = counts[np.maximum(ids - 2, 0)]
    ranks = np.where(ids >= 2, (counts >= own[:, None]).sum(axis=1), np.inf)
    systems = report["protocols"][1]["systems"]
    assert systems["popularity"]["mrr"] == pytest.approx(np.mean(1 / ranks))
    assert report["oov_targets"] == np.sum(ids < 2)
    assert 0.25 < report["beyond_accuracy"]["coverage@10"] <= 1.0


def test_given_candidates_replace_the_drawn_ones(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(candidates=9))
    manifest = read_manifest(version)
    report = evaluate_split(_trained(version, manifest), "test")
    assert [p["name"] for p in report["protocols"]] == ["full_unseen", "full_all", "sampled_given"]
    assert report["protocols"][2]["candidates"] == 10
    # A split that brings none is no ranking of each target alone.
    statistics = {**manifest.statistics, "test": {"candidates": {"values": 0}}}
    without = replace(manifest, statistics=statistics)
    report = evaluate_split(_trained(version, without), "test")
    assert [p["name"] for p in report["protocols"]] == ["full_unseen", "full_all", "sampled_99"]


@pytest.mark.parametrize("keep", [1, 0])
def test_rows_without_a_label_are_ranked_but_not_scored(
    keep: int, tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    version, rows = Path(shutil.copytree(tiny_version, tmp_path / "v")), itertools.count()

    def drop(features: Any) -> None:
        if next(rows) % 2 >= keep:
            del features["label"]

    manifest = rewrite_records(version, "test", drop)
    report = evaluate_split(_trained(version, manifest), "test")
    whole = evaluate_split(_trained(tiny_version, tiny_manifest), "test")
    assert report["protocols"] == whole["protocols"]
    assert (report["labels"] and report["labels"]["rows"]) == (30 if keep else None)


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


def test_every_unseen_item_is_drawn_equally_often() -> None:
    rows = 4000
    targets = np.zeros(rows, np.int64)
    seen = _pairs([{1, 2, 3}] * rows, targets)
    drawn = UniformNegatives(20, 4, 5).draw(seen, targets)
    counts = np.bincount(drawn.columns, minlength=20)
    assert counts[:4].sum() == 0
    expected = rows * 4 / 16
    assert np.abs(counts[4:] - expected).max() < 5 * np.sqrt(expected)


def test_targets_and_seen_items_outside_the_catalogue_are_missing(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    index = ItemIndex(np.arange(2, 5), np.zeros((3, 1), np.float32))
    reader = RankingReader(tiny_version, tiny_manifest, index, ("user_id",), 1024)
    [batch] = reader.read("test", seen=True)
    ids = batch.features["movie_id"].numpy()
    assert ((batch.targets == MISSING) == ((ids < 2) | (ids > 4))).all()
    missing = batch.targets == MISSING
    assert np.sum(missing) > 0
    assert batch.seen is not None
    assert set(batch.seen.columns.tolist()) <= {0, 1, 2}
    assert not (batch.seen.columns == batch.targets[batch.seen.rows]).any()
