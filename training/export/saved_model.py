"""Export of a trained run: SavedModels with raw inputs, and all embeddings.

    export/user_tower/1, export/item_tower/1   SavedModels; numbered as TensorFlow Serving expects
    export/embeddings/{items,users}.{parquet,txt}
    export/export.json                         what they are, how to call them, checksums

Each tower has two signatures: `serving_default` takes raw tokens and encodes them inside the
graph, `encoded` takes ids. Both return `embedding`, `[batch, dim]`; the score of a user and an
item is the dot product of their embeddings.

Embeddings are written as Parquet for machines and as text for everything else, same rows in
both:

    <name>.parquet   key (raw token), id int64, vector list<float32>
    <name>.txt       key<TAB>v1,v2,…   UTF-8, one line per row, no header

Numbers in the text are the shortest decimals that read back as the same float32. Inside a
key, backslash, tab, line feed and carriage return are escaped as in C.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorflow as tf

from conf.atomic_output import staged_directory
from conf.encoders import EncoderPlan
from conf.paths import ReadablePath
from conf.run import EXPORT_DIR, write_json
from conf.schema import FeatureSpec
from training.checkpoint.restore import TrainedModel
from training.embedding.key_space import KeySpace, translating
from training.evaluation.item_index import ItemIndex, build_item_index, read_user_vectors
from training.export.serving_encoders import (
    TENSOR_DTYPES,
    ServingEncoders,
    build_serving_encoders,
    fit_length,
    name_inputs,
)
from training.input.vocabularies import Vocabulary, read_key_vocabulary, read_plan
from training.tensorflow_runtime import disk_errors

ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


class EmbeddingWriter:
    """Writes both files row group by row group.

    Args:
        directory: Where the files go.
        name: Their name without suffix.
        key_type: Type of the keys, int64 or string.
    """

    def __init__(self, directory: Path, name: str, key_type: pa.DataType) -> None:
        self.schema = pa.schema(
            [
                pa.field("key", key_type, nullable=False),
                pa.field("id", pa.int64(), nullable=False),
                pa.field("vector", pa.list_(pa.float32()), nullable=False),
            ]
        )
        self.rows = 0
        self._parquet = pq.ParquetWriter(directory / f"{name}.parquet", self.schema)
        self._text = (directory / f"{name}.txt").open("w", encoding="utf-8", newline="\n")

    def __enter__(self) -> EmbeddingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parquet.close()
        self._text.close()

    def write(self, keys: pa.Array, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Appends rows.

        Args:
            keys: `[rows]` raw tokens, no null.
            ids: `[rows]` int64.
            vectors: `[rows, dim]` float32.
        """
        if not len(keys):
            return
        offsets = np.arange(0, vectors.size + 1, vectors.shape[1], dtype=np.int32)
        values = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
        lists = pa.ListArray.from_arrays(offsets, values)
        columns = [keys, pa.array(ids, pa.int64()), lists]
        self._parquet.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        numbers = pa.ListArray.from_arrays(offsets, values.cast(pa.string()))
        lines = pc.binary_join_element_wise(escape_keys(keys), pc.binary_join(numbers, ","), "\t")
        self._text.writelines(f"{line}\n" for line in lines.to_pylist())
        self.rows += len(keys)


def escape_keys(keys: pa.Array) -> Any:
    """Returns keys as text that holds neither tabs nor line breaks."""
    if pa.types.is_integer(keys.type):
        return keys.cast(pa.string())
    for character, escaped in ESCAPES:
        keys = pc.replace_substring(keys, character, escaped)
    return keys


EXPORT_FILE = "export.json"
EXPORT_FORMAT_VERSION = 1
SERVING_VERSION = "1"
OUTPUT_NAME = "embedding"

EmbedFunction = Callable[[Mapping[str, tf.Tensor]], tf.Tensor]


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
        towers = {
            "user_tower": _write_tower(
                staging / "user_tower",
                trained.version_dir,
                plan,
                model.user_inputs,
                model.embed_users,
            ),
            "item_tower": _write_tower(
                staging / "item_tower",
                trained.version_dir,
                plan,
                model.item_inputs,
                model.embed_items,
            ),
        }
        embeddings = _write_embeddings(staging / "embeddings", trained)
        write_json(
            staging / EXPORT_FILE,
            {
                "format_version": EXPORT_FORMAT_VERSION,
                "model": trained.config.model.name,
                "run": trained.run_dir.name,
                "dataset": trained.manifest.dataset_name,
                "dataset_version": trained.manifest.dataset_version,
                "encoders_fingerprint": trained.manifest.encoders_fingerprint,
                "tensorflow": tf.__version__,
                "score": "dot product of the user's and the item's embedding",
                "towers": towers,
                "embeddings": embeddings,
                "files": list_files(staging),
            },
        )
    return target


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


