"""Weights of a SavedModel that all processes of a machine read from the same pages of memory.

Each large weight lies in a file of its own, which every process maps. A variable takes the mapped
pages as its value without a copy. TensorFlow copies them after all where a graph gathers rows from
the variable itself, so such operations are rewritten: read the variable, which costs nothing, and
gather from what was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, trackable_object_graph_pb2

from conf.errors import InputDataError
from conf.storage.atomic_output import atomic_file
from conf.storage.locks import hold_file_lock

SHARED_BYTES = 1 << 20
"""Smaller weights are copied: they are not worth a file."""
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def read_weights(directory: Path) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yields name and values of each weight of a SavedModel."""
    reader = _open(directory)
    for name, key in _list_keys(reader):
        yield name, reader.get_tensor(key)


def _open(directory: Path) -> Any:
    return tf.train.load_checkpoint(str(directory / "variables" / "variables"))


def _list_keys(reader: Any) -> list[tuple[str, str]]:
    """Lists name and key of the weights."""
    if not reader.has_tensor(_OBJECTS):
        return []
    objects = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor(_OBJECTS)
    )
    return [(one.full_name, one.checkpoint_key) for node in objects.nodes
            for one in node.attributes if one.name == "VARIABLE_VALUE"]  # fmt: skip


def restore_shared(
    session: tf.compat.v1.Session,
    graph: meta_graph_pb2.MetaGraphDef,
    directory: Path,
    pages: Path,
) -> None:
    """Imports a graph into the default one, and gives its variables their values.

    Args:
        session: Runs the graph.
        graph: That of the SavedModel; its gathers are rewritten.
        directory: The SavedModel.
        pages: Directory of this version's weights; those that are not there yet are written.

    Raises:
        InputDataError: Two weights have one name, so that it cannot be told which is which.
    """
    for function in graph.graph_def.library.function:
        rewrite_gathers(function)
    tf.compat.v1.train.import_meta_graph(graph, clear_devices=True)
    reader = _open(directory)
    keys = _list_keys(reader)
    if len(dict(keys)) != len(keys):
        names = [name for name, _ in keys]
        raise InputDataError(
            "two weights of the model have one name, and cannot be told apart when processes "
            "share them",
            received=f"{directory}: {next(name for name in names if names.count(name) > 1)}",
            fix="give each variable of the network a name, or serve with --processes 1",
        )
    key_of, assigned = dict(keys), []
    pages.mkdir(parents=True, exist_ok=True)
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type != "VarHandleOp":
            continue
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
    count = int(np.prod(shape))
    if dtype is object or count * np.dtype(dtype).itemsize < SHARED_BYTES:
        return reader.get_tensor(key)
    file = pages / f"{key.replace('/', '_')}.bin"
    with hold_file_lock(pages / ".lock"):
        if not file.exists():
            with atomic_file(file, durable=False) as unfinished:
                reader.get_tensor(key).tofile(unfinished)
    # A write would go to a copy of the page, and nothing writes.
    return np.memmap(file, dtype, "c", shape=tuple(shape))


def rewrite_gathers(function: function_pb2.FunctionDef) -> None:
    """Makes each gather from a variable one from its value; changes the function."""
    for node in [one for one in function.node_def if one.op == "ResourceGather"]:
        dtype, indices = node.attr["dtype"].type, node.attr["Tindices"].type
        batch_dims = node.attr["batch_dims"].i
        handle, positions, *controls = node.input
        read = function.node_def.add(
            name=f"{node.name}/read", op="ReadVariableOp", input=[handle, *controls]
        )
        read.attr["dtype"].type = dtype
        axis = function.node_def.add(name=f"{node.name}/axis", op="Const")
        axis.attr["dtype"].type = types_pb2.DT_INT32
        axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(batch_dims, tf.int32))
        gather = node_def_pb2.NodeDef(
            name=node.name,
            op="GatherV2",
            input=[f"{read.name}:value:0", positions, f"{axis.name}:output:0", *controls],
            device=node.device,
        )
        gather.attr["Tparams"].type, gather.attr["Tindices"].type = dtype, indices
        gather.attr["Taxis"].type = types_pb2.DT_INT32
        gather.attr["batch_dims"].i = batch_dims
        node.CopyFrom(gather)
