"""What a graph would do on a GPU, by TensorFlow's list of kernels: no GPU is needed to know it.

The wheel for Linux registers its kernels for GPUs where there is no card. A kernel says which of
its arguments lie in the host's memory: one that is computed on the device is copied there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.python.framework import kernels, op_def_registry

# The clock; the rows of two tiers, which lie in the host's memory.
OF_HOST = frozenset({"Timestamp", "PyFunc", "EagerPyFunc"})
BATCH_NUMBERS = 16  # A tensor of more numbers grows with the batch, or the catalogue.
_CALLS = ("body", "cond", "then_branch", "else_branch", "f")
# They start no kernel: they pass tensors on, or look at shapes, which the host knows.
_FREE = frozenset(
    {"Const", "ExpandDims", "Identity", "IdentityN", "If", "IteratorGetNext", "NoOp", "Placeholder",
     "PreventGradient", "Rank", "ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Squeeze",
     "StatelessIf", "StatelessWhile", "StopGradient", "VarHandleOp", "While"}
)  # fmt: skip
_ON_HOST = (tf.int32, tf.string, tf.resource, tf.variant)


@dataclass
class StepOps:
    """Kernels that a step starts, collectives, copies to the host, and ops without a kernel."""

    launches: int = 0
    collectives: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    of_batch: Counter[str] = field(default_factory=Counter)
    without_kernel: Counter[str] = field(default_factory=Counter)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the trainer take the branches that it takes where there is one GPU."""
    gpu = tf.config.PhysicalDevice("/device:GPU:0", "GPU")
    for kind in ("list_physical_devices", "list_logical_devices"):
        real = getattr(tf.config, kind)
        monkeypatch.setattr(
            tf.config, kind, lambda asked=None, real=real: [gpu] if asked == "GPU" else real(asked)
        )


def list_types(node: NodeDef) -> tuple[tuple[str, int], ...]:
    """Returns the types of an op, by argument, as constraints of kernels name them."""
    attributes = node.attr.items()
    return tuple(sorted((n, a.type) for n, a in attributes if a.WhichOneof("value") == "type"))


@cache
def find_kernel(
    op: str, types: tuple[tuple[str, int], ...], device: str = "GPU"
) -> frozenset[str] | None:
    """Returns the arguments that a kernel has in the host's memory; None: there is no kernel."""
    given = dict(types)
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        allowed = {one.name: one.allowed_values.list.type for one in kernel.constraint}
        fits = all(not types or given.get(name) in types for name, types in allowed.items())
        if kernel.device_type in (device, "DEFAULT") and not kernel.label and fits:
            return frozenset(kernel.host_memory_arg)
    return None


def list_unserved(directory: Path) -> set[str]:
    """Returns the ops of a SavedModel that have no kernel for their types on a CPU."""
    saved = SavedModel.FromString((directory / "saved_model.pb").read_bytes())
    found = set()
    for graph in (meta.graph_def for meta in saved.meta_graphs):
        functions = {function.signature.name for function in graph.library.function}
        nodes = [*graph.node, *(n for each in graph.library.function for n in each.node_def)]
        for node in nodes:
            if node.op not in functions:
                # A file leaves attributes out that have their default.
                defaults = {a.name: a.default_value.type for a in op_def_registry.get(node.op).attr}
                types = {**{n: t for n, t in defaults.items() if t}, **dict(list_types(node))}
                if find_kernel(node.op, tuple(sorted(types.items())), "CPU") is None:
                    found.add(node.op)
    return found


def read_step(graph: Any, *, has_host: bool = True) -> StepOps:
    """Reads the ops of the loop of a graph's steps.

    Args:
        graph: That of the compiled steps.
        has_host: Whether ops that are placed on `CPU:0` run on the host; not where replicas do.
    """
    found = StepOps()
    for op in _walk(graph, in_step=False):
        kernel = _kernel_of(op)
        if kernel is None:
            if op.type not in OF_HOST:
                found.without_kernel[_describe(op)] += 1
            continue
        is_host = has_host and "CPU" in op.device
        outputs = _name(op.op_def.output_arg, op, op.outputs)
        on_device = not outputs or any(name not in kernel for name, _ in outputs)
        found.launches += op.type not in _FREE and on_device and not is_host
        found.collectives += op.type.startswith("Collective")
        for name, tensor in _name(op.op_def.input_arg, op, op.inputs):
            if (name in kernel or is_host) and not _is_on_host(tensor):
                found.copies[_describe(op)] += 1
                found.of_batch[_describe(op)] += _is_of_batch(tensor)
    found.of_batch = +found.of_batch
    return found


def _walk(graph: Any, *, in_step: bool) -> Iterator[Any]:
    for op in graph.get_operations():
        # What is compiled as one kernel needs none for each of its ops.
        if not ("_XlaMustCompile" in op.node_def.attr and op.get_attr("_XlaMustCompile")):
            for key in (key for key in _CALLS if key in op.node_def.attr):
                inner = graph._get_function(op.node_def.attr[key].func.name).graph
                yield from _walk(inner, in_step=in_step or op.type.endswith("While"))
        if in_step and op.type not in ("Const", "Placeholder", "NoOp"):
            yield op


def _kernel_of(op: Any) -> frozenset[str] | None:
    return find_kernel(op.type, list_types(op.node_def))


def _name(arguments: Any, op: Any, tensors: Sequence[Any]) -> list[tuple[str, Any]]:
    names: list[str] = []
    for one in arguments:
        count = op.get_attr(one.number_attr) if one.number_attr else 1
        count = len(op.get_attr(one.type_list_attr)) if one.type_list_attr else count
        names += [one.name] * count
    return list(zip(names, tensors, strict=True))


def _is_on_host(tensor: Any) -> bool:
    op = tensor.op
    if tensor.dtype == tf.resource or op.type == "Const" or "CPU" in op.device:
        return True
    if op.type == "Placeholder" or op.type.endswith(("If", "While", "PartitionedCall")):
        return tensor.dtype in _ON_HOST
    if op.type in ("Identity", "StopGradient", "Reshape", "ExpandDims", "Squeeze"):
        return _is_on_host(op.inputs[0])
    if op.type == "Cast" and op.inputs[0].op.type == "Const":
        return True
    kernel = _kernel_of(op)
    names = {id(found): name for name, found in _name(op.op_def.output_arg, op, op.outputs)}
    return kernel is None or names[id(tensor)] in kernel


def _is_of_batch(tensor: Any) -> bool:
    shape = tensor.shape
    return shape.rank != 0 and (
        not shape.is_fully_defined() or shape.num_elements() > BATCH_NUMBERS
    )


def _describe(op: Any) -> str:
    ours = [f for f in op.traceback or () if "/training/" in f.filename]
    ours = [f for f in ours if "/tests/" not in f.filename and "site-packages" not in f.filename]
    place = f"{ours[-1].filename.rpartition('/training/')[2]}:{ours[-1].lineno}" if ours else ""
    types = [tf.as_dtype(found).name for _, found in list_types(op.node_def)]
    return f"{op.type} of {', '.join(types)}, {place or op.name}"
