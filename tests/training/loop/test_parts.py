"""A plan and its parts: what they say, and refuse together."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.artefacts.run import read_json
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import SparseIndices, Weights
from conf.errors import ConfigError
from conf.manifest import DatasetKeys, Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from training.fit import train
from training.loop.parts import build, refuse_lost_order
from training.loop.plan import check
from training.models.registry import build_model
from training.reader.training_data import read_current_data

SPARSE = FeatureSchema((
    FeatureSpec("fields", "int64", "context", (None,), 4, "sparse_indices:fields", 11),
    FeatureSpec("values", "float32", "context", (None,), 4, "weights:values", pad_value=0.0),
    FeatureSpec("label", "float32", "label"),
))  # fmt: skip


def describe_pairs(root: Path, manifest: Manifest) -> Manifest:
    """A version whose `fields` and `values` are sparse pairs."""
    ids, weights = RawColumn("idxs", "int64", True), RawColumn("vals", "float32", True)
    columns = (
        ColumnEncoding("fields", "idxs", "int64", "sparse_indices:fields",
                       SparseIndices((9,)), (ids,)),
        ColumnEncoding("values", "vals", "float32", "weights:values", Weights(), (weights, ids)),
        ColumnEncoding("label", "label", "float32"),
    )  # fmt: skip
    plan = EncoderPlan(SPARSE, columns, ())
    (root / "encoders").mkdir(parents=True)
    (root / "encoders" / "encoders.json").write_text(plan.dumps())
    config = {"features": [{"name": "values", "encoding": {"kind": "weights", "of": "fields"}}]}
    return replace(
        manifest, schema=SPARSE, keys=DatasetKeys(None, None, label="label"), encoder_files=(),
        encoders_fingerprint=plan.fingerprint, source=replace(manifest.source, config=config),
    )  # fmt: skip


@pytest.mark.parametrize(("combiner", "reads_order"), [("sum", 0), ("none", 1), ("last", 1)])
def test_sparse_pairs_are_refused_where_positions_are_read(
    combiner: str, reads_order: int, tmp_path: Path, tiny_manifest: Manifest
) -> None:
    manifest = describe_pairs(tmp_path, tiny_manifest)
    model = {"kind": "ranking", "network": "deepfm", "pooling": {"fields": {"combiner": combiner}}}
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "model": model, "input": {"sparse": True}}
    )
    data = SimpleNamespace(version_dir=tmp_path, manifest=manifest)
    built = build_model(config.model, manifest, 1)
    with pytest.raises(ConfigError, match="sorts the ids") if reads_order else nullcontext():
        refuse_lost_order(SimpleNamespace(config=config, data=data), built, built.inputs)


def test_a_plan_is_pure_and_its_parts_train(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig.model_validate(
        {"dataset": str(tiny_version), "name": "t", "root": str(tmp_path),
         "input": {"batch_size": 64},
         "model": {"embedding_dim": 4}, "fit": {"epochs": 1, "early_stopping": None}}
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("training.reader.shuffle_buffer.read_epoch", lambda *_: pytest.fail("read"))
        plan = check(config, read_current_data(config))
    assert (plan.steps_per_epoch, plan.tables["movie_id"]) == (12, [42, 4])
    parts = build(plan)
    rows = {name: [t.vocabulary_size, t.dim] for name, t in parts.model.tables.items()}
    assert plan.tables == rows
    assert plan.table_bytes == 3 * 4 * sum(count * dim for count, dim in rows.values())
    assert {name for side in plan.features.values() for name in side} == set(parts.model.inputs)
    assert not list(tmp_path.iterdir())
    assert read_json(train(parts) / "run_card.json")["status"] == "trained"