def save_tower(
    directory: Path,
    encoders: ServingEncoders,
    specs: Mapping[str, FeatureSpec],
    embed: EmbedFunction,
) -> None:
    """Saves one tower with a raw and an encoded signature.

    Only the variables that the tower reads are saved: no optimizer state, no other tower. Keys of
    dynamic tables are looked up inside the graph.

    Args:
        directory: Where the SavedModel goes.
        encoders: Encoders of its inputs.
        specs: Its input features by name.
        embed: Encoded features to `[batch, dim]`.
    """
    names = name_inputs(specs)

    @tf.function
    def from_raw(**raw: tf.Tensor) -> dict[str, tf.Tensor]:
        return {OUTPUT_NAME: embed(encoders.encode(raw))}

    @tf.function
    def from_encoded(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            OUTPUT_NAME: embed(
                {name: fit_length(features[names[name]], spec) for name, spec in specs.items()}
            )
        }

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
    module = tf.Module(name="tower")
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


def _write_tower(
    base: Path,
    version_dir: ReadablePath,
    plan: EncoderPlan,
    names: tuple[str, ...],
    embed: EmbedFunction,
) -> dict[str, Any]:
    encoders = build_serving_encoders(version_dir, plan, names)
    specs = {name: plan.schema[name] for name in names}
    input_names = name_inputs(specs)
    save_tower(base / SERVING_VERSION, encoders, specs, embed)
    return {
        "path": f"{base.name}/{SERVING_VERSION}",
        "output": OUTPUT_NAME,
        "signatures": {
            "serving_default": {
                "takes": "raw tokens; lists padded with pad_token on the right",
                "inputs": [item.to_json() for item in encoders.inputs],
            },
            "encoded": {
                "takes": "ids: 0 pad, 1 unknown or null, tokens from 2; of dynamic tables keys",
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


def _write_embeddings(directory: Path, trained: TrainedModel) -> dict[str, Any]:
    directory.mkdir()
    index = build_item_index(
        trained.model, trained.version_dir, trained.manifest, trained.config.evaluation.batch_size
    )
    users, unknown = _write_users(directory, trained)
    return {
        "dim": int(index.vectors.shape[1]),
        "columns": "key (raw token), id, vector (float32)",
        "text": "key<TAB>v1,v2,… with \\\\, \\t, \\n, \\r escaped in keys; no header",
        "items": {"rows": _write_items(directory, trained, index)},
        "users": {"rows": users, "users_outside_vocabulary": unknown},
    }


def _write_items(directory: Path, trained: TrainedModel, index: ItemIndex) -> int:
    manifest = trained.manifest
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, manifest.require_key("item"))
    with EmbeddingWriter(directory, "items", _key_type(vocabulary)) as writer:
        _write_known(writer, vocabulary, index.ids, index.vectors)
        return writer.rows


def _write_users(directory: Path, trained: TrainedModel) -> tuple[int, int]:
    """Writes all users of the `users` split; returns rows written and users without a token."""
    manifest = trained.manifest
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, manifest.require_key("user"))
    unknown = 0
    with EmbeddingWriter(directory, "users", _key_type(vocabulary)) as writer:
        for batch in read_user_vectors(trained, seen=False):
            unknown += _write_known(writer, vocabulary, batch.ids, batch.vectors)
        return writer.rows, unknown


def _write_known(
    writer: EmbeddingWriter, vocabulary: Vocabulary | None, ids: np.ndarray, vectors: np.ndarray
) -> int:
    """Writes the rows that have a raw token; returns how many have none."""
    keys = pa.array(ids) if vocabulary is None else vocabulary.take(ids)
    known = keys.is_valid().to_numpy(zero_copy_only=False)
    writer.write(keys.drop_null(), ids[known], vectors[known])
    return int(np.count_nonzero(~known))


def _key_type(vocabulary: Vocabulary | None) -> pa.DataType:
    return pa.int64() if vocabulary is None else vocabulary.tokens.type
