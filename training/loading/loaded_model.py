"""A SavedModel in memory, called by its signatures.

A session of its own holds the graph, the weights and the tables, and gives all of it back when it
ends: `tf.saved_model.load` leaves some fifty megabytes of functions with each load of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from training.loading.shared_weights import read_weights, restore_shared

INIT_OPERATION = "__saved_model_init_op"

Arrays = dict[str, np.ndarray]


class LoadedModel:
    """A SavedModel in memory.

    Args:
        directory: The SavedModel.
        pages: Directory of weights that processes share; None: each has a copy of its own.
        threads: Threads of one call; None: TensorFlow's choice.

    Attributes:
        signatures: As the SavedModel holds them, by name.
        inputs: Name and type of the inputs of each.
    """

    def __init__(
        self, directory: Path, pages: Path | None = None, threads: int | None = None
    ) -> None:
        self._directory = directory
        graph_of_model = read_graph(directory)
        self.signatures = list_signatures(graph_of_model)
        self.inputs = {name: _read_inputs(one) for name, one in self.signatures.items()}
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads or 0, inter_op_parallelism_threads=threads or 0
        )
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        with graph.as_default():
            _restore(self._session, graph_of_model, directory, pages)
        graph.finalize()
        self._calls = {
            name: self._session.make_callable(
                {key: info.name for key, info in sorted(one.outputs.items())},
                [one.inputs[key].name for key in self.inputs[name]],
            )
            for name, one in self.signatures.items()
        }

    def call(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Calls a signature, from any thread.

        Args:
            signature: One of `signatures`.
            inputs: Values by name; of the signature's types, or such as convert to them.

        Returns:
            The outputs by name; text as bytes.

        Raises:
            tf.errors.InvalidArgumentError: The graph refuses the inputs.
        """
        found: Arrays = self._calls[signature](*(inputs[name] for name in self.inputs[signature]))
        return found

    def read_weights(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yields name and values of each weight, as the SavedModel's file holds them."""
        yield from read_weights(self._directory)


def read_graph(directory: Path) -> meta_graph_pb2.MetaGraphDef:
    """Reads the graph that serves."""
    saved = saved_model_pb2.SavedModel.FromString((directory / "saved_model.pb").read_bytes())
    [found] = [graph for graph in saved.meta_graphs if "serve" in graph.meta_info_def.tags]
    return found


def list_signatures(
    graph: meta_graph_pb2.MetaGraphDef,
) -> dict[str, meta_graph_pb2.SignatureDef]:
    """Returns the signatures that may be called, by name."""
    return {n: s for n, s in graph.signature_def.items() if not n.startswith("__")}


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
    """Brings weights and tables into a session."""
    if pages is None:
        saver = tf.compat.v1.train.import_meta_graph(graph, clear_devices=True)
        if saver is not None:
            saver.restore(session, str(directory / "variables" / "variables"))
    else:
        restore_shared(session, graph, directory, pages)
    if INIT_OPERATION in graph.signature_def:
        assets = {
            asset.tensor_info.name: str(directory / "assets" / asset.filename)
            for asset in graph.asset_file_def
        }
        init = graph.signature_def[INIT_OPERATION].outputs[INIT_OPERATION].name
        session.run(init, assets)
