"""How the features of a model enter it: tables, static or dynamic, and pooling of lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from conf.encoders import KEY_PREFIX
from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list, bound_row_list
from conf.schema import FeatureSpec
from conf.training.models import ModelConfig, PoolingConfig, VectorConfig
from conf.training.tables import DynamicTableConfig, Initializer, NormalConfig, StaticTableConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable, RowUpdates
from training.embedding.worker_rows import RowExchange, find_owners
from training.models.embedded_inputs import BIAS_SUFFIX, EmbeddedInputs, InputFeature
from training.networks.layers import PositionWeights
from training.reader.feature_columns import find_feature, unknown_name


class TableBuilder:
    """Plans how the features that a model reads enter it, and builds their tables."""

    def __init__(
        self, config: ModelConfig, manifest: Manifest, specs: Sequence[FeatureSpec], seed: int
    ) -> None:
        self._config, self._manifest, self._seed = config, manifest, seed
        by_name = {spec.name: spec for spec in specs}
        self._dynamic: dict[str, str] = {}  # Features of dynamic tables, and these by name.
        self._keys: dict[str, KeySpace] = {}
        self._tables: dict[str, EmbeddingTable] = {}
        for name, table in config.embeddings.items():
            own = [by_name[feature] for feature in _find_features(name, table, by_name)]
            if isinstance(table, DynamicTableConfig):
                self._add(name, own)
            elif not all(spec.vocabulary_size for spec in own):
                problem = "a static table, and its feature has no vocabulary"
                fix = f"set model.embeddings.{name}.kind=dynamic, or build a vocabulary"
                raise _unfit(name, own, problem, fix)
        for name in set(self._dynamic.values()):
            if others := [s for s in specs if s.table == name and not self.is_keyed(s)]:
                problem = "the table of other features too by its name"
                fix = "call the table something else, or add them to its `features`"
                raise _unfit(name, others, problem, fix)
        self._vectors = _find_vectors(config, by_name)

    def resolve(self, spec: FeatureSpec) -> FeatureSpec:
        """Returns a feature's spec with the table that it reads."""
        table = self._dynamic.get(spec.name, spec.table)
        return spec if spec.table == table else replace(spec, shared_embedding=table)

    def is_embedded(self, spec: FeatureSpec) -> bool:
        """Whether a feature's values are ids, that is, rows of a table."""
        return spec.vocabulary_size is not None or spec.name in self._dynamic

    def is_keyed(self, spec: FeatureSpec) -> bool:
        """Whether steps get rows of a dynamic table in the place of a feature's values."""
        return spec.vocabulary_size is None or spec.name in self._dynamic

    def plan_input(
        self, spec: FeatureSpec, pooling: PoolingConfig | None = None, *, bias: bool = False
    ) -> InputFeature:
        """Returns how a feature enters a network: its rows, or the numbers that it holds."""
        asked = pooling or PoolingConfig()
        bound = bound_list if asked.combiner == "none" else bound_row_list
        spec = bound(self._manifest, spec)
        if self.is_embedded(spec):
            return self.plan_rows(spec, asked, bias=bias)
        self._refuse_keys(spec)
        # Whole numbers without a vocabulary are keys, unless the config pools them.
        is_asked = spec.is_list and pooling is not None
        is_pooled = is_asked or (spec.is_ragged and spec.dtype == "float32")
        pools, vector = is_pooled and spec.dtype != "bytes", self._vectors.get(spec.name)
        return InputFeature(spec, None, asked, pools_numbers=pools, vector=vector)

    def _refuse_keys(self, spec: FeatureSpec) -> None:
        keys = self._manifest.keys  # Their values say nothing as numbers.
        is_key = spec.name in (keys.user, keys.item, keys.history, *self._manifest.histories)
        is_key = is_key or spec.encoding.startswith((KEY_PREFIX, "hash:"))
        if spec.dtype == "int64" and is_key:
            raise ConfigError(
                f"the model cannot read feature {spec.name!r}",
                received=f"keys of 64 bits ({spec.encoding})",
                allowed="keys with a dynamic table, ids with a vocabulary, numbers",
                fix=f"set model.embeddings.{spec.table}.kind=dynamic, encode it with a vocabulary, "
                "or leave it out of the model's features",
            )

    def plan_rows(
        self, spec: FeatureSpec, pooling: PoolingConfig | None = None, *, bias: bool = False
    ) -> InputFeature:
        dim = self._settings(spec).dim or self._config.embedding_dim
        if dim == "auto":  # The fourth root, as a whole number.
            dim = 6 * math.isqrt(math.isqrt(table_size(self._manifest, spec)))
        return InputFeature(self.resolve(spec), dim, pooling or PoolingConfig(), has_bias=bias)

    def build_tables(self, features: Sequence[InputFeature]) -> dict[str, EmbeddingTable]:
        """Builds the tables of features, one for those that share it, and those of biases."""
        tables: dict[str, EmbeddingTable] = {}
        biases: dict[str, EmbeddingTable] = {}
        usual = NormalConfig(stddev=self._config.embedding_stddev)
        for feature in features:
            spec, settings = feature.spec, self._settings(feature.spec)
            if feature.dim is not None and feature.has_vector and spec.table not in tables:
                first = settings.initializer or usual
                tables[spec.table] = self._build(spec.table, spec, feature.dim, first)
                tables[spec.table].updates = self._plan_updates(settings)
        for feature in features:
            name = f"{feature.spec.table}{BIAS_SUFFIX}"
            if not feature.has_bias or name in biases:
                continue
            if name in tables:
                raise ConfigError(
                    "the table of a feature's biases has the name of another table",
                    received=name,
                    fix="call that table something else, or switch the biases off",
                )
            trained = self._settings(feature.spec).model_copy(update={"trainable": True})
            biases[name] = self._build(name, feature.spec, 1, None)
            biases[name].updates = self._plan_updates(trained)
        self._tables = {**tables, **biases}
        return self._tables

    def build_inputs(
        self,
        features: Sequence[InputFeature],
        position_weights: Mapping[str, PositionWeights] | None = None,
    ) -> EmbeddedInputs:
        tables, embedded = self._tables, [one for one in features if one.dim is not None]
        return EmbeddedInputs(
            features,
            {f.name: tables[f.spec.table] for f in embedded if f.has_vector},
            {f.name: tables[f"{f.spec.table}{BIAS_SUFFIX}"] for f in embedded if f.has_bias},
            position_weights,
        )

    def _plan_updates(self, settings: StaticTableConfig | DynamicTableConfig) -> RowUpdates:
        are_dense = isinstance(settings, StaticTableConfig) and settings.dense
        l2 = self._config.embedding_l2 if settings.l2 is None else settings.l2
        own_l2 = l2 if settings.trainable else None
        return RowUpdates(settings.trainable, own_l2, are_dense, settings.optimizer)

    def _settings(self, spec: FeatureSpec) -> StaticTableConfig | DynamicTableConfig:
        settings = self._config.embeddings.get(self.resolve(spec).table)
        return StaticTableConfig() if settings is None else settings

    def _build(
        self, name: str, spec: FeatureSpec, dim: int, initializer: Initializer | None
    ) -> EmbeddingTable:
        config = self._settings(spec)
        if not isinstance(config, DynamicTableConfig):
            size = table_size(self._manifest, spec)
            return EmbeddingTable(name, size, dim, seed=self._seed, initializer=initializer)
        keys = self._build_keys(self._dynamic[spec.name], config)
        return DynamicTable(name, keys, dim, seed=self._seed, initializer=initializer)

    def _build_keys(self, table: str, config: DynamicTableConfig) -> KeySpace:
        """Returns the keys of a dynamic table, which that of its biases shares."""
        if table not in self._keys:
            owners = find_owners(tf.distribute.get_strategy()) if config.shard else None
            exchange = None if owners is None else RowExchange(owners, len(self._keys))
            self._keys[table] = KeySpace(table, config, seed=self._seed, exchange=exchange)
        return self._keys[table]

    def _add(self, name: str, specs: Sequence[FeatureSpec]) -> None:
        if any(spec.dtype != "int64" for spec in specs):
            problem = "a dynamic table, which takes whole numbers of 64 bits"
            fix = "encode the feature as `{kind: hash_key}` in the build"
            raise _unfit(name, specs, problem, fix)
        if taken := [spec for spec in specs if spec.name in self._dynamic]:
            raise _unfit(name, taken, "one of two tables of a feature", "name it in one of them")
        if len({_describe_keys(spec) for spec in specs}) > 1:
            problem = "of features whose keys are made in different ways"
            fix = "give each its own table, or build them with one vocabulary or all as hash_key"
            raise _unfit(name, specs, problem, fix)
        self._dynamic |= {spec.name: name for spec in specs}


