"""Steps of SASRec: beside a plain PyTorch loop, and where their time goes.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from rich.console import Console

from conf.manifest import DatasetKeys, Manifest, RowCounts, SourceSnapshot
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec
from conf.training.models import SASRecConfig
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
from tests.bench.sequences.products import measure_peak, sum_products
from tests.bench.train_step.peers import PeerTraining, open_peer
from tests.bench.train_step.sections import build_profile_table, profile_steps, time_in_turns
from tests.bench.train_step.trainings import ModelTraining
from training.models.sequence import SequenceModel
from training.objectives.item_catalog import ItemFeatures
from training.objectives.item_objectives import CatalogSoftmax, ItemData

SECTIONS = ("torch", "profile")
SPEEDUPS = {"real": 3.0, "full": 1.5}
"""Aims beside PyTorch, by the lengths of sequences."""
DISTINCT_BATCHES = 16


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


def build_sasrec(shape: SequenceShape, columns: dict[str, np.ndarray]) -> ModelTraining:
    """Returns Sluice's training of SASRec on drawn batches."""
    manifest = shape.describe(columns)
    config = SASRecConfig(embedding_dim=shape.dim, dropout=None)
    model = SequenceModel(config, manifest, seed=1)
    catalog = np.arange(FIRST_TOKEN_ID, shape.items + FIRST_TOKEN_ID)
    items = ItemData("item", ItemFeatures(Path(), manifest, ["item"]), None)
    objective = CatalogSoftmax(items, catalog, shape.items + FIRST_TOKEN_ID)
    batches = tf.data.Dataset.from_tensor_slices(columns).repeat().prefetch(2)
    return ModelTraining(model, objective, batches, "adam")


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
            {ours: build_sasrec(shape, columns), theirs: peer},
            batch_rows=shape.rows,
            steps={ours: arguments.steps, theirs: arguments.steps},
            repeats=arguments.repeats,
        )
    report.measurements += found
    report.verdicts += judge(found[0].shape, found, [Bar(ours, theirs, SPEEDUPS[shape.lengths])])
    console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def measure_profile(
    report: BenchReport, console: Console, shape: SequenceShape, arguments: argparse.Namespace
) -> None:
    """Where the time of a step goes, and the share of matrix products."""
    ops = profile_steps(build_sasrec(shape, shape.draw()), arguments.steps)
    share = sum_products(ops)
    report.settings[f"profile, {shape.lengths}"] = {o.kind: o.ms_per_step for o in ops}
    report.settings[f"share of products, {shape.lengths}"] = share
    title = f"a step on {shape.lengths} lengths, all threads; matrix products {share:.0%}"
    console.print(build_profile_table(title, ops))


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
    add("--dim", type=int, default=64, help="numbers of a vector")
    add("--steps", type=int, default=10, help="steps of a round")
    add("--repeats", type=int, default=5, help="rounds of each, in turns; the fastest counts")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(
        parser, arguments, ("batch", "length", "items", "dim", "steps", "repeats", "mean")
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
    if "profile" in arguments.sections:
        peak = measure_peak()
        report.settings["peak of a product, FLOP for each CPU-second"] = peak
        console.print(f"products of two square matrices: {peak / 1e9:.0f} GFLOP for a CPU-second")
        for shape in plan_shapes(arguments):
            measure_profile(report, console, shape, arguments)
    print_report(report, console)
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
