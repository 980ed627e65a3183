"""DeepCTR's models in training, run by a Python that has DeepCTR; it imports nothing of Sluice.

Reads the shape of the batches as a line of JSON, then numbers of steps, a line each; answers each
with the CPU-seconds of the steps.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# What libraries print goes to standard error: the answers alone are read.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from deepctr.feature_column import DenseFeat, SparseFeat, VarLenSparseFeat  # noqa: E402
from deepctr.models import DIN, DeepFM  # noqa: E402


def build_deepfm(asked: dict[str, Any]) -> Any:
    """DeepFM over ids and numbers, without L2: it would touch the whole tables in each step."""
    columns = [
        SparseFeat(name, asked["vocabulary_size"], embedding_dim=asked["dim"])
        for name in asked["ids"]
    ]
    columns += [DenseFeat(name, 1) for name in asked["numbers"]]
    return DeepFM(
        columns,
        columns,
        dnn_hidden_units=tuple(asked["hidden_units"]),
        l2_reg_linear=0,
        l2_reg_embedding=0,
    )


def build_din(asked: dict[str, Any]) -> Any:
    """DIN over a history and a target of one table."""
    size, dim = asked["vocabulary_size"], asked["dim"]
    columns = [SparseFeat(name, size, embedding_dim=dim) for name in asked["ids"]]
    history = SparseFeat("hist_item", size, embedding_dim=dim, embedding_name="item")
    columns.append(VarLenSparseFeat(history, maxlen=asked["length"], length_name="hist_length"))
    return DIN(
        columns,
        ["item"],
        dnn_hidden_units=tuple(asked["hidden_units"]),
        dnn_activation="relu",
        att_hidden_size=tuple(asked["attention_units"]),
        l2_reg_embedding=0,
    )


def main() -> None:
    """Builds the model and its batches, then trains as many steps as each line asks for."""
    asked = json.loads(sys.stdin.readline())
    model = {"deepfm": build_deepfm, "din": build_din}[asked["network"]](asked)
    model.compile("adam", "binary_crossentropy")
    columns = dict(np.load(asked["batches"]))
    labels = columns.pop("label")
    if "history" in columns:
        columns["hist_item"] = columns.pop("history")
        columns["hist_length"] = (columns["hist_item"] > 0).sum(axis=-1)
    batches = tf.data.Dataset.from_tensor_slices((columns, labels)).repeat().prefetch(2)
    print("ready", file=ANSWERS, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        found = model.fit(batches, steps_per_epoch=int(line), epochs=1, verbose=0)
        if not np.isfinite(found.history["loss"][-1]):
            raise ArithmeticError("the loss is not finite: the figures would mean nothing")
        print(time.process_time() - start, file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
