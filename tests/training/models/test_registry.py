from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training import DSSMConfig, MFConfig
from training.input import Batch, build_eval_dataset
from training.models import MODELS, build_model

CONFIGS = [
    MFConfig(embedding_dim=4),
    MFConfig(embedding_dim=4, item_bias=False),
    DSSMConfig(embedding_dim=4, user_hidden_units=(8,), history_pooling="position_weighted"),
    DSSMConfig(embedding_dim=4, item_features=("movie_id",)),
]


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    return next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 8)))


def test_an_unknown_model_is_refused(tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="dssm"):
        build_model(SimpleNamespace(name="dsmm"), tiny_manifest, 0)  # type: ignore[arg-type]


def test_every_model_of_the_config_is_registered() -> None:
    assert {config.name for config in CONFIGS} == set(MODELS)


@pytest.mark.parametrize("config", CONFIGS)
def test_both_sides_meet_in_one_space(config, tiny_manifest: Manifest, batch: Batch) -> None:
    model = build_model(config, tiny_manifest, 1)
    users = model.embed_users({name: batch[name] for name in model.user_inputs})
    items = model.embed_items({name: batch[name] for name in model.item_inputs})
    assert users.shape == items.shape
    assert users.shape[0] == 8
    assert np.isfinite(users).all()
    assert np.isfinite(items).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_first_weights_depend_on_the_seed_alone(config, tiny_manifest: Manifest) -> None:
    first, same, other = (
        [v.numpy() for v in build_model(config, tiny_manifest, seed).trainable_variables]
        for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_saves_and_loads(config, tiny_manifest: Manifest, batch: Batch, tmp_path: Path) -> None:
    model = build_model(config, tiny_manifest, 1)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    other = build_model(config, tiny_manifest, 2)
    assert not np.array_equal(other.embed_users(batch), model.embed_users(batch))
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(other.embed_users(batch), model.embed_users(batch))
    np.testing.assert_array_equal(other.embed_items(batch), model.embed_items(batch))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_variable_is_either_a_table_or_dense(config, tiny_manifest: Manifest) -> None:
    model = build_model(config, tiny_manifest, 1)
    both = [*model.table_variables, *model.dense_variables]
    assert {id(v) for v in both} == {id(v) for v in model.trainable_variables}
    assert len(both) == len(model.trainable_variables)
    assert model.parameter_count == sum(v.numpy().size for v in both)


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_rows_get_no_gradient(config, tiny_manifest: Manifest, batch: Batch) -> None:
    model = build_model(config, tiny_manifest, 1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(batch) * tf.range(1.0, 9.0)[:, None])
        loss += tf.reduce_sum(model.embed_items(batch) * tf.range(1.0, 9.0)[:, None])
    for gradient in tape.gradient(loss, model.table_variables):
        if gradient is not None:
            assert not tf.convert_to_tensor(gradient).numpy()[0].any()


def test_squared_norms_of_the_looked_up_rows(tiny_manifest: Manifest, batch: Batch) -> None:
    model = build_model(CONFIGS[0], tiny_manifest, 1)
    users = model.tables["user_id"].rows.numpy()[batch["user_id"].numpy()].astype(np.float64)
    items = model.tables["movie_id"].rows.numpy()[batch["movie_id"].numpy()].astype(np.float64)
    expected = (users**2).sum(axis=1) + (items**2).sum(axis=1)
    np.testing.assert_allclose(model.sum_squared_rows(batch), expected, rtol=1e-5)
