"""Matrix products of a step are counted as TensorFlow's own profiler counts those of the graph."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.bench.sequences.__main__ import main as measure_sequences
from tests.bench.train_step.flop import (
    count_blocks,
    count_bst,
    count_bst_encoder,
    count_catalog_softmax,
    count_comirec,
    count_dcn,
    count_din,
    count_gru,
    count_mlp,
    count_mmoe,
    count_shared_bottom,
    count_towers,
)
from tests.bench.train_step.products import ProductSpeed

ROWS, LENGTH, DIM = 6, 5, 4


def count_by_tensorflow(*products: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """FLOP of products of matrices of these shapes, once each."""
    from tensorflow.python.profiler.model_analyzer import profile
    from tensorflow.python.profiler.option_builder import ProfileOptionBuilder

    with tf.Graph().as_default() as graph:
        for left, right in products:
            tf.matmul(tf.zeros(left), tf.zeros(right))
    options = ProfileOptionBuilder(ProfileOptionBuilder.float_operation())
    found = profile(graph, options=options.with_empty_output().build())
    return int(found.total_float_ops)


def test_an_mlp() -> None:
    forward = count_by_tensorflow(((ROWS, 8), (8, 3)), ((ROWS, 3), (3, 1)))
    assert count_mlp(ROWS, (8, 3, 1)) == 3 * forward


def test_din_reads_the_target_once_a_row() -> None:
    positions = ROWS * LENGTH
    forward = count_by_tensorflow(
        ((positions, 2 * DIM), (2 * DIM, 7)),
        ((ROWS, DIM), (DIM, 7)),
        ((positions, 7), (7, 3)),
        ((positions, 3), (3, 1)),
        *[((1, LENGTH), (LENGTH, DIM))] * ROWS,
        ((ROWS, 20), (20, 9)),
        ((ROWS, 9), (9, 1)),
    )
    layers = {"attention": (7, 3), "hidden": (9,)}
    assert count_din(ROWS, ROWS * LENGTH, (DIM, 20), layers) == 3 * forward


def test_bst_reads_the_target_as_a_position() -> None:
    positions = ROWS * (LENGTH + 1)
    forward = count_by_tensorflow(
        *[((positions, DIM), (DIM, DIM))] * 4,
        ((positions, DIM), (DIM, 4 * DIM)),
        ((positions, 4 * DIM), (4 * DIM, DIM)),
        *[((LENGTH + 1, DIM), (DIM, LENGTH + 1))] * ROWS,
        *[((LENGTH + 1, LENGTH + 1), (LENGTH + 1, DIM))] * ROWS,
        ((ROWS, 12 + (LENGTH + 1) * DIM), (12 + (LENGTH + 1) * DIM, 9)),
        ((ROWS, 9), (9, 1)),
    )
    assert count_bst([LENGTH] * ROWS, LENGTH, (DIM, 12), (9,)) == 3 * forward


def project(positions: int, *widths: tuple[int, int]) -> list[tuple[tuple[int, int], ...]]:
    return [((positions, before), (before, after)) for before, after in widths]


@pytest.mark.parametrize(
    ("block", "widths"),
    [
        ("transformer", [(DIM, DIM)] * 6),
        ("ligr", [(DIM, DIM)] * 6 + [(DIM, 4 * DIM)] * 2 + [(4 * DIM, DIM)]),
        ("hstu", [(DIM, 4 * DIM), (DIM, DIM)]),
    ],
)
def test_blocks_over_sequences(block, widths) -> None:
    lengths = np.array([5, 2])
    positions = int(lengths.sum())
    of_block = project(positions, *widths) + attend(lengths)
    found = count_blocks(block, positions, float((lengths**2).sum()), DIM)
    assert found == 3 * 2 * count_by_tensorflow(*of_block)


def attend(lengths: np.ndarray) -> list[tuple[tuple[int, int], ...]]:
    scores = [((n, DIM), (DIM, n)) for n in lengths.tolist()]
    return scores + [((n, n), (n, DIM)) for n in lengths.tolist()]


def test_other_networks_over_sequences() -> None:
    lengths = np.array([5, 2])
    positions, pairs = int(lengths.sum()), float((lengths**2).sum())
    bst = [(DIM, DIM)] * 4 + [(DIM, 4 * DIM), (4 * DIM, DIM)]
    forward = count_by_tensorflow(*project(positions, *bst), *attend(lengths))
    assert count_bst_encoder(positions, pairs, DIM) == 3 * forward
    forward = count_by_tensorflow(*project(positions, (DIM, 3 * DIM), (DIM, 3 * DIM)))
    assert count_gru(positions, DIM) == 3 * forward
    mixed = [((3, n), (n, DIM)) for n in lengths.tolist()]
    forward = count_by_tensorflow(*project(positions, (DIM, 4 * DIM), (4 * DIM, 3)), *mixed)
    assert count_comirec(positions, DIM, 3) == 3 * forward


def test_a_softmax_scores_all_items_once_more_on_its_way_back() -> None:
    assert count_catalog_softmax(7, DIM, 11) == 4 * count_by_tensorflow(((7, DIM), (DIM, 11)))


def test_networks_over_rows() -> None:
    forward = count_by_tensorflow(
        *[((ROWS, 8), (8, 8))] * 3, ((ROWS, 8), (8, 5)), ((ROWS, 8 + 5), (8 + 5, 1))
    )
    assert count_dcn(ROWS, 8, 3, (5,)) == 3 * forward
    task = project(ROWS, (5, 3), (3, 1))
    forward = count_by_tensorflow(((ROWS, 8), (8, 5)), *task, *task)
    assert count_shared_bottom(ROWS, (8, 5), (3,), 2) == 3 * forward
    mixed = [((ROWS, 8), (8, 4)), *[((1, 4), (4, 5))] * ROWS, *task]
    forward = count_by_tensorflow(*[((ROWS, 8), (8, 5))] * 4, *mixed, *mixed)
    assert count_mmoe(ROWS, (8, 5), (3,), (4, 2)) == 3 * forward


def test_towers_meet_in_a_batch() -> None:
    tower = project(ROWS, (DIM, 9), (9, 3))
    forward = count_by_tensorflow(*tower, *tower, ((ROWS, 3), (3, ROWS)))
    assert count_towers(ROWS, (DIM, 9, 3)) == 3 * forward


def test_speeds_are_beside_the_peak() -> None:
    speed = ProductSpeed("din", flop=6e9, cpu_s=0.1, share=0.75, peak=100e9)
    assert speed.of_peak == pytest.approx(0.6)
    assert speed.of_peak_in_products == pytest.approx(0.8)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_bench_of_sequences_prints_its_figures(tmp_path, monkeypatch) -> None:
    file = tmp_path / "figures.json"
    options = "--sections variants profile --batch 16 --length 6 --mean 3 --items 60 --dim 8"
    options += " --negatives 20 --steps 1 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    measure_sequences()
    figures = json.loads(file.read_text())
    assert len(figures["measurements"]) == 2 * 3  # Shapes and losses.
    products = figures["settings"]["products of sasrec, full lengths"]
    of_blocks = count_blocks("transformer", 16 * 6, 16 * 36, 8)
    assert products["flop"] == of_blocks + count_catalog_softmax(16 * 6, 8, 60)
    assert 0 < products["share"] < 1
