"""Steps over sequences: SASRec beside a plain PyTorch loop, and where the time of others goes.

`--torch` names a Python that has PyTorch, for example of `python -m venv` and
`pip install torch numpy`; without it that part is left out. Both train the same network on the same
batches from memory, by Adam and a softmax over all items, and take turns. PyTorch's loop cuts each
batch to its longest sequence, as a careful author does. Tables of ours are updated lazily, its own
densely: the defaults of each.

Of a real log most sequences are short: their lengths are drawn by a geometric law, cut at the
longest. `full` has lists without padding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from rich.console import Console

from conf.manifest import DatasetKeys, Manifest, RowCounts, SourceSnapshot
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec
from conf.training.models import (
    BSTConfig,
    ComiRecConfig,
    DSSMConfig,
    GRUConfig,
    HSTUConfig,
    MFConfig,
    NegativesConfig,
    SampledSoftmaxConfig,
    SASRecConfig,
    SequenceConfig,
)
from tests.bench.measurements import (
    Bar,
    BenchReport,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    judge,
    print_report,
    run_bench,
)
from tests.bench.train_step.flop import (
    count_blocks,
    count_bst_encoder,
    count_catalog_softmax,
    count_comirec,
    count_gru,
    count_mlp,
    count_towers,
)
from tests.bench.train_step.peers import PeerTraining, open_peer
from tests.bench.train_step.products import report_products
from tests.bench.train_step.sections import time_in_turns
from tests.bench.train_step.trainings import ModelTraining
from training.loop.step import StepOptions
from training.models.retrieval import RetrievalModel
from training.models.sequence import SequenceModel
from training.models.two_towers import DSSM, MatrixFactorization
from training.objectives.item_catalog import ItemFeatures
from training.objectives.item_objectives import CatalogSoftmax, ItemData, SampledSoftmax
from training.objectives.objective import Objective
from training.objectives.samplers import build_sampler

SECTIONS = ("torch", "variants", "profile")
SPEEDUPS = {"real": 3.0, "full": 1.5}
"""Aims beside PyTorch, by the lengths of sequences."""
DISTINCT_BATCHES = 16
_FLOAT32 = StepOptions(seed=1)


@dataclass(frozen=True)
class SequenceShape:
    """Batches of sequences, and the network over them.

    Attributes:
        lengths: `real`, by a geometric law, or `full`.
        rows: Rows of a batch.
        length: Longest sequence.
        mean: Mean of the law before it is cut.
        items: Items of the catalogue.
        dim: Length of a vector.
    """

    lengths: str
    rows: int
    length: int
    mean: float
    items: int
    dim: int

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Draws batches `[DISTINCT_BATCHES, rows, …]`: `history`, latest first, and `item`."""
        rng = np.random.default_rng(seed)
        shape = (DISTINCT_BATCHES, self.rows)
        share = np.cumsum(1.0 / np.arange(1, self.items + 1))
        drawn = rng.random((*shape, self.length + 1)) * share[-1]
        ids = FIRST_TOKEN_ID + np.minimum(np.searchsorted(share, drawn), self.items - 1)
        lengths = np.full(shape, self.length)
        if self.lengths == "real":
            lengths = np.minimum(rng.geometric(1.0 / self.mean, shape), self.length)
        history = np.where(np.arange(self.length) < lengths[..., None], ids[..., 1:], 0)
        return {"history": history.astype(np.int64), "item": ids[..., 0].astype(np.int64)}

    def describe(self, columns: dict[str, np.ndarray]) -> Manifest:
        """Returns a manifest of a dataset of such rows, with the statistics of the lengths."""
        size = self.items + FIRST_TOKEN_ID
        specs = (
            FeatureSpec("history", "int64", "user", (None,), self.length, "vocabulary",
                        vocabulary_size=size, shared_embedding="item"),
            FeatureSpec("item", "int64", "item", encoding="vocabulary", vocabulary_size=size),
        )  # fmt: skip
        mean = float((columns["history"] > 0).sum(axis=-1).mean())
        statistics = {"train": {"history": {"length": {"max": self.length, "mean": mean}}}}
        keys = DatasetKeys(None, "item", history="history")
        return Manifest(
            "bench", "1", "", "Example", None, (), FeatureSchema(specs), keys, (), "",
            statistics, {}, SourceSnapshot((), None, {}, ""), RowCounts({}, {}, 0, {}, {}), "",
        )  # fmt: skip


INTERESTS = 4
NETWORKS: dict[str, Callable[[int], SequenceConfig]] = {
    "sasrec": lambda dim: SASRecConfig(embedding_dim=dim, dropout=None),
    "ligr": lambda dim: SASRecConfig(embedding_dim=dim, dropout=None, block="ligr"),
    "hstu": lambda dim: HSTUConfig(embedding_dim=dim, dropout=None),
    "gru": lambda dim: GRUConfig(embedding_dim=dim, dropout=None),
    "bst": lambda dim: BSTConfig(embedding_dim=dim, dropout=None),
    "comirec": lambda dim: ComiRecConfig(embedding_dim=dim, interests=INTERESTS),
}
"""Networks over the sequence: their config by the length of a vector."""
TOWER_UNITS, TOWER_ROWS = (256, 128), 2048


