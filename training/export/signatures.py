"""Signatures of a SavedModel: which a model has, in which form features come in, what is computed.

A retrieval model: `user_embedding`, `item_embedding`, each also `…_encoded` and `…_examples`;
`top_k`, the best items without those of `exclude`; `serving_default`, the same with a fixed `k`.
A ranking model: `serving_default`, `encoded`, `examples`, `classify`, `regress`; several items of
each row by raw features (`candidates`), by raw keys (`score_items`), or for their order alone by
their keys in lists and `items.parquet` (`rank_items`). Both: `row_features`, from raw values of a
row to what `…_encoded` signatures take.

Forms: raw values, which the graph encodes as the ETL does, lists padded with `pad_token`, missing
values as `null_token`; encoded features, as the records hold them; `tf.Example`s of raw values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.artefacts.export import (
    DEFAULT_SIGNATURE,
    ENCODED,
    ENCODED_SUFFIX,
    RANK_ITEMS,
    ROW_FEATURES,
    SCORE_ITEMS,
    TOP_K,
)
from conf.encoders import EncoderPlan
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.checkpoint.restore import TrainedModel
from training.embedding.key_space import KeySpace, translating
from training.encoders.serving import (
    INT_PAD_TOKENS,
    STRING_PAD_TOKENS,
    TENSOR_DTYPES,
    RawInput,
    ServingEncoders,
    fit_length,
    read_serving_encoders,
)
from training.encoders.source import find_item_columns, find_pair_features
from training.export.embeddings import ExportedItems
from training.models.ranking import NetworkRankingModel, Task
from training.models.retrieval import RetrievalModel, require_retrieval, score_catalogue

EMBEDDING, EXAMPLES = "embedding", "examples"
NO_SCORE = float(np.finfo(np.float32).min)
"""Score of a place of a list for which there is no item; JSON knows no infinity."""
Tensors = Mapping[str, tf.Tensor]
Features = dict[str, tf.Tensor]
Compute = Callable[[Features, Tensors], Tensors]
"""From encoded features, and everything that was given, to the named outputs."""


@dataclass(frozen=True)
class InputForm:
    """A form in which features come in; `inputs` is what `export.json` says of each."""

    specs: dict[str, tf.TensorSpec]
    read: Callable[[Tensors], Features]
    inputs: list[dict[str, Any]]

    def add(self, spec: tf.TensorSpec, means: str) -> InputForm:
        """Adds an input that is no feature."""
        about = {"name": spec.name, "dtype": spec.dtype.name, "means": means}
        return replace(self, specs=self.specs | {spec.name: spec}, inputs=[*self.inputs, about])


@dataclass(frozen=True)
class Signature:
    """A function of a SavedModel; the method is how TensorFlow Serving calls it."""

    form: InputForm
    compute: Compute
    outputs: Mapping[str, str]
    method: str = "predict"

    def to_json(self) -> dict[str, Any]:
        outputs = [{"name": name, "means": means} for name, means in self.outputs.items()]
        return {"method": self.method, "inputs": self.form.inputs, "outputs": outputs}


def build_encoders(trained: TrainedModel) -> ServingEncoders:
    """Builds the encoders of all that the model reads, and of the items' keys."""
    key = trained.manifest.keys.item
    names = dict.fromkeys((*trained.model.inputs, *([] if key is None else [key])))
    return read_serving_encoders(trained.version_dir, trained.manifest, names)


def build_signatures(
    trained: TrainedModel, encoders: ServingEncoders, items: ExportedItems | None, k: int
) -> dict[str, Signature]:
    """Builds the signatures of a model by name; without items none of them knows a catalogue.

    A retrieval model ranks the items, k of them by `serving_default`.
    """
    if isinstance(trained.model, NetworkRankingModel):
        return _build_ranking(trained.manifest, trained.model, encoders, items)
    model = require_retrieval(trained.model)
    _refuse_pairs(trained.manifest, model, encoders.plan)
    signatures = _build_towers(model, encoders)
    if items is None:
        return {DEFAULT_SIGNATURE: signatures[f"user_{EMBEDDING}"], **signatures}
    return {**_build_lists(model, encoders, items, k), **signatures}


def _refuse_pairs(manifest: Manifest, model: RetrievalModel, plan: EncoderPlan) -> None:
    """Refuses a user's side that reads the item: it would have one vector for all items."""
    if mixed := find_pair_features(manifest, plan, model.user_inputs):
        raise ConfigError(
            "the user's side of the model reads features that are made of the item's columns: "
            "nobody knows them before an item is found",
            received=", ".join(mixed),
            fix="train without them, or read them in a ranking model",
        )


