"""What a serving host does: SavedModels by TensorFlow alone, fed as `export.json` describes.

Run as a script: a request of JSON by standard input, the answers by standard output.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from typing import Any


def feed(about: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors of a signature's inputs from raw rows."""
    import tensorflow as tf

    fed = {}
    for item in about["inputs"]:
        null = item["null_token"]
        null = math.nan if null is None and item["dtype"].startswith("float") else null
        values = [row[item["column"]] for row in rows]
        if item["is_list"]:
            values = [list(value or []) for value in values]
            width = max(1, *map(len, values))
            pad = item["pad_token"]
            values = [value + [pad] * (width - len(value)) for value in values]
        else:
            values = [null if value is None else value for value in values]
        fed[item["name"]] = tf.constant(values, item["dtype"])
    return fed


def answer(path: str, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Outputs of a SavedModel by `signature/output`."""
    import tensorflow as tf

    with open(f"{path}/export.json") as file:
        card = json.load(file)
    signatures = tf.saved_model.load(path).signatures
    is_ranking = card["kind"] == "ranking"
    wanted = ["serving_default"] if is_ranking else ["user_embedding", "item_embedding"]
    return {
        f"{signature}/{key}": value.numpy().tolist()
        for signature in wanted
        for key, value in signatures[signature](**feed(card["signatures"][signature], rows)).items()
    }


def main() -> None:
    """Answers a request: `exports`, paths by name, and `rows`."""
    asked = json.load(sys.stdin)
    answers = {name: answer(path, asked["rows"]) for name, path in asked["exports"].items()}
    for package in ("conf", "etl", "training", "jobs"):
        assert package not in sys.modules
        assert importlib.util.find_spec(package) is None
    print(json.dumps(answers))


if __name__ == "__main__":
    # The environment of the tests has Sluice on its path; this process must not.
    sys.path[:] = [path for path in sys.path if not os.path.isdir(os.path.join(path, "training"))]
    main()
