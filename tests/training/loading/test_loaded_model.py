"""SavedModels in memory: the same answers as TensorFlow's own loader gives, weights shared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.export import ExportOptions
from conf.errors import InputDataError
from tests.training.serving.tiny_models import build
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.export.saved_model import write_export
from training.loading.loaded_model import LoadedModel
from training.serving.served_version import Loading, ServedVersion

ROWS, DIM = 200_000, 16
RANKER = {"kind": "ranking", "network": "deepfm", "embedding_dim": 16,
          "tasks": {"click": {"label": "label"}}}  # fmt: skip


class Table(tf.Module):
    """A table that is gathered from twice: by position, and by lists of positions."""

    def __init__(self, names: tuple[str, str] = ("table", "bias")) -> None:
        super().__init__()
        random = tf.random.Generator.from_seed(3)
        self.rows = tf.Variable(random.normal([ROWS, DIM]), name=names[0])
        self.bias = tf.Variable(random.normal([DIM]), name=names[1])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids"),
                                  tf.TensorSpec([None, None], tf.int64, "lists")])  # fmt: skip
    def score(self, ids: tf.Tensor, lists: tf.Tensor) -> dict[str, tf.Tensor]:
        one, many = tf.gather(self.rows, ids), tf.gather(self.rows, lists)
        return {"score": tf.einsum("rd,rld->rl", one + self.bias, many), "copy": one}


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table")
    made = Table()
    tf.saved_model.save(made, str(path), signatures={"score": made.score})
    return path


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    dataset = write_tiny_dataset(folder / "data", config=TinyConfig(users=50, items=80))
    trained = build(dataset, folder, "ranker", RANKER)
    return write_export(trained, ExportOptions(folder / "models"))


def draw(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {"ids": rng.integers(0, ROWS, count), "lists": rng.integers(0, ROWS, (count, 7))}


@pytest.mark.parametrize("is_shared", [False, True])
def test_answers_are_those_of_tensorflows_loader(table, tmp_path, is_shared) -> None:
    reference = tf.saved_model.load(str(table)).signatures["score"]
    model = LoadedModel(table, tmp_path if is_shared else None)
    for count in (1, 5, 300):
        inputs = draw(count)
        found = model.call("score", inputs)
        wanted = reference(**{name: tf.constant(v) for name, v in inputs.items()})
        assert list(found) == sorted(wanted)
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values.numpy())
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.call("score", {**draw(2), "ids": np.array([0, ROWS])})


def test_weights_are_shared_by_name_and_those_of_one_name_are_refused(
    table, version, tmp_path
) -> None:
    assert ServedVersion(version, Loading(pages=tmp_path / "export")).warm_up() > 0
    first, second = (LoadedModel(table, tmp_path / "pages") for _ in range(2))
    [file] = (tmp_path / "pages").glob("*.bin")
    weights = dict(first.read_weights())
    np.testing.assert_array_equal(np.fromfile(file, np.float32), weights["table"].ravel())
    found = [model.call("score", draw(3))["copy"] for model in (first, second)]
    np.testing.assert_array_equal(*found)
    made = Table(("same", "same"))
    tf.saved_model.save(made, str(tmp_path / "same"), signatures={"score": made.score})
    LoadedModel(tmp_path / "same").call("score", draw(3))
    with pytest.raises(InputDataError, match="one name"):
        LoadedModel(tmp_path / "same", tmp_path / "others")


MEASURE = """
import gc, sys
from pathlib import Path
import numpy as np
import psutil
from training.loading.loaded_model import LoadedModel
table, pages, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def load(is_called):
    model = LoadedModel(table, Path(pages) if pages else None)
    if is_called:
        model.call("score", {"ids": np.arange(5), "lists": np.arange(5)[:, None]})
    return psutil.Process().memory_info()
before = load(False)
for _ in range(times):
    gc.collect()
    after = load(bool(pages))
private = [info.rss - info.shared for info in (before, after)]
print(after.rss - before.rss, private[1] - private[0])
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_does_not_grow_by_loading_again_nor_by_gathers(table, version, tmp_path) -> None:
    """TensorFlow's own loader keeps some 50 MB of such a ranker with each load."""

    def measure(*arguments: str | Path) -> list[int]:
        command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return list(map(int, done.stdout.split()[-2:]))

    assert measure(version, "", "8")[0] < 40 << 20
    # A gather of its own would copy the table.
    assert measure(table, tmp_path, "1")[1] < ROWS * DIM