def _build_towers(model: RetrievalModel, encoders: ServingEncoders) -> dict[str, Signature]:
    sides = {
        "user": (model.user_inputs, model.embed_users, model.interests),
        "item": (model.item_inputs, model.embed_items, None),
    }
    signatures = {}
    for side, (names, embed, several) in sides.items():
        means = f"vector of the {side}, float32 [batch, dim]"
        if several is not None:
            means = f"{several} vectors of the {side}, float32 [batch, {several}, dim]"
        forms = {
            "": build_raw_form(encoders, names),
            ENCODED_SUFFIX: build_encoded_form(encoders, names),
            f"_{EXAMPLES}": build_examples_form(encoders, names),
        }
        compute = _name_embeddings(embed)
        for suffix, form in forms.items():
            signatures[f"{side}_{EMBEDDING}{suffix}"] = Signature(form, compute, {EMBEDDING: means})
    return {**signatures, ROW_FEATURES: build_row_features(encoders, model.user_inputs)}


def _name_embeddings(embed: Callable[[Features], tf.Tensor]) -> Compute:
    return lambda features, _: {EMBEDDING: embed(features)}


def describe_score(model: RetrievalModel) -> str:
    """Returns what the score of a user and an item is."""
    if model.interests is None:
        return "dot product of the user's and the item's embedding"
    return f"largest dot product of the user's {model.interests} embeddings with the item's"


def _build_lists(
    model: RetrievalModel, encoders: ServingEncoders, items: ExportedItems, k: int
) -> dict[str, Signature]:
    """Builds the signatures that give the best items of the whole catalogue."""
    catalogue = Catalogue(encoders, items)
    vectors = tf.Variable(items.vectors, trainable=False, name="item_vectors")
    raw, column = build_raw_form(encoders, model.user_inputs), catalogue.raw.column
    exclude, length = (_free_name(name, raw.specs) for name in ("exclude", "k"))
    left_out = tf.TensorSpec([None, None], catalogue.raw.tensor_spec.dtype, name=exclude)
    lengths = tf.TensorSpec([None], tf.int32, name=length)
    form = raw.add(left_out, f"{column} of items to leave out, [batch, length]; unknown ones pad")
    form = form.add(lengths, "length of the lists; the largest of the batch counts")

    def rank(features: Features, given: Tensors) -> Tensors:
        scores = score_catalogue(model.embed_users(features), vectors)
        if exclude not in given:
            return catalogue.rank(scores, min(k, catalogue.size))
        return catalogue.rank(scores, tf.reduce_max(given[length]), given[exclude])

    outputs = {
        "items": f"{column} of the best items, [batch, k]; behind a list's end "
        f"{catalogue.pad_token!r}",
        "scores": f"{describe_score(model)}, float32 [batch, k]; behind a list's end {NO_SCORE}",
    }
    return {DEFAULT_SIGNATURE: Signature(raw, rank, outputs), TOP_K: Signature(form, rank, outputs)}


def _free_name(name: str, taken: Collection[str]) -> str:
    """Returns a name, with underscores behind it where an input has the same."""
    return _free_name(f"{name}_", taken) if name in taken else name


def _build_ranking(
    manifest: Manifest,
    model: NetworkRankingModel,
    encoders: ServingEncoders,
    items: ExportedItems | None,
) -> dict[str, Signature]:
    forms = {
        DEFAULT_SIGNATURE: build_raw_form(encoders, model.inputs),
        ENCODED: build_encoded_form(encoders, model.inputs),
        EXAMPLES: build_examples_form(encoders, model.inputs),
    }
    outputs = {task.name: describe_output(task) for task in model.tasks}

    def predict(features: Features, _: Tensors) -> Tensors:
        return model.predict(features)

    return {
        **{name: Signature(form, predict, outputs) for name, form in forms.items()},
        **_build_example_apis(model, build_examples_form(encoders, model.inputs, "inputs")),
        **_build_candidates(manifest, model, encoders),
        **({} if items is None else _build_item_scores(model, encoders, items)),
    }


def describe_output(task: Task) -> str:
    """Returns what the output of a task means."""
    return f"probability that {task.label} is 1" if task.is_binary else f"value of {task.label}"


