"""No train/serve skew of models: a bare TensorFlow process gives what the trainer gives, for each.

Raw rows are encoded by the ETL's Arrow execution into records; models read the records, the
process of the SavedModel the raw rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import Length, MultiHot, SparseIndices, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import Operation
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.manifest import DatasetKeys
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from etl.encoders.pipeline import read_pipeline
from etl.encoders.vocabulary import write_statistic_table
from tests.contract.skew.encoder_plans import plan_feature, write_tokens, write_version
from tests.training.every_model import (
    RANKING_MODELS,
    RETRIEVAL_MODELS,
    ask_bare_process,
    assert_scores_alike,
    predict_test_split,
)
from training.checkpoint.restore import TrainedModel
from training.embedding.dynamic_table import DynamicTable
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.registry import build_model

ITEMS, USERS, ROWS, MAX_LEN = 12, 9, 40, 6
TYPES = {"int64": pa.int64(), "float32": pa.float32(), "float64": pa.float64(),
         "string": pa.string()}  # fmt: skip


def draw_rows(count: int) -> list[dict]:
    """Raw rows, some values missing or unknown, lists of any length."""
    rng = np.random.default_rng(4)
    titles = ["red shoe", "Blue SHOE, large", "", "hat", "blue hat", None]
    rows = []
    for _ in range(count):
        history = rng.integers(0, ITEMS + 2, rng.integers(0, MAX_LEN + 3)).tolist()
        pairs = rng.integers(0, 8, rng.integers(0, 4)).tolist()
        rows.append(
            {
                "user": f"u{rng.integers(USERS + 2)}",
                "item": int(rng.integers(ITEMS + 2)),
                "history": history,
                "clicked": [f"i{item}" for item in history] if rng.random() < 0.9 else None,
                "time": int(rng.integers(0, 2**41)) if rng.random() < 0.9 else None,
                "price": float(rng.normal() * 10) if rng.random() < 0.9 else None,
                "city": str(rng.choice(["Rome", "Bonn", "?"])) if rng.random() < 0.9 else None,
                "title": titles[rng.integers(len(titles))],
                "ids": pairs,
                "values": rng.random(len(pairs)).astype(np.float32).tolist(),
            }
        )
    return rows


def list_operations() -> dict[str, tuple[str, Operation, tuple[RawColumn, ...]]]:
    """Role, operation and raw columns of each feature that is not looked up."""
    time, price = RawColumn("time", "int64"), RawColumn("price", "float64")
    city, title = RawColumn("city", "string"), RawColumn("title", "string")
    history, item = RawColumn("history", "int64", True), RawColumn("item", "int64")
    ids, values = RawColumn("ids", "int64", True), RawColumn("values", "float32", True)
    fold = RawColumn("fold", "int64", is_served=False)
    return {
        "city_hash": ("context", Hash(50), (city,)),
        "city_hour": ("context", Cross(200, (None, DatePart("hour", "ms", 0))), (city, time)),
        "weekday": ("context", DatePart("weekday", "ms", 60), (time,)),
        "yearly": ("context", Cyclical("year", "ms", 0), (time,)),
        "price_bucket": ("item", Bucketize((-5.0, 0.0, 0.1, 5.0)), (price,)),
        "price_scaled": ("item", Normalize(2.5, -10.0, 1e6, False, 0.25, 0.125), (price,)),
        "words": ("item", Ngrams("word", (1, 2), 300), (title,)),
        "letters": ("item", Ngrams("char", (3,), 300, lower=False), (title,)),
        "history_hot": ("user", MultiHot("item", ITEMS + 2), (history,)),
        "history_length": ("user", Length(4), (history,)),
        "clicked_hash": ("user", Hash(70), (RawColumn("clicked", "string", True),)),
        "user_key": ("user", Hash(None), (RawColumn("user", "string"),)),
        "item_rate": ("item", Statistic("item", "rate"), (item, fold)),
        "sparse": ("context", SparseIndices((9,)), (ids,)),
        "weights": ("context", Weights(), (values, ids)),
        "user_item": ("context", Cross(100), (RawColumn("user", "string"), item)),
    }


@pytest.fixture(scope="module")
def raw_rows() -> list[dict]:
    return draw_rows(ROWS)


@pytest.fixture(scope="module")
def version(tmp_path_factory, raw_rows) -> Path:
    """A version with every encoder; its test split and catalogue are encoded by Arrow."""
    root = tmp_path_factory.mktemp("data")
    directory = root / "v" / "encoders"
    directory.mkdir(parents=True)
    vocabularies, specs, columns = [], [], []
    for name, tokens, buckets in (
        ("item", list(range(ITEMS)), None),
        ("user", [f"u{number}" for number in range(USERS)], 3),
    ):
        spec = write_tokens(tokens, directory / f"{name}.parquet", buckets)
        vocabularies.append(spec)
        specs.append(FeatureSpec(name, "int64", name, (), None, name, spec.size))
        columns.append(ColumnEncoding(name, name, spec.token_dtype, name))
    specs.append(FeatureSpec("history", "int64", "user", (None,), MAX_LEN, "item",
                             vocabularies[0].size, "item", 0))  # fmt: skip
    columns.append(ColumnEncoding("history", "history", "int64", "item"))
    for name, (role, operation, inputs) in list_operations().items():
        feature, column = plan_feature(name, operation, inputs, MAX_LEN, role)
        specs.append(feature)
        columns.append(column)
    values = np.random.default_rng(0).random((vocabularies[0].size, 3))
    rate = write_statistic_table(values, directory / "rate.table.parquet")
    specs.append(FeatureSpec("label", "float32", "label"))
    columns.append(ColumnEncoding("label", "label", "float32"))
    schema = FeatureSchema(tuple(specs))
    plan = EncoderPlan(schema, tuple(columns), tuple(vocabularies), (rate,))
    (directory / "encoders.json").write_text(plan.dumps())
    catalog = [{**row, "item": number} for number, row in enumerate(raw_rows[:ITEMS])]
    splits = {"test": raw_rows, "catalog": catalog}
    encoded = {name: encode_rows(directory, plan, rows) for name, rows in splits.items()}
    weights = {"name": "weights", "encoding": {"kind": "weights", "of": "sparse"}}
    return write_version(
        root, plan, encoded, config={"features": [weights]},
        keys=DatasetKeys("user", "item", "history", label="label"), statistics={},
    )  # fmt: skip


def encode_rows(directory: Path, plan: EncoderPlan, rows: list[dict]) -> list[dict]:
    """What the ETL makes of raw rows."""
    raw = {c.name: c for column in plan.columns for c in column.inputs}
    types = {name: pa.list_(TYPES[c.dtype]) if c.is_list else TYPES[c.dtype]
             for name, c in raw.items()}  # fmt: skip
    types |= {"item": pa.int64(), "user": pa.string(), "history": pa.list_(pa.int64())}
    arrays = {name: pa.array([row.get(name) for row in rows], kind)
              for name, kind in types.items()}  # fmt: skip
    arrays["label"] = pa.array([float(n % 2) for n in range(len(rows))], pa.float32())
    return read_pipeline(directory).apply(pa.RecordBatch.from_pydict(arrays)).to_pylist()


KEYED = {"user_key": {"kind": "dynamic"}}
FEATURES = [*list_operations(), "user", "item", "history"]
STATIC = [name for name in FEATURES if name not in ("user_key", "weights")]
SIDES = {
    "user_features": ["user", "history", "user_key", "history_hot", "clicked_hash"],
    "item_features": ["item", "words", "price_scaled", "price_bucket", "item_rate"],
}
# What is one's own names the features of its dataset: tests/training/loop/test_every_model.py.
MODELS = {
    **{name: {**model, "features": STATIC}
       for name, model in RANKING_MODELS.items() if name not in ("own", "mf")},
    "mf_score": {**RANKING_MODELS["mf"], "features": ["user", "item"]},
    "dynamic": {**RANKING_MODELS["deepfm"], "embeddings": KEYED,
                "features": [*STATIC, "user_key"]},
    **{name: model for name, model in RETRIEVAL_MODELS.items() if name != "own_tower"},
    "dssm": {**RETRIEVAL_MODELS["dssm"], "embeddings": KEYED, **SIDES},
    "youtube_dnn": {**RETRIEVAL_MODELS["youtube_dnn"],
                    "user_features": ["history", "history_hot", "clicked_hash"]},
    **{name: {**RETRIEVAL_MODELS[name], "item_features": SIDES["item_features"]}
       for name in ("sasrec", "sasrec_ligr", "hstu", "gru", "bst_tower", "comirec")},
}  # fmt: skip


def _fill_tables(trained: TrainedModel) -> None:
    """Lets dynamic tables know some of the keys, as training would."""
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 1000, ("user_key",))
    known = np.setdiff1d(batch["user_key"].numpy()[: ROWS // 2], [0, 1])
    rng = np.random.default_rng(1)
    for table in trained.model.tables.values():
        if isinstance(table, DynamicTable):
            table.keys.set_keys(known)
            for matrix in table.keys.matrices:
                matrix.assign(rng.normal(size=(len(known) + 2, matrix.dim)).astype(np.float32))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_model_scores_a_whole_split_alike_without_sluice(
    version: Path, raw_rows: list[dict], tmp_path: Path
) -> None:
    manifest = read_manifest(version)
    exports, expected = {}, {}
    for name, model in MODELS.items():
        values = {"dataset": "d", "name": name, "model": model}
        config = TrainConfig.model_validate(values)
        built = build_model(config.model, manifest, 3)
        trained = TrainedModel(tmp_path, built, config, manifest, version)
        if "embeddings" in model:
            _fill_tables(trained)
        expected[name] = predict_test_split(trained)
        exports[name] = str(write_export(trained, ExportOptions(tmp_path / "models")))
    assert_scores_alike(expected, ask_bare_process(exports, raw_rows, tmp_path))