def build_sequence(
    shape: SequenceShape,
    columns: dict[str, np.ndarray],
    negatives: int | None = None,
    options: StepOptions = _FLOAT32,
    *,
    network: str = "sasrec",
) -> ModelTraining:
    """Returns Sluice's training of a network over the sequence on drawn batches.

    Args:
        shape: Of the batches.
        columns: The batches.
        negatives: Uniform ones that a batch's positions share; None: softmax over all items.
        options: How a step is computed.
        network: One of `NETWORKS`.
    """
    manifest = shape.describe(columns)
    model = SequenceModel(NETWORKS[network](shape.dim), manifest, seed=1)
    size = shape.items + FIRST_TOKEN_ID
    catalog = np.arange(FIRST_TOKEN_ID, size)
    items = ItemData("item", ItemFeatures(Path(), manifest, ["item"]), None)
    objective: Objective = CatalogSoftmax(items, catalog, size)
    if negatives is not None:
        drawn = NegativesConfig(source="uniform", count=negatives)
        sampled = SampledSoftmaxConfig(negatives=drawn, logq_correction=0.0)
        sampler = build_sampler(drawn, catalog, None, size)
        objective = SampledSoftmax(sampled, items, sampler, None)
    return _train(model, objective, columns, options)


def build_dssm(shape: SequenceShape) -> ModelTraining:
    """Returns Sluice's training of two towers on drawn batches, by the items of the batch."""
    columns = shape.draw()
    config = DSSMConfig(
        embedding_dim=shape.dim, user_hidden_units=TOWER_UNITS, item_hidden_units=TOWER_UNITS
    )
    model = DSSM(config, shape.describe(columns), seed=1)
    return _train(model, _choose_in_batch(), columns, _FLOAT32)


def build_mf(shape: SequenceShape) -> ModelTraining:
    """Returns Sluice's training of matrix factorization, likewise; users are as many as items."""
    drawn = shape.draw()
    columns = {"user": drawn["history"][..., 0], "item": drawn["item"]}
    manifest, size = shape.describe(drawn), shape.items + FIRST_TOKEN_ID
    user = FeatureSpec("user", "int64", "user", encoding="vocabulary", vocabulary_size=size)
    schema = FeatureSchema((user, manifest.schema.features[1]))
    manifest = replace(manifest, schema=schema, keys=DatasetKeys("user", "item"), statistics={})
    model = MatrixFactorization(MFConfig(embedding_dim=shape.dim), manifest, seed=1)
    return _train(model, _choose_in_batch(), columns, _FLOAT32)


def _choose_in_batch() -> SampledSoftmax:
    sampled = SampledSoftmaxConfig(negatives=NegativesConfig(source="batch"), logq_correction=0.0)
    return SampledSoftmax(sampled, ItemData("item", None, None), None, None)


def _train(
    model: RetrievalModel,
    objective: Objective,
    columns: dict[str, np.ndarray],
    options: StepOptions,
) -> ModelTraining:
    batches = tf.data.Dataset.from_tensor_slices(columns).repeat().prefetch(2)
    return ModelTraining(model, objective, batches, "adam", options)


def open_torch(
    python: Path, shape: SequenceShape, columns: dict[str, np.ndarray]
) -> AbstractContextManager[PeerTraining]:
    """Starts PyTorch on the same batches."""
    asked = {
        "items": shape.items + FIRST_TOKEN_ID, "dim": shape.dim,
        "length": shape.length, "first_item": FIRST_TOKEN_ID,
    }  # fmt: skip
    script = Path(__file__).with_name("torch_peer.py")
    return open_peer("PyTorch", (python, script), columns, asked)


def plan_shapes(arguments: argparse.Namespace) -> list[SequenceShape]:
    """Returns the shapes that the command line asks for."""
    a = arguments
    return [
        SequenceShape(lengths, a.batch, a.length, a.mean, a.items, a.dim) for lengths in a.lengths
    ]