def _build_example_apis(model: NetworkRankingModel, form: InputForm) -> dict[str, Signature]:
    """Builds what TensorFlow Serving's `:classify` and `:regress` call; tensors have its names."""
    binary = [task.name for task in model.tasks if task.is_binary]
    first = model.tasks[0]

    def regress(features: Features, _: Tensors) -> Tensors:
        return {"outputs": model.predict(features)[first.name]}

    def classify(features: Features, _: Tensors) -> Tensors:
        found = model.predict(features)
        scores = tf.stack([found[name] for name in binary], axis=1)
        classes = tf.tile(tf.constant([binary]), [tf.shape(scores)[0], 1])
        return {"classes": classes, "scores": scores}

    means = {"outputs": describe_output(first)}
    signatures = {"regress": Signature(form, regress, means, "regress")}
    if binary:
        means = {"classes": "names of the binary tasks", "scores": "their probabilities"}
        signatures["classify"] = Signature(form, classify, means, "classify")
    return signatures


def _build_candidates(
    manifest: Manifest, model: NetworkRankingModel, encoders: ServingEncoders
) -> dict[str, Signature]:
    """Builds what scores several items of a row by raw features; nothing where it has no items."""
    columns = find_item_columns(manifest, encoders.plan)
    mixed = find_pair_features(manifest, encoders.plan, model.inputs)
    pairs = {n for n in model.inputs if n in mixed or encoders.specs[n].role == "item"}
    inputs = encoders.find_inputs(model.inputs)
    of_items = {
        item.name: item.tensor_spec
        for item in inputs
        if item.feature in pairs and (item.feature not in mixed or item.column in columns)
    }
    if not of_items:
        return {}

    def count_pairs(given: Tensors) -> tf.Tensor:
        return tf.shape(given[next(iter(of_items))])[:2]

    def read(given: Tensors) -> Features:
        """Encodes features of items flat, `[rows * items]`."""
        flat, shape = dict(given), count_pairs(given)
        for item in inputs:
            value = given[item.name]
            if item.name in of_items:
                inner = tf.concat([[tf.reduce_prod(shape)], tf.shape(value)[2:]], axis=0)
                flat[item.name] = tf.reshape(value, inner)
            elif item.feature in pairs:
                flat[item.name] = tf.repeat(value, shape[1], axis=0)
        return encoders.encode(flat, model.inputs)

    def score(features: Features, given: Tensors) -> Tensors:
        rows = {name: value for name, value in features.items() if name not in pairs}
        own = {name: value for name, value in features.items() if name in pairs}
        return model.predict_candidates(rows, own, count_pairs(given))

    specs = {item.name: item.tensor_spec for item in inputs}
    for name, spec in of_items.items():
        specs[name] = tf.TensorSpec([None, *spec.shape], spec.dtype, name=name)
    per = ("row", "candidate")
    about = [{**item.to_json(), "per": per[item.name in of_items]} for item in inputs]
    means = _describe_pairs(model, describe_output)
    return {"candidates": Signature(InputForm(specs, read, about), score, means)}


def _describe_pairs(model: NetworkRankingModel, describe: Callable[[Task], str]) -> dict[str, str]:
    return {task.name: f"{describe(task)}, float32 [rows, items]" for task in model.tasks}


def _describe_order(task: Task) -> str:
    """Returns what orders items: probabilities near 1 would tie."""
    return f"log-odds that {task.label} is 1" if task.is_binary else describe_output(task)


def explain_no_items(trained: TrainedModel, plan: EncoderPlan) -> str | None:
    """Says why a graph knows no items: it ranks none, or cannot score them by their keys."""
    manifest, model = trained.manifest, trained.model
    if manifest.keys.item is None:
        return "its dataset names no item (events.item)"
    if not isinstance(model, NetworkRankingModel):
        return None
    if mixed := find_pair_features(manifest, plan, model.inputs):
        what = f"it reads {', '.join(mixed)}, made of columns of the item and not of role item"
        return f"{what}: their values are not known for other items than a row's own"
    if not any(manifest.schema[name].role == "item" for name in model.inputs):
        return "it reads no feature of role item"
    return None


