"""Which signatures the SavedModel of a run has.

A retrieval model: `user_embedding`, `item_embedding`, each also `…_encoded` and `…_examples`;
`top_k`, the best items of the whole catalogue without those of `exclude`; `serving_default`, the
same with a fixed `k` and nothing left out; `row_features`, what `user_embedding_encoded` takes.

A ranking model: `serving_default`, `encoded`, `examples`, an output per task; `classify` and
`regress` as TensorFlow Serving's APIs of these names call them; `candidates`, several items of
each row by their raw features; `score_items` and `score_items_encoded`, the same by their keys;
`rank_items` and `rank_items_encoded`, what orders these items: log-odds; `row_features`, what the
`…_encoded` ones take of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
from conf.errors import ConfigError
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import read_plan
from training.evaluation.item_index import ItemIndex, read_item_features
from training.export.catalogue import NO_SCORE, Catalogue, CatalogueFeatures
from training.export.serving_encoders import (
    ServingEncoders,
    build_serving_encoders,
)
from training.export.signatures import (
    Compute,
    FormBuilder,
    InputForm,
    Signature,
    Tensors,
)
from training.export.source_facts import (
    find_item_columns,
    find_pair_features,
    read_source_facts,
)
from training.models.ranking import NetworkRankingModel, Task
from training.models.retrieval import RetrievalModel, score_catalogue

EMBEDDING = "embedding"


def build_encoders(trained: TrainedModel) -> ServingEncoders:
    """Builds the encoders of all that the model reads, and of the items' keys."""
    plan = read_plan(trained.version_dir, trained.manifest)
    key = trained.manifest.keys.item
    names = dict.fromkeys((*trained.model.inputs, *([] if key is None else [key])))
    facts = read_source_facts(trained.manifest)
    return build_serving_encoders(trained.version_dir, plan, names, facts)


def _build_forms(trained: TrainedModel, encoders: ServingEncoders) -> FormBuilder:
    names = dict.fromkeys(item.feature for item in encoders.inputs)
    return FormBuilder(encoders, {name: trained.manifest.schema[name] for name in names})


def build_retrieval_signatures(
    trained: TrainedModel,
    model: RetrievalModel,
    encoders: ServingEncoders,
    index: ItemIndex | None,
    k: int,
) -> dict[str, Signature]:
    """Builds the signatures of a retrieval model.

    Args:
        trained: The run's model.
        model: The same.
        encoders: See `build_encoders`.
        index: The items' vectors; None: the dataset has no items, so that nothing is ranked.
        k: Length of the lists of `serving_default`.

    Raises:
        ConfigError: The user's side reads a column of the item.
    """
    _refuse_pairs(trained, model)
    forms = _build_forms(trained, encoders)
    sides = {"user": (model.user_inputs, model.embed_users),
             "item": (model.item_inputs, model.embed_items)}  # fmt: skip
    signatures = {}
    for side, (names, embed) in sides.items():
        compute = partial(_name_embedding, embed)
        outputs = {EMBEDDING: _describe_vectors(side, model)}
        for suffix, form in {
            "": forms.build_raw(names),
            ENCODED_SUFFIX: forms.build_encoded(names),
            "_examples": forms.build_examples(names),
        }.items():
            signatures[f"{side}_{EMBEDDING}{suffix}"] = Signature(form, compute, outputs)
    signatures[ROW_FEATURES] = forms.build_row_features(model.user_inputs)
    if index is None:
        default = signatures[f"user_{EMBEDDING}"]
        return {DEFAULT_SIGNATURE: default, **signatures}
    return {
        **_build_rankings(model, forms, Catalogue(trained, encoders, index), index, k),
        **signatures,
    }


def _describe_vectors(side: str, model: RetrievalModel) -> str:
    if side == "user" and model.interests is not None:
        return f"{model.interests} vectors of the user, float32 [batch, {model.interests}, dim]"
    return f"vector of the {side}, float32 [batch, dim]"


def describe_score(model: RetrievalModel) -> str:
    """Returns what the score of a user and an item is."""
    if model.interests is None:
        return "dot product of the user's and the item's embedding"
    return f"largest dot product of the user's {model.interests} embeddings with the item's"


def _refuse_pairs(trained: TrainedModel, model: RetrievalModel) -> None:
    """Refuses a user's side that reads the item: it would have one vector for all items.

    Raises:
        ConfigError: It does.
    """
    plan = read_plan(trained.version_dir, trained.manifest)
    if mixed := find_pair_features(trained.manifest, plan, model.user_inputs):
        raise ConfigError(
            "the user's side of the model reads features that are made of the item's columns: "
            "nobody knows them before an item is found",
            received=", ".join(mixed),
            fix="train without them, or read them in a ranking model",
        )