def _unfit(table: str, specs: Sequence[FeatureSpec], problem: str, fix: str) -> ConfigError:
    """Returns the error of an entry of `model.embeddings` that its features do not fit."""
    received = ", ".join(f"{spec.name} ({_describe_keys(spec)})" for spec in specs)
    return ConfigError(f"model.embeddings.{table} is {problem}", received=received, fix=fix)


def _find_vectors(
    config: ModelConfig, specs: Mapping[str, FeatureSpec]
) -> Mapping[str, VectorConfig]:
    vectors: Mapping[str, VectorConfig] = getattr(config, "vectors", {})
    of_bytes = [spec.name for spec in specs.values() if spec.dtype == "bytes" and not spec.is_list]
    for name in vectors:
        if name not in of_bytes:
            problem = "model.vectors names no feature of bytes that the model reads"
            raise unknown_name(problem, name, of_bytes)
    return vectors


def _find_features(name: str, table: object, specs: Mapping[str, FeatureSpec]) -> tuple[str, ...]:
    named = table.features if isinstance(table, DynamicTableConfig) else None
    for feature in named or ():
        if feature not in specs:
            problem = f"model.embeddings.{name}.features names a feature that the model does not"
            raise unknown_name(f"{problem} read", feature, specs)
    names = named or tuple(spec.name for spec in specs.values() if spec.table == name)
    if not names:
        tables = dict.fromkeys(s.table for s in specs.values() if s.dtype == "int64")
        problem = "model.embeddings names a table that the model does not have, without `features`"
        raise unknown_name(problem, name, tables)
    return names


