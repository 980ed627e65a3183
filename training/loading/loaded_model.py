"""A SavedModel in memory, called by its signatures; processes of a machine can share its weights.

A session of its own holds the graph, the weights and the tables, and gives all of it back when it
ends: `tf.saved_model.load` leaves some fifty megabytes of functions with each load of a model.

A shared weight is a file that every process maps and a variable takes as its value. TensorFlow
copies it where a graph gathers rows from the variable itself, so that such operations are
rewritten: read the variable, which costs nothing, and gather from what was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework import function_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2, trackable_object_graph_pb2

from conf.errors import InputDataError
from conf.storage.atomic_output import atomic_file
from conf.storage.processes import hold_file_lock

INIT_OPERATION = "__saved_model_init_op"
SHARED_BYTES = 1 << 20
"""Smaller weights are copied: they are not worth a file."""
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"

Arrays = dict[str, np.ndarray]


class LoadedModel:
    """A SavedModel: its `signatures`, and shape and type of the `inputs` of each, by name.

    Weights lie in `pages` where processes share them; `threads` of one call: TensorFlow's choice.
    """

    def __init__(
        self, directory: Path, pages: Path | None = None, threads: int | None = None
    ) -> None:
        self._directory = directory
        saved = saved_model_pb2.SavedModel.FromString((directory / "saved_model.pb").read_bytes())
        [served] = [graph for graph in saved.meta_graphs if "serve" in graph.meta_info_def.tags]
        signatures = served.signature_def.items()
        self.signatures = {name: one for name, one in signatures if not name.startswith("__")}
        self.inputs = {name: _read_inputs(one) for name, one in self.signatures.items()}
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads or 0, inter_op_parallelism_threads=threads or 0
        )
        tf.config.experimental.enable_tensor_float_32_execution(False)
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        with graph.as_default():
            _restore(self._session, served, directory, pages)
        graph.finalize()
        self._calls = {
            name: self._session.make_callable(
                {key: info.name for key, info in sorted(one.outputs.items())},
                [one.inputs[key].name for key in self.inputs[name]],
            )
            for name, one in self.signatures.items()
        }

    def call(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Calls a signature, from any thread; returns the outputs by name, text as bytes."""
        found: Arrays = self._calls[signature](*(inputs[name] for name in self.inputs[signature]))
        return found

    def read_weights(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yields name and values of each weight, as the SavedModel's file holds them."""
        reader = tf.train.load_checkpoint(_name_weights(self._directory))
        for name, key in _list_keys(reader):
            yield name, reader.get_tensor(key)


def _read_inputs(signature: meta_graph_pb2.SignatureDef) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec(tf.TensorShape(info.tensor_shape), tf.as_dtype(info.dtype), name)
        for name, info in sorted(signature.inputs.items())
    }


def _restore(
    session: tf.compat.v1.Session,
    graph: meta_graph_pb2.MetaGraphDef,
    directory: Path,
    pages: Path | None,
) -> None:
    """Imports a graph into the default one, and brings weights and tables into the session."""
    if pages is None:
        saver = tf.compat.v1.train.import_meta_graph(graph, clear_devices=True)
        if saver is not None:
            saver.restore(session, _name_weights(directory))
    else:
        for function in graph.graph_def.library.function:
            _rewrite_gathers(function)
        tf.compat.v1.train.import_meta_graph(graph, clear_devices=True)
        _assign_shared(session, directory, pages)
    if INIT_OPERATION in graph.signature_def:
        assets = {
            asset.tensor_info.name: str(directory / "assets" / asset.filename)
            for asset in graph.asset_file_def
        }
        init = graph.signature_def[INIT_OPERATION].outputs[INIT_OPERATION].name
        session.run(init, assets)


def _name_weights(directory: Path) -> str:
    return str(directory / "variables" / "variables")


def _list_keys(reader: Any) -> list[tuple[str, str]]:
    """Lists name and key of the weights."""
    if not reader.has_tensor(_OBJECTS):
        return []
    objects = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor(_OBJECTS)
    )
    return [(one.full_name, one.checkpoint_key) for node in objects.nodes
            for one in node.attributes if one.name == "VARIABLE_VALUE"]  # fmt: skip


def _assign_shared(session: tf.compat.v1.Session, directory: Path, pages: Path) -> None:
    """Gives the variables of the default graph values that lie in `pages`."""
    reader = tf.train.load_checkpoint(_name_weights(directory))
    keys = _list_keys(reader)
    names = [name for name, _ in keys]
    if len(set(names)) != len(names):
        raise InputDataError(
            "two weights of the model have one name, so that processes cannot share them",
            received=f"{directory}: {next(name for name in names if names.count(name) > 1)}",
            fix="give each variable of the network a name, or serve with --processes 1",
        )
    key_of, assigned = dict(keys), []
    pages.mkdir(parents=True, exist_ok=True)
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type == "VarHandleOp":
            key = key_of[operation.get_attr("shared_name").decode()]
            value = _place(_map_weight(reader, key, pages))
            assigned.append(tf.raw_ops.AssignVariableOp(resource=operation.outputs[0], value=value))
    session.run(assigned)


def _place(values: NDArray[np.generic]) -> tf.Tensor:
    """Returns a tensor that is an array, not a copy of it."""
    found = tf.numpy_function(lambda: values, [], tf.as_dtype(values.dtype))
    found.set_shape(values.shape)
    return found


def _map_weight(reader: Any, key: str, pages: Path) -> NDArray[np.generic]:
    """Maps the file of a weight; the first process writes it."""
    shape = reader.get_variable_to_shape_map()[key]
    dtype = reader.get_variable_to_dtype_map()[key].as_numpy_dtype
    if dtype is object or int(np.prod(shape)) * np.dtype(dtype).itemsize < SHARED_BYTES:
        return reader.get_tensor(key)
    file = pages / f"{key.replace('/', '_')}.bin"
    with hold_file_lock(pages / ".lock"):
        if not file.exists():
            with atomic_file(file, durable=False) as unfinished:
                reader.get_tensor(key).tofile(unfinished)
    # A write would go to a copy of the page, and nothing writes.
    return np.memmap(file, dtype, "c", shape=tuple(shape))


def _rewrite_gathers(function: function_pb2.FunctionDef) -> None:
    """Makes each gather from a variable one from its value; changes the function."""
    for node in [one for one in function.node_def if one.op == "ResourceGather"]:
        dtype, indices = node.attr["dtype"].type, node.attr["Tindices"].type
        batch_dims, name, device = node.attr["batch_dims"].i, node.name, node.device
        handle, positions, *controls = node.input
        read = function.node_def.add(
            name=f"{node.name}/read", op="ReadVariableOp", input=[handle, *controls]
        )
        read.attr["dtype"].type = dtype
        axis = function.node_def.add(name=f"{node.name}/axis", op="Const")
        axis.attr["dtype"].type = types_pb2.DT_INT32
        axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(batch_dims, tf.int32))
        node.Clear()
        node.name, node.op, node.device = name, "GatherV2", device
        node.input.extend([f"{read.name}:value:0", positions, f"{axis.name}:output:0", *controls])
        node.attr["Tparams"].type, node.attr["Tindices"].type = dtype, indices
        node.attr["Taxis"].type = types_pb2.DT_INT32
        node.attr["batch_dims"].i = batch_dims