def _name_embedding(
    embed: Callable[[Mapping[str, tf.Tensor]], tf.Tensor],
    features: dict[str, tf.Tensor],
    _: Tensors,
) -> Tensors:
    return {EMBEDDING: embed(features)}


def _build_rankings(
    model: RetrievalModel, forms: FormBuilder, catalogue: Catalogue, index: ItemIndex, k: int
) -> dict[str, Signature]:
    vectors = tf.Variable(index.vectors, trainable=False, name="item_vectors")
    raw = forms.build_raw(model.user_inputs)
    key = catalogue.raw
    names = _free_names(("exclude", "k"), raw.specs)
    exclude, length = names["exclude"], names["k"]
    form = raw.add(
        [
            tf.TensorSpec([None, None], key.tensor_spec.dtype, name=exclude),
            tf.TensorSpec([None], tf.int32, name=length),
        ],
        {exclude: f"{key.column} of items that are left out, [batch, length]; unknown ones are "
         "ignored, so that anything unknown pads",
         length: "length of the lists; the largest of the batch counts"},
    )  # fmt: skip

    def rank(features: dict[str, tf.Tensor], given: Tensors) -> Tensors:
        scores = score_catalogue(model.embed_users(features), vectors)
        if exclude not in given:
            return catalogue.rank(scores, min(k, catalogue.size))
        return catalogue.rank(scores, tf.reduce_max(given[length]), given[exclude])

    outputs = {
        "items": f"{key.column} of the best items, [batch, k]; behind a list's end "
        f"{catalogue.pad_token!r}",
        "scores": f"{describe_score(model)}, float32 [batch, k]; behind a list's end {NO_SCORE}",
    }
    return {DEFAULT_SIGNATURE: Signature(raw, rank, outputs), TOP_K: Signature(form, rank, outputs)}


def _free_names(names: tuple[str, ...], taken: Mapping[str, object]) -> dict[str, str]:
    """Returns each name, with underscores behind it where an input has the same."""
    found = {}
    for name in names:
        found[name] = name
        while found[name] in taken:
            found[name] += "_"
    return found


def build_ranking_signatures(
    trained: TrainedModel, model: NetworkRankingModel, encoders: ServingEncoders
) -> dict[str, Signature]:
    """Builds the signatures of a ranking model; arguments as of `build_retrieval_signatures`."""
    forms = _build_forms(trained, encoders)
    outputs = {task.name: describe_output(task) for task in model.tasks}

    def predict(features: dict[str, tf.Tensor], _: Tensors) -> Tensors:
        return model.predict(features)

    return {
        DEFAULT_SIGNATURE: Signature(forms.build_raw(model.inputs), predict, outputs),
        ENCODED: Signature(forms.build_encoded(model.inputs), predict, outputs),
        "examples": Signature(forms.build_examples(model.inputs), predict, outputs),
        **_build_example_apis(model, forms.build_examples(model.inputs, "inputs")),
        **_build_candidates(trained, model, forms),
    }


def describe_output(task: Task) -> str:
    """Returns what the output of a task means."""
    return f"probability that {task.label} is 1" if task.is_binary else f"value of {task.label}"


def describe_order(task: Task) -> str:
    """Returns what items are ordered by: probabilities near 1 would tie."""
    return f"log-odds that {task.label} is 1" if task.is_binary else describe_output(task)


def _build_example_apis(model: NetworkRankingModel, form: InputForm) -> dict[str, Signature]:
    """Builds what TensorFlow Serving's `:classify` and `:regress` call; tensors have its names."""
    binary = [task.name for task in model.tasks if task.is_binary]
    first = model.tasks[0]

    def regress(features: dict[str, tf.Tensor], _: Tensors) -> Tensors:
        return {"outputs": model.predict(features)[first.name]}

    def classify(features: dict[str, tf.Tensor], _: Tensors) -> Tensors:
        found = model.predict(features)
        scores = tf.stack([found[name] for name in binary], axis=1)
        classes = tf.tile(tf.constant([binary]), [tf.shape(scores)[0], 1])
        return {"classes": classes, "scores": scores}

    signatures = {
        "regress": Signature(form, regress, {"outputs": describe_output(first)}, "regress")
    }
    if binary:
        outputs = {"classes": "names of the binary tasks", "scores": "their probabilities"}
        signatures["classify"] = Signature(form, classify, outputs, "classify")
    return signatures


