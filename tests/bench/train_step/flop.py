"""Floating-point operations of the matrix products of a step, counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

_PASSES = 3
"""The product itself, and one for the gradient of each factor."""


def count_mlp(rows: float, sizes: Sequence[int]) -> float:
    """Floating-point operations of an MLP in a step, those of its gradients too.

    Args:
        rows: Rows that go through it.
        sizes: Of the input and of each layer's output.
    """
    return _PASSES * 2.0 * rows * sum(a * b for a, b in itertools.pairwise(sizes))


def count_din(
    rows: int, tokens: float, dims: tuple[int, int], layers: Mapping[str, Sequence[int]]
) -> float:
    """The same of DIN, whose first layer over tokens reads the target once a row.

    Args:
        rows: Rows of the batch.
        tokens: Of all their histories.
        dims: Of an item, and of all inputs of the last MLP.
        layers: Hidden units of `attention` and of `hidden`.
    """
    dim, joined = dims
    first, *others = layers["attention"]
    scores = count_mlp(tokens, (2 * dim, first)) + count_mlp(rows, (dim, first))
    scores += count_mlp(tokens, (first, *others, 1))
    return scores + count_mlp(tokens, (dim, 1)) + count_mlp(rows, (joined, *layers["hidden"], 1))


def count_dcn(rows: int, joined: int, cross_layers: int, hidden: Sequence[int]) -> float:
    """The same of cross layers with whole matrices, beside an MLP.

    Args:
        rows: Rows of the batch.
        joined: Numbers of a row.
        cross_layers: Their number.
        hidden: Hidden units of the MLP.
    """
    cross = cross_layers * count_mlp(rows, (joined, joined))
    return cross + count_mlp(rows, (joined, *hidden)) + count_mlp(rows, (joined + hidden[-1], 1))


def count_shared_bottom(
    rows: int, sizes: Sequence[int], task_units: Sequence[int], tasks: int
) -> float:
    """The same of an MLP that tasks share.

    Args:
        rows: Rows of the batch.
        sizes: Numbers of a row, and the shared hidden units.
        task_units: Hidden units of each task.
        tasks: Their number.
    """
    return count_mlp(rows, sizes) + tasks * count_mlp(rows, (sizes[-1], *task_units, 1))


def count_mmoe(
    rows: int, sizes: Sequence[int], task_units: Sequence[int], counts: tuple[int, int]
) -> float:
    """The same of experts that tasks mix.

    Args:
        rows: Rows of the batch.
        sizes: Numbers of a row, and the hidden units of an expert.
        task_units: Hidden units of each task.
        counts: Of experts, and of tasks.
    """
    experts, tasks = counts
    gates = count_mlp(rows, (sizes[0], experts)) + count_mlp(rows, (experts, sizes[-1]))
    of_task = gates + count_mlp(rows, (sizes[-1], *task_units, 1))
    return experts * count_mlp(rows, sizes) + tasks * of_task


def count_bst(
    lengths: Sequence[float], longest: int, dims: tuple[int, int], hidden: Sequence[int]
) -> float:
    """The same of BST with one block, whose last MLP reads the outputs of all positions.

    Args:
        lengths: Items of each row's history; the target stands behind it.
        longest: Positions of the longest one.
        dims: Of a position, and of all other inputs of the last MLP.
        hidden: Hidden units of the last MLP.
    """
    dim, others = dims
    positions, pairs = sum(n + 1 for n in lengths), sum((n + 1) ** 2 for n in lengths)
    joined = others + (longest + 1) * dim
    last = count_mlp(len(lengths), (joined, *hidden, 1))
    return count_bst_encoder(positions, pairs, dim) + last


BLOCK_PRODUCTS = {"transformer": 6, "ligr": 18, "hstu": 5}
"""Products of a position's vector with square matrices, by kind of block.

Attention has four; its feed-forward layer two, that of LiGR three of four times the width, beside
two gates; HSTU has four at once and one behind them.
"""


def count_blocks(block: str, positions: float, pairs: float, dim: int) -> float:
    """The same of two blocks over sequences.

    Args:
        block: One of `BLOCK_PRODUCTS`.
        positions: Items of all sequences of a batch, padding left out.
        pairs: Sum of the squared lengths of the sequences.
        dim: Of a vector; feed-forward layers have their default width.
    """
    projections = BLOCK_PRODUCTS[block] * count_mlp(positions, (dim, dim))
    return 2 * (projections + _count_attention(pairs, dim))


def count_bst_encoder(positions: float, pairs: float, dim: int) -> float:
    """The same of one block of BST over sequences alone; arguments as of `count_blocks`."""
    projections = count_mlp(positions, (dim,) * 5) + count_mlp(positions, (dim, 4 * dim, dim))
    return projections + _count_attention(pairs, dim)


def count_gru(positions: float, dim: int) -> float:
    """The same of recurrent units: three gates read the item, and what came before."""
    return 2 * count_mlp(positions, (dim, 3 * dim))


def count_comirec(positions: float, dim: int, interests: int) -> float:
    """The same of attention with four times as many hidden units, and the sums it weighs."""
    scores = count_mlp(positions, (dim, 4 * dim, interests))
    return scores + count_mlp(positions, (dim, interests))


def count_catalog_softmax(targets: float, dim: int, items: int) -> float:
    """The same of a softmax over all items, which the backward pass scores once more."""
    return (_PASSES + 1) * 2.0 * targets * dim * items


def count_towers(rows: int, sizes: Sequence[int]) -> float:
    """The same of two towers of one form, and a softmax over the items of the batch.

    Args:
        rows: Rows of the batch.
        sizes: Of a tower's input and of each layer's output.
    """
    return 2 * count_mlp(rows, sizes) + count_mlp(rows, (sizes[-1], rows))


def _count_attention(pairs: float, dim: int) -> float:
    """Scores of pairs of positions, and the sums that they weigh; heads change nothing."""
    return 2 * _PASSES * 2.0 * pairs * dim