def _build_item_scores(
    model: NetworkRankingModel, encoders: ServingEncoders, items: ExportedItems
) -> dict[str, Signature]:
    """Builds the signatures that take items by their keys, and their features of the catalogue."""
    catalogue = Catalogue(encoders, items)

    def build(form: InputForm, are_listed: bool, score: Any, means: dict[str, str]) -> Signature:
        name = _free_name("items", form.specs)

        def compute(features: Features, given: Tensors) -> Tensors:
            positions, ids = catalogue.find(given[name], are_listed=are_listed)
            pairs = catalogue.take(tf.reshape(positions, [-1]), ids)
            return score(features, pairs, tf.shape(positions))

        about = f"{catalogue.raw.column} of the items to score, [rows, items]"
        dtype = catalogue.tokens.dtype if are_listed else catalogue.raw.tensor_spec.dtype
        spec = tf.TensorSpec([None, None], dtype, name=name)
        return Signature(form.add(spec, about), compute, means)

    of_rows = [name for name in model.inputs if name not in items.features]
    forms = {"": build_raw_form(encoders, of_rows),
             ENCODED_SUFFIX: build_encoded_form(encoders, of_rows)}  # fmt: skip
    means, orders = (_describe_pairs(model, one) for one in (describe_output, _describe_order))
    kinds = {SCORE_ITEMS: (False, model.predict_candidates, means),
             RANK_ITEMS: (True, model.compute_candidate_logits, orders)}  # fmt: skip
    scores = {f"{name}{suffix}": build(form, *kind)
              for name, kind in kinds.items() for suffix, form in forms.items()}  # fmt: skip
    return {**scores, ROW_FEATURES: build_row_features(encoders, of_rows)}


def build_raw_form(encoders: ServingEncoders, names: Collection[str]) -> InputForm:
    inputs = encoders.find_inputs(names)
    return InputForm(
        {item.name: item.tensor_spec for item in inputs},
        lambda raw: encoders.encode(raw, names),
        [item.to_json() for item in inputs],
    )


def build_encoded_form(encoders: ServingEncoders, names: Collection[str]) -> InputForm:
    own = {encoders.names[n]: spec for n, spec in encoders.specs.items() if n in names}

    def read(given: Tensors) -> Features:
        return {spec.name: fit_length(given[name], spec) for name, spec in own.items()}

    return InputForm(
        {
            name: tf.TensorSpec([None, *spec.shape], TENSOR_DTYPES[spec.dtype], name=name)
            for name, spec in own.items()
        },
        read,
        [
            {"name": name, "feature": spec.name, "dtype": spec.dtype, "is_list": spec.is_list}
            for name, spec in own.items()
        ],
    )


def build_row_features(encoders: ServingEncoders, names: Collection[str]) -> Signature:
    """Builds the signature from raw values to what the encoded form takes."""
    own = {encoders.names[name]: name for name in encoders.specs if name in names}

    def compute(features: Features, _: Tensors) -> Tensors:
        return {name: features[feature] for name, feature in own.items()}

    means = {name: f"{feature}, as the records hold it" for name, feature in own.items()}
    return Signature(build_raw_form(encoders, names), compute, means)


def build_examples_form(
    encoders: ServingEncoders, names: Collection[str], name: str = EXAMPLES
) -> InputForm:
    inputs = encoders.find_inputs(names)
    return InputForm(
        {name: tf.TensorSpec([None], tf.string, name=name)},
        lambda given: encoders.encode(_parse_examples(given[name], inputs), names),
        [{"name": name, "dtype": "string", "holds": [item.to_json() for item in inputs]}],
    )


def _parse_examples(serialized: tf.Tensor, inputs: Collection[RawInput]) -> Tensors:
    parsed = tf.io.parse_example(serialized, {item.name: _plan_parse(item) for item in inputs})
    return {item.name: _finish_parsed(item, parsed[item.name]) for item in inputs}


def _plan_parse(item: RawInput) -> Any:
    # Examples hold float32 alone.
    dtype = tf.float32 if item.dtype == "float64" else TENSOR_DTYPES[item.dtype]
    if item.is_list and item.length is None:
        return tf.io.RaggedFeature(dtype)
    shape = [item.length or 0] if item.is_list else []
    missing: Any = item.pad_token if item.is_list else item.null_token
    if missing is None and dtype == tf.float32 and not item.is_required:
        missing = float("nan")
    if missing is None:
        return tf.io.FixedLenFeature(shape, dtype)
    return tf.io.FixedLenFeature(shape, dtype, default_value=np.full(shape, missing).tolist())


def _finish_parsed(item: RawInput, values: Any) -> tf.Tensor:
    if isinstance(values, tf.RaggedTensor):
        values = values.to_tensor(tf.cast(item.padding, values.dtype))
    return tf.cast(values, TENSOR_DTYPES[item.dtype])