def _build_candidates(
    trained: TrainedModel, model: NetworkRankingModel, forms: FormBuilder
) -> dict[str, Signature]:
    """Builds the signatures that score several items of a row; none where it has no items."""
    manifest = trained.manifest
    plan = read_plan(trained.version_dir, manifest)
    columns = find_item_columns(manifest, plan)
    of_items = [name for name in model.inputs if manifest.schema[name].role == "item"]
    mixed = find_pair_features(manifest, plan, model.inputs)
    raw = {
        item.name
        for item in forms.find_inputs(model.inputs)
        if item.feature in of_items or (item.feature in mixed and item.column in columns)
    }
    if not raw:
        return {}
    outputs = {task.name: f"{describe_output(task)}, float32 [rows, items]" for task in model.tasks}
    form = forms.build_candidates(model.inputs, raw)
    first = next(item.name for item in forms.find_inputs(model.inputs) if item.name in raw)
    compute = partial(_score_pairs, model, frozenset((*of_items, *mixed)), first)
    found = {"candidates": Signature(form, compute, outputs)}
    if explain_no_item_scores(trained, model) is not None:
        return found
    return {**found, **_build_item_scores(trained, model, forms, of_items, outputs)}


def explain_no_item_scores(trained: TrainedModel, model: NetworkRankingModel) -> str | None:
    """Says why a ranking model has no `score_items`; None: it has one.

    What the catalogue inside the graph does not hold of an item cannot be made of its key, and one
    value for all items of a row would be wrong.
    """
    manifest = trained.manifest
    if manifest.keys.item is None:
        return "its dataset names no item (events.item)"
    plan = read_plan(trained.version_dir, manifest)
    if mixed := find_pair_features(manifest, plan, model.inputs):
        return (
            f"it reads {', '.join(mixed)}, made of columns of the item and not of role item: "
            "their values are not known for other items than a row's own"
        )
    if not any(manifest.schema[name].role == "item" for name in model.inputs):
        return "it reads no feature of role item"
    return None


def _score_pairs(
    model: NetworkRankingModel,
    of_items: frozenset[str],
    first: str,
    features: dict[str, tf.Tensor],
    given: Tensors,
) -> Tensors:
    rows = {name: value for name, value in features.items() if name not in of_items}
    items = {name: value for name, value in features.items() if name in of_items}
    return model.predict_candidates(rows, items, tf.shape(given[first])[:2])


def _build_item_scores(
    trained: TrainedModel,
    model: NetworkRankingModel,
    forms: FormBuilder,
    of_items: list[str],
    outputs: dict[str, str],
) -> dict[str, Signature]:
    """Builds the signatures that take items by their keys, and their features of the catalogue."""
    manifest = trained.manifest
    key = manifest.require_key("item")
    names = tuple(dict.fromkeys((key, *of_items)))
    batch_size = trained.config.evaluation.batch_size
    items, columns = read_item_features(trained.version_dir, manifest, names, batch_size)
    catalogue = Catalogue(trained, forms.encoders, items)
    known = CatalogueFeatures(columns, {name: manifest.schema[name] for name in of_items})
    of_rows = [name for name in model.inputs if name not in of_items]

    def build(form: InputForm, score: ScorePairs, means: Mapping[str, str]) -> Signature:
        name = _free_names(("items",), form.specs)["items"]
        wanted = tf.TensorSpec([None, None], catalogue.raw.tensor_spec.dtype, name=name)
        about = f"{catalogue.raw.column} of the items to score, [rows, items]"
        compute: Compute = partial(_score_keys, score, catalogue, known, name)
        return Signature(form.add([wanted], {name: about}), compute, means)

    orders = {task.name: f"{describe_order(task)}, float32 [rows, items]" for task in model.tasks}
    kinds = {SCORE_ITEMS: (model.predict_candidates, outputs),
             RANK_ITEMS: (model.compute_candidate_logits, orders)}  # fmt: skip
    forms_of = {"": forms.build_raw(of_rows), ENCODED_SUFFIX: forms.build_encoded(of_rows)}
    scores = {
        f"{name}{suffix}": build(form, *kind)
        for name, kind in kinds.items()
        for suffix, form in forms_of.items()
    }
    return {**scores, ROW_FEATURES: forms.build_row_features(of_rows)}


ScorePairs = Callable[[Tensors, Tensors, tf.Tensor], Tensors]
"""From features of rows, those of their items and `[rows, items]` to scores of that shape."""


def _score_keys(
    score: ScorePairs,
    catalogue: Catalogue,
    known: CatalogueFeatures,
    name: str,
    features: dict[str, tf.Tensor],
    given: Tensors,
) -> Tensors:
    positions = catalogue.find(given[name])
    items = known.take(tf.reshape(positions, [-1]))
    return score(features, items, tf.shape(positions))