def measure_beside_torch(
    report: BenchReport, console: Console, shape: SequenceShape, arguments: argparse.Namespace
) -> None:
    """Steps of both on the same batches, in turns."""
    columns = shape.draw()
    ours, theirs = "Sluice", "PyTorch, batches cut to the longest"
    filled = (columns["history"] > 0).mean()
    title = f"{shape.lengths} lengths: {shape.rows} x {shape.length}, {filled:.1%} filled, "
    with open_torch(arguments.torch, shape, columns) as peer:
        found = time_in_turns(
            "torch",
            f"{title}{shape.items:,} items x {shape.dim}",
            {ours: build_sequence(shape, columns), theirs: peer},
            batch_rows=shape.rows,
            steps={ours: arguments.steps, theirs: arguments.steps},
            repeats=arguments.repeats,
        )
    report.measurements += found
    report.verdicts += judge(found[0].shape, found, [Bar(ours, theirs, SPEEDUPS[shape.lengths])])
    console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def measure_variants(
    report: BenchReport, console: Console, shape: SequenceShape, arguments: argparse.Namespace
) -> None:
    """Steps with fewer negatives, and in half precision, in turns."""
    columns, plain = shape.draw(), "softmax over all items"
    shared = f"{arguments.negatives:,} shared negatives"
    trainings = {
        plain: build_sequence(shape, columns),
        shared: build_sequence(shape, columns, arguments.negatives),
        "bfloat16": build_sequence(shape, columns, options=StepOptions(1, tf.bfloat16)),
    }
    found = time_in_turns(
        "variants",
        f"{shape.lengths} lengths: {shape.rows} x {shape.length}, {shape.items:,} items",
        trainings,
        batch_rows=shape.rows,
        steps=dict.fromkeys(trainings, arguments.steps),
        repeats=arguments.repeats,
    )
    report.measurements += found
    bars = [Bar(name, plain, None) for name in trainings if name != plain]
    report.verdicts += judge(found[0].shape, found, bars)
    console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def count_flop(shape: SequenceShape, columns: dict[str, np.ndarray], network: str) -> float:
    """FLOP of the matrix products of a mean step, padding left out."""
    lengths = (columns["history"] > 0).sum(axis=-1)
    positions, pairs = lengths.sum(axis=1).mean(), (lengths**2).sum(axis=1).mean()
    positions, pairs, dim = float(positions), float(pairs), shape.dim
    counts = {
        "sasrec": (count_blocks("transformer", positions, pairs, dim), positions),
        "ligr": (count_blocks("ligr", positions, pairs, dim), positions),
        "hstu": (count_blocks("hstu", positions, pairs, dim), positions),
        "gru": (count_gru(positions, dim), positions),
        "bst": (count_bst_encoder(positions, pairs, dim), shape.rows),
        "comirec": (count_comirec(positions, dim, INTERESTS), shape.rows),
    }
    of_network, targets = counts[network]
    return of_network + count_catalog_softmax(targets, dim, shape.items)


def measure_profiles(
    report: BenchReport, console: Console, shapes: list[SequenceShape], steps: int
) -> None:
    """Where the time of a step goes, and how fast its matrix products are."""
    trainings = {}
    for shape in shapes:
        columns, suffix = shape.draw(), f", {shape.lengths} lengths"
        for network in NETWORKS:
            flop = count_flop(shape, columns, network)
            training = build_sequence(shape, columns, network=network)
            trainings[f"{network}{suffix}"] = training, flop
        wide = replace(shape, rows=TOWER_ROWS)
        flop = count_towers(wide.rows, (wide.dim, *TOWER_UNITS, wide.dim))
        trainings[f"dssm{suffix}"] = build_dssm(wide), flop
    flop = count_mlp(TOWER_ROWS, (wide.dim + 1, wide.rows))  # An item's bias is one number more.
    trainings["mf"] = build_mf(wide), flop
    report_products(report, console, trainings, steps)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("sequences", __doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--torch", type=Path, help="a Python that has PyTorch")
    add("--lengths", nargs="+", choices=tuple(SPEEDUPS), default=list(SPEEDUPS))
    add("--batch", type=int, default=128, help="rows of a batch")
    add("--length", type=int, default=50, help="longest sequence")
    add("--mean", type=float, default=9.0, help="mean length of real sequences, before the cut")
    add("--items", type=int, default=10_000, help="items of the catalogue")
    add("--negatives", type=int, default=3000, help="variants: negatives that are shared")
    add("--dim", type=int, default=64, help="numbers of a vector")
    add("--steps", type=int, default=10, help="steps of a round")
    add("--repeats", type=int, default=5, help="rounds of each, in turns; the fastest counts")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(
        parser,
        arguments,
        ("batch", "length", "items", "dim", "negatives", "steps", "repeats", "mean"),
    )
    if arguments.torch is not None and not arguments.torch.is_file():
        parser.error(f"--torch: no file {arguments.torch}")


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    if "torch" in arguments.sections:
        if arguments.torch is None:
            report.skip("torch: --torch PYTHON names none")
        else:
            for shape in plan_shapes(arguments):
                measure_beside_torch(report, console, shape, arguments)
    if "variants" in arguments.sections:
        for shape in plan_shapes(arguments):
            measure_variants(report, console, shape, arguments)
    if "profile" in arguments.sections:
        measure_profiles(report, console, plan_shapes(arguments), arguments.steps)
    print_report(report, console)
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