class Catalogue(tf.Module):
    """Items inside the graph: ids, keys, encoded features; unknown ones are at `size`."""

    def __init__(self, encoders: ServingEncoders, items: ExportedItems) -> None:
        super().__init__(name="catalogue")
        self._encoders, self._key, self.size = encoders, items.key, len(items)
        [self.raw] = encoders.find_inputs([items.key])
        is_text = not pa.types.is_integer(items.keys.type)
        self.pad_token: int | str = STRING_PAD_TOKENS[0] if is_text else INT_PAD_TOKENS[0]
        tokens = items.keys.to_numpy(zero_copy_only=not is_text)  # Refuses items without a token.
        self._ids = tf.Variable(items.ids, trainable=False, name="item_ids")
        self.tokens = tf.Variable(tokens, trainable=False, name="item_tokens")
        self._columns = {
            name: tf.Variable(
                _append_unknown(values, encoders.specs[name]), trainable=False, name=name
            )
            for name, values in items.features.items()
        }
        name = encoders.plan.column(items.key).vocabulary
        self._first_id = 0 if name is None else encoders.plan.vocabulary(name).first_token_id
        # A key that is an id is found as it is: the encoder would compute another one of it.
        self._is_id = items.keys.equals(pa.array(items.ids))

    def find(self, keys: tf.Tensor, *, are_listed: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the positions of raw keys, or of keys as lists have them, and flat ids of all."""
        flat = tf.reshape(keys, [-1])
        if not (are_listed and self._is_id):
            flat = self._encoders.encode({self.raw.name: flat}, (self._key,))[self._key]
        positions = tf.minimum(tf.searchsorted(self._ids, flat), self.size - 1)
        is_known = tf.equal(tf.gather(self._ids, positions), flat)
        return tf.reshape(tf.where(is_known, positions, self.size), tf.shape(keys)), flat

    def take(self, positions: tf.Tensor, ids: tf.Tensor) -> Features:
        """Returns the features of items; of an unknown one its OOV bucket alone, if it has one."""
        found = {name: tf.gather(column, positions) for name, column in self._columns.items()}
        if self._key in found:
            found[self._key] = tf.where(ids < self._first_id, ids, found[self._key])
        return found

    def rank(
        self, scores: tf.Tensor, k: tf.Tensor | int, exclude: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns `items` and `scores` `[rows, k]` of the best; equal scores in the order of ids.

        Scores are `[rows, size]`, raw keys to leave out `[rows, …]`.
        """
        if exclude is not None:
            scores = self._mask(scores, self.find(exclude)[0])
        best, columns = tf.math.top_k(scores, tf.minimum(k, self.size))
        tokens = tf.gather(self.tokens, columns)
        pad = tf.cast(self.pad_token, tokens.dtype)
        return {"items": tf.where(best > NO_SCORE, tokens, pad), "scores": best}

    def _mask(self, scores: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        known = tf.cast(tf.where(columns < self.size), tf.int32)  # [cells, 2]: row, position
        cells = tf.stack([known[:, 0], tf.gather_nd(columns, known)], axis=1)
        return tf.tensor_scatter_nd_update(
            scores, cells, tf.fill(tf.shape(cells)[:1], tf.constant(NO_SCORE))
        )


def _append_unknown(values: tf.Tensor | tf.RaggedTensor, spec: FeatureSpec) -> tf.Tensor:
    """Adds the row of an unknown item: an unknown id, lists without a value."""
    if isinstance(values, tf.RaggedTensor):
        values = values.to_tensor()
    values = fit_length(values, spec)
    if spec.vocabulary_size is not None or spec.dtype == "int64":
        filler: object = PAD_ID if spec.is_list else OOV_ID
    else:
        filler = spec.pad_value or ("" if values.dtype == tf.string else 0)
    row = tf.fill([1, *values.shape[1:]], tf.cast(filler, values.dtype))
    return tf.concat([values, row], axis=0)


def save_signatures(
    directory: str, signatures: Mapping[str, Signature], encoders: ServingEncoders
) -> None:
    """Saves functions as signatures of one SavedModel, with the variables and keys they read."""
    lookups: dict[str, Any] = {}
    with translating(partial(_look_up, lookups)):
        functions = {name: _trace(signature) for name, signature in signatures.items()}
    module = tf.Module(name="served")
    module.encoders, module.lookups = encoders, lookups
    read = [v for function in functions.values() for v in function.graph.variables]
    variables = {id(variable): variable for variable in read}.values()
    module.weights = sorted(variables, key=lambda variable: variable.name)
    tf.saved_model.save(module, directory, signatures=functions)


def _trace(signature: Signature) -> Any:
    form = signature.form

    @tf.function
    def serve(**given: tf.Tensor) -> Tensors:
        return signature.compute(form.read(given), given)

    return serve.get_concrete_function(**form.specs)


def _look_up(tables: dict[str, Any], space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
    if space.label not in tables:
        with tf.init_scope():  # Outside of the graph that is being traced.
            tables[space.label] = space.build_lookup()
    rows = tables[space.label].lookup(tf.cast(keys, tf.int64))
    return tf.ensure_shape(rows, keys.shape)  # A lookup forgets it.
