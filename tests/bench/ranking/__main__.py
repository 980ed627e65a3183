"""Steps of ranking networks: beside DeepCTR, on many rows, and where their time goes.

DeepCTR needs an older TensorFlow: `--deepctr` names a Python that has it, for example of
`uv pip install "tensorflow==2.12.*" "numpy<1.24" requests` and `--no-deps deepctr==0.9.3`.
Both read the same batches from memory and take turns. Ours trains tables by lazy Adam, DeepCTR by
Keras' Adam, without L2: the defaults of each, but for DeepCTR's L2 over whole tables. Of a real log
most histories are short: their lengths are drawn by a geometric law, cut at the longest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from rich.console import Console

from conf.manifest import DatasetKeys, Manifest, RowCounts, SourceSnapshot
from conf.schema import FIRST_TOKEN_ID, PAD_ID, FeatureSchema, FeatureSpec, Role
from conf.training.models import RankingConfig
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
    count_bst,
    count_dcn,
    count_din,
    count_mlp,
    count_mmoe,
    count_shared_bottom,
)
from tests.bench.train_step.peers import PeerTraining, open_peer
from tests.bench.train_step.products import report_products
from tests.bench.train_step.sections import GROWTH_LIMIT, time_in_turns
from tests.bench.train_step.trainings import ModelTraining
from training.models.ranking import NetworkRankingModel, plan_tasks
from training.objectives.objective import TaskLosses

SECTIONS = ("deepctr", "growth", "profile")
SPEEDUP, FULL_SPEEDUP = 3.0, 1.5
DISTINCT_BATCHES = 16
PROFILED_STEPS = 20


@dataclass(frozen=True)
class RowShape:
    """What a row holds, and the network over it.

    Attributes:
        network: A built-in one.
        ids: Number of scalar ids; each has a table of its own.
        numbers: Number of numbers.
        length: Most items of a history, which shares the table `item`; None: there is none.
        params: Of the network.
        mean: Items of a history by the law of real lengths; None: all are full.
        tasks: Names of several; all learn one label.
    """

    network: str
    ids: int
    numbers: int
    length: int | None
    params: Mapping[str, Any]
    mean: float | None = None
    tasks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The network, and how long its histories are."""
        return self.network if self.mean is None else f"{self.network}, real lengths"

    @property
    def id_names(self) -> list[str]:
        """Names of the ids."""
        names = [f"id_{i}" for i in range(self.ids)]
        return names if self.length is None else ["item", *names[1:]]

    @property
    def number_names(self) -> list[str]:
        """Names of the numbers."""
        return [f"number_{i}" for i in range(self.numbers)]

    def draw(self, rows: int, vocabulary_size: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Draws batches `[DISTINCT_BATCHES, rows, …]`, ids by Zipf's law all over the table."""
        rng = np.random.default_rng(seed)
        tokens = vocabulary_size - FIRST_TOKEN_ID
        share = np.cumsum(1.0 / np.arange(1, tokens + 1))
        id_of_rank = FIRST_TOKEN_ID + rng.permutation(tokens)

        def draw_ids(*shape: int) -> np.ndarray:
            drawn = np.searchsorted(share, rng.random(shape) * share[-1])
            return id_of_rank[np.minimum(drawn, tokens - 1)].astype(np.int64)

        shape = (DISTINCT_BATCHES, rows)
        columns = {name: draw_ids(*shape) for name in self.id_names}
        columns |= {n: rng.random(shape, dtype=np.float32) for n in self.number_names}
        if self.length is not None:
            columns["history"] = draw_ids(*shape, self.length)
            if self.mean is not None:
                lengths = rng.geometric(1.0 / self.mean, shape)
                columns["history"][np.arange(self.length) >= lengths[..., None]] = PAD_ID
        columns["label"] = rng.integers(0, 2, shape).astype(np.float32)
        return columns

    def describe(self, vocabulary_size: int) -> Manifest:
        """Returns a manifest of a dataset of such rows."""
        size = vocabulary_size
        roles: dict[str, Role] = {"item": "item"}
        specs = [
            FeatureSpec(name, "int64", roles.get(name, "context"), vocabulary_size=size)
            for name in self.id_names
        ]
        specs += [FeatureSpec(name, "float32", "context") for name in self.number_names]
        if self.length is not None:
            history = FeatureSpec("history", "int64", "user", (self.length,), vocabulary_size=size,
                                  shared_embedding="item")  # fmt: skip
            specs.append(history)
        specs.append(FeatureSpec("label", "float32", "label"))
        keys = DatasetKeys(None, "item" if self.length else None, label="label",
                           history="history" if self.length else None)  # fmt: skip
        return Manifest(
            "bench", "1", "", "Example", None, (), FeatureSchema(tuple(specs)), keys, (), "",
            self._describe_lengths(), {}, SourceSnapshot((), None, {}, ""),
            RowCounts({}, {}, 0, {}, {}), "",
        )  # fmt: skip

    def _describe_lengths(self) -> dict[str, Any]:
        if self.length is None:
            return {}
        length = {"max": self.length, "mean": self.mean or self.length}
        return {"train": {"history": {"length": length}}}

    def count_products(self, columns: Mapping[str, np.ndarray], dim: int) -> float:
        """Returns the FLOP of the matrix products of a step on drawn batches."""
        rows = columns["label"].shape[1]
        joined = self.ids * dim + self.numbers
        sizes, tasks = (joined, *HIDDEN_UNITS), len(self.tasks)
        match self.network:
            case "lr" | "fm":
                return count_mlp(rows, (self.numbers, 1))
            case "mf":
                return count_mlp(rows, (dim, 1))
            case "wide_deep" | "deepfm":
                return count_mlp(rows, (*sizes, 1)) + count_mlp(rows, (self.numbers, 1))
            case "dcn":
                return count_dcn(rows, joined, CROSS_LAYERS, HIDDEN_UNITS)
            case "final_net":
                return sum(count_mlp(rows, (joined, *u, 1)) for u in (HIDDEN_UNITS, TASK_UNITS))
            case "shared_bottom":
                return count_shared_bottom(rows, sizes, TASK_UNITS, tasks)
            case "mmoe":
                return count_mmoe(rows, sizes, TASK_UNITS, (EXPERTS, tasks))
            case "bst":
                lengths = (columns["history"] != PAD_ID).sum(axis=2)
                dims, longest = (dim, joined - dim), self.length or 0
                found = [count_bst(n, longest, dims, HIDDEN_UNITS) for n in lengths.tolist()]
                return sum(found) / len(found)
            case _:
                layers = {"attention": ATTENTION_UNITS, "hidden": HIDDEN_UNITS}
                tokens = float((columns["history"] != PAD_ID).sum() / DISTINCT_BATCHES)
                return count_din(rows, tokens, (dim, joined + dim), layers)


HIDDEN_UNITS, ATTENTION_UNITS, TASK_UNITS = (256, 128, 64), (80, 40), (64,)
CROSS_LAYERS, EXPERTS = 3, 4
DEEPFM = RowShape("deepfm", 26, 13, None, {"hidden_units": HIDDEN_UNITS})
DIN = RowShape(
    "din", 4, 0, 50,
    {"hidden_units": HIDDEN_UNITS, "activation": "relu", "attention_units": ATTENTION_UNITS},
)  # fmt: skip
SHORT_DIN = replace(DIN, mean=9.0)
BST = RowShape("bst", 4, 0, 50, {"hidden_units": HIDDEN_UNITS})
SHORT_BST = replace(BST, mean=SHORT_DIN.mean)
OTHERS = (
    replace(DEEPFM, network="lr", params={}),
    replace(DEEPFM, network="fm", params={}),
    replace(DEEPFM, network="wide_deep"),
    replace(DEEPFM, network="dcn", params={**DEEPFM.params, "cross_layers": CROSS_LAYERS}),
    replace(DEEPFM, network="final_net", params={**DEEPFM.params, "second_units": TASK_UNITS}),
    replace(
        DEEPFM,
        network="shared_bottom",
        params={**DEEPFM.params, "task_units": TASK_UNITS},
        tasks=("click", "like"),
    ),
    replace(
        DEEPFM,
        network="mmoe",
        tasks=("click", "like"),
        params={**DEEPFM.params, "task_units": TASK_UNITS, "experts": EXPERTS},
    ),
    RowShape("mf", 2, 0, None, {"user": "id_0", "item": "id_1"}),
)
"""Networks of which the profile alone is taken."""


def build_training(
    shape: RowShape, columns: Mapping[str, np.ndarray], vocabulary_size: int, dim: int
) -> ModelTraining:
    """Returns Sluice's training of a network on drawn batches."""
    data = {"kind": "ranking", "network": shape.network, "embedding_dim": dim}
    tasks = {"tasks": {name: {"label": "label"} for name in shape.tasks}} if shape.tasks else {}
    config = RankingConfig.model_validate({**data, **tasks, "params": dict(shape.params)})
    manifest = shape.describe(vocabulary_size)
    model = NetworkRankingModel(config, manifest, seed=1)
    batches = tf.data.Dataset.from_tensor_slices(dict(columns)).repeat().prefetch(2)
    return ModelTraining(model, TaskLosses(plan_tasks(config, manifest)), batches, "adam")


def open_deepctr(
    python: Path, shape: RowShape, columns: Mapping[str, np.ndarray], size: int, dim: int
) -> AbstractContextManager[PeerTraining]:
    """Starts DeepCTR on the same batches."""
    asked = {
        "network": shape.network, "ids": shape.id_names, "numbers": shape.number_names,
        "length": shape.length, "dim": dim, "vocabulary_size": size,
        "hidden_units": HIDDEN_UNITS, "attention_units": ATTENTION_UNITS,
    }  # fmt: skip
    script = Path(__file__).with_name("deepctr_peer.py")
    return open_peer("DeepCTR", (python, script), columns, asked)


def measure_beside_deepctr(
    report: BenchReport, console: Console, shape: RowShape, arguments: argparse.Namespace
) -> None:
    """Steps of both on the same batches, in turns."""
    size, dim = arguments.vocabulary_size, arguments.dim
    columns = shape.draw(arguments.batch, size)
    ours, theirs = f"Sluice, {shape.title}", f"DeepCTR, {shape.title}"
    with open_deepctr(arguments.deepctr, shape, columns, size, dim) as peer:
        found = time_in_turns(
            "deepctr",
            f"{shape.title}: {arguments.batch} rows, {shape.ids} tables of {size:,} x {dim}",
            {ours: build_training(shape, columns, size, dim), theirs: peer},
            batch_rows=arguments.batch,
            steps={ours: 20, theirs: 10},
            repeats=arguments.repeats,
        )
    report.measurements += found
    bar = FULL_SPEEDUP if shape == DIN else SPEEDUP
    report.verdicts += judge(found[0].shape, found, [Bar(ours, theirs, bar)])
    console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def measure_growth(report: BenchReport, console: Console, arguments: argparse.Namespace) -> None:
    """DeepFM on few and on many rows: the same batches, and batches spread all over the tables."""
    few, many = (rows // DEEPFM.ids for rows in (arguments.few_rows, arguments.many_rows))
    columns, dim = DEEPFM.draw(arguments.batch, few), arguments.dim
    far = {n: c * (many // few) if n in DEEPFM.id_names else c for n, c in columns.items()}
    names = [f"{few * DEEPFM.ids:,} rows", f"{many * DEEPFM.ids:,} rows, same batches",
             f"{many * DEEPFM.ids:,} rows, ids all over"]  # fmt: skip
    trainings = {
        names[0]: build_training(DEEPFM, columns, few, dim),
        names[1]: build_training(DEEPFM, columns, many, dim),
        names[2]: build_training(DEEPFM, far, many, dim),
    }
    found = time_in_turns(
        "growth",
        f"deepfm: {arguments.batch} rows, dim {dim}",
        trainings,
        batch_rows=arguments.batch,
        steps=dict.fromkeys(names, 20),
        repeats=arguments.repeats,
    )
    report.measurements += found
    bars = [Bar(name, names[0], GROWTH_LIMIT, at_least=False) for name in names[1:]]
    report.verdicts += judge(found[0].shape, found, bars)
    console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("ranking", __doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--deepctr", type=Path, help="a Python that has DeepCTR")
    add("--batch", type=int, default=2048, help="rows of a batch")
    add("--vocabulary-size", type=int, default=40_000, help="rows of a table beside DeepCTR")
    add("--dim", type=int, default=16, help="numbers of a row")
    add("--few-rows", type=int, default=100_000, help="growth: rows of all tables, the fewest")
    add("--many-rows", type=int, default=10_000_000, help="growth: rows of all tables, the most")
    add("--repeats", type=int, default=5, help="rounds of each, in turns; the fastest counts")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("batch", "dim", "repeats"))
    if min(arguments.vocabulary_size, arguments.few_rows // DEEPFM.ids) < 10:
        parser.error("tables have 10 rows or more")
    if arguments.many_rows < arguments.few_rows:
        parser.error("--many-rows is below --few-rows")
    if arguments.deepctr is not None and not arguments.deepctr.is_file():
        parser.error(f"--deepctr: no file {arguments.deepctr}")


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    if "deepctr" in arguments.sections:
        if arguments.deepctr is None:
            report.skip("deepctr: --deepctr PYTHON names none")
        else:
            for shape in (DEEPFM, DIN, SHORT_DIN):
                measure_beside_deepctr(report, console, shape, arguments)
    if "growth" in arguments.sections:
        measure_growth(report, console, arguments)
    if "profile" in arguments.sections:
        size, dim, rows = arguments.vocabulary_size, arguments.dim, arguments.batch
        trainings = {}
        for shape in (DEEPFM, DIN, SHORT_DIN, BST, SHORT_BST, *OTHERS):
            columns = shape.draw(rows, size)
            training = build_training(shape, columns, size, dim)
            trainings[shape.title] = (training, shape.count_products(columns, dim))
        report_products(report, console, trainings, PROFILED_STEPS)
    print_report(report, console, "bars (CPU time per example)")
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
