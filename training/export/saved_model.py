"""Export of a trained run: SavedModels with raw inputs, and embeddings of retrieval models.

    export/ranker/1                            of a ranking model: one output per task
    export/user_tower/1, export/item_tower/1   of a retrieval model: `embedding`, `[batch, dim]`
    export/embeddings/{items,users}.{parquet,txt}   see `training.export.embeddings`
    export/export.json                         what they are, how to call them, checksums

Versions are numbered as TensorFlow Serving expects. Each SavedModel has two signatures:
`serving_default` takes raw values and encodes them inside the graph, `encoded` takes what the
records hold. A ranker's outputs are named after its tasks: the probability of label 1, or the
label's value, `[batch]`. The score of a user and an item is the dot product of their embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.atomic_output import staged_directory
from conf.encoders import EncoderPlan
from conf.run import EXPORT_DIR, write_json
from conf.schema import FeatureSpec
from training.checkpoint.restore import TrainedModel
from training.embedding.key_space import KeySpace, translating
from training.export.embeddings import write_embeddings
from training.export.serving_encoders import (
    TENSOR_DTYPES,
    ServingEncoders,
    build_serving_encoders,
    fit_length,
    name_inputs,
)
from training.input.vocabularies import read_plan
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, require_retrieval
from training.tensorflow_runtime import disk_errors

EXPORT_FILE = "export.json"
EXPORT_FORMAT_VERSION = 1
SERVING_VERSION = "1"
OUTPUT_NAME = "embedding"

ComputeOutputs = Callable[[Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]
"""From encoded features to the named outputs of a SavedModel."""


def write_export(trained: TrainedModel) -> Path:
    """Writes `export/` of a run; an earlier export is replaced when the new one is complete.

    Args:
        trained: The run's model.

    Returns:
        Directory of the export.

    Raises:
        InputDataError: A vocabulary or record is damaged, or a vector is not finite.
        UpstreamNotReadyError: Another process is exporting the same run.
        InternalError: The disk is full, or there is no permission.
    """
    with disk_errors(
        f"cannot write the export of {trained.run_dir}; an earlier one is untouched",
        "free some space (or check the permissions), then export again",
    ):
        return _write_export(trained)


def _write_export(trained: TrainedModel) -> Path:
    target = trained.run_dir / EXPORT_DIR
    plan = read_plan(trained.version_dir, trained.manifest)
    model = trained.model
    with staged_directory(target) as staging:
        if isinstance(model, RankingModel):
            parts = _write_ranker(staging, trained, plan, model)
        else:
            parts = _write_towers(staging, trained, plan, require_retrieval(model))
        write_json(
            staging / EXPORT_FILE,
            {
                "format_version": EXPORT_FORMAT_VERSION,
                "kind": trained.config.model.kind,
                "model": trained.config.model.name,
                "run": trained.run_dir.name,
                "dataset": trained.manifest.dataset_name,
                "dataset_version": trained.manifest.dataset_version,
                "encoders_fingerprint": trained.manifest.encoders_fingerprint,
                "tensorflow": tf.__version__,
                **parts,
                "files": list_files(staging),
            },
        )
    return target


def _write_ranker(
    staging: Path, trained: TrainedModel, plan: EncoderPlan, model: RankingModel
) -> dict[str, Any]:
    signatures = _write_model(staging / "ranker", trained, plan, model.inputs, model.predict)
    outputs = [describe_output(task) for task in model.tasks]
    return {
        "score": "one output per task, named after it, float32 of shape [batch]",
        "ranker": {"path": f"ranker/{SERVING_VERSION}", "outputs": outputs, **signatures},
    }


def describe_output(task: Task) -> dict[str, str]:
    """Returns what `export.json` says of the output of a task."""
    is_probability = task.is_binary
    means = f"probability that {task.label} is 1" if is_probability else f"value of {task.label}"
    return {"name": task.name, "label": task.label, "kind": task.kind, "means": means}


def _write_towers(
    staging: Path, trained: TrainedModel, plan: EncoderPlan, model: RetrievalModel
) -> dict[str, Any]:
    sides = {
        "user_tower": (model.user_inputs, model.embed_users),
        "item_tower": (model.item_inputs, model.embed_items),
    }
    towers = {}
    for name, (inputs, embed) in sides.items():
        signatures = _write_model(staging / name, trained, plan, inputs, _name_output(embed))
        towers[name] = {"path": f"{name}/{SERVING_VERSION}", "output": OUTPUT_NAME, **signatures}
    return {
        "score": "dot product of the user's and the item's embedding",
        "towers": towers,
        "embeddings": write_embeddings(staging / "embeddings", trained),
    }


def _name_output(embed: Callable[[Mapping[str, tf.Tensor]], tf.Tensor]) -> ComputeOutputs:
    return lambda features: {OUTPUT_NAME: embed(features)}


def list_files(root: Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of every file below a directory, by relative path."""
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        files[path.relative_to(root).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
    return files


def save_model(
    directory: Path,
    encoders: ServingEncoders,
    specs: Mapping[str, FeatureSpec],
    compute: ComputeOutputs,
) -> None:
    """Saves a function of features with a raw and an encoded signature.

    Only the variables that it reads are saved: no optimizer state, no other tower. Keys of
    dynamic tables are looked up inside the graph.

    Args:
        directory: Where the SavedModel goes.
        encoders: Encoders of its inputs.
        specs: Its input features by name.
        compute: Encoded features to outputs by name.
    """
    names = name_inputs(specs)

    @tf.function
    def from_raw(**raw: tf.Tensor) -> Mapping[str, tf.Tensor]:
        return compute(encoders.encode(raw))

    @tf.function
    def from_encoded(**features: tf.Tensor) -> Mapping[str, tf.Tensor]:
        return compute(
            {name: fit_length(features[names[name]], spec) for name, spec in specs.items()}
        )

    lookups = ServingLookups()
    with translating(lookups):
        signatures = {
            "serving_default": from_raw.get_concrete_function(
                **{item.name: item.tensor_spec for item in encoders.inputs}
            ),
            "encoded": from_encoded.get_concrete_function(
                **{names[name]: _encoded_spec(spec, names[name]) for name, spec in specs.items()}
            ),
        }
    module = tf.Module(name="served")
    module.encoders = encoders
    module.lookups = lookups.tables
    module.weights = [
        variable for function in signatures.values() for variable in function.graph.variables
    ]
    tf.saved_model.save(module, str(directory), signatures=signatures)


class ServingLookups:
    """Tables from keys to rows for the graphs that are traced with it.

    Attributes:
        tables: One per key space that a graph reads.
    """

    def __init__(self) -> None:
        self.tables: list[tf.lookup.experimental.MutableHashTable] = []
        self._of_space: dict[KeySpace, tf.lookup.experimental.MutableHashTable] = {}

    def __call__(self, space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, of the same shape."""
        if space not in self._of_space:
            with tf.init_scope():  # Outside of the graph that is being traced.
                self._of_space[space] = space.build_lookup()
            self.tables.append(self._of_space[space])
        return self._of_space[space].lookup(tf.cast(keys, tf.int64))


def _write_model(
    base: Path,
    trained: TrainedModel,
    plan: EncoderPlan,
    names: tuple[str, ...],
    compute: ComputeOutputs,
) -> dict[str, Any]:
    """Writes a SavedModel; returns what `export.json` says of its signatures."""
    encoders = build_serving_encoders(trained.version_dir, plan, names)
    specs = {name: plan.schema[name] for name in names}
    input_names = name_inputs(specs)
    save_model(base / SERVING_VERSION, encoders, specs, compute)
    return {
        "signatures": {
            "serving_default": {
                "takes": "raw values; lists padded with pad_token on the right",
                "inputs": [item.to_json() for item in encoders.inputs],
            },
            "encoded": {
                "takes": "what the records hold: numbers, and ids: 0 pad, 1 unknown or null, "
                "tokens from 2; of dynamic tables keys",
                "inputs": [
                    {
                        "name": input_names[name],
                        "feature": name,
                        "dtype": spec.dtype,
                        "is_list": spec.is_list,
                    }
                    for name, spec in specs.items()
                ],
            },
        },
    }


def _encoded_spec(spec: FeatureSpec, name: str) -> tf.TensorSpec:
    shape = [None, spec.shape[0]] if spec.is_list else [None]
    return tf.TensorSpec(shape, TENSOR_DTYPES[spec.dtype], name=name)