def _describe_keys(spec: FeatureSpec) -> str:
    """Returns a text that is equal for features whose equal keys mean the same thing."""
    if spec.vocabulary_size is not None:
        return f"vocabulary {spec.encoding}"
    return spec.encoding.partition(":")[0]


def table_size(manifest: Manifest, spec: FeatureSpec) -> int:
    """Returns the number of ids of the table that a feature reads; all that share it have one."""
    sharing = [other for other in manifest.schema.features if other.table == spec.table]
    sizes = {other.name: other.vocabulary_size for other in sharing if other.vocabulary_size}
    if spec.name not in sizes or len(set(sizes.values())) != 1:
        raise ConfigError(
            f"feature {spec.name!r} cannot be embedded from table {spec.table!r}",
            received=f"vocabulary sizes {sizes}",
            allowed="one vocabulary per embedding table",
            fix="encode the feature with a vocabulary, the same for all that share its table; or, "
            f"for keys of any value, set model.embeddings.{spec.table}.kind=dynamic",
        )
    return sizes[spec.name]


def complete_pooling(
    pooling: Mapping[str, PoolingConfig], manifest: Manifest, specs: Mapping[str, FeatureSpec]
) -> dict[str, PoolingConfig]:
    """Returns how lists are pooled that the config or the build say something of, by name."""
    for name, asked in pooling.items():
        _check_pooling(name, asked, manifest, specs)
    of_build = _find_weights(manifest)
    completed = {}
    for name in specs:
        if name in pooling or name in of_build:
            asked = pooling.get(name) or PoolingConfig()
            combiner = asked.combiner or ("sum" if name in of_build else "mean")
            weights = asked.weights or of_build.get(name)
            completed[name] = PoolingConfig(combiner=combiner, weights=weights)
    return completed


def _check_pooling(
    name: str, asked: PoolingConfig, manifest: Manifest, specs: Mapping[str, FeatureSpec]
) -> None:
    key = f"model.pooling.{name}"
    if name not in specs or not specs[name].is_list:
        lists = [spec.name for spec in specs.values() if spec.is_list]
        raise unknown_name(f"{key} names no list that the model reads", name, lists)
    spec = None if asked.weights is None else find_feature(manifest, asked.weights, key)
    if spec and (not spec.is_list or spec.dtype == "bytes" or spec.vocabulary_size is not None):
        raise ConfigError(
            f"{key}.weights must be a list of numbers, one for each position",
            received=f"{spec.name}: {spec.dtype}, shape {spec.shape}",
            fix=f"name a list feature of numbers, as long as {name}",
        )


def list_weights(pooling: Mapping[str, PoolingConfig], manifest: Manifest) -> set[str | None]:
    """Returns the features that are weights of lists, which nothing reads by themselves."""
    return {own.weights for own in pooling.values()} | set(_find_weights(manifest).values())


def _find_weights(manifest: Manifest) -> dict[str, str]:
    """Returns the feature that holds the weights of each sparse list, as the build says it."""
    found: dict[str, str] = {}
    for feature in manifest.source.config.get("features") or []:
        encoding = feature.get("encoding") or {}
        if encoding.get("kind") == "weights" and encoding.get("of") in manifest.schema:
            found[encoding["of"]] = feature["name"]
    return found
