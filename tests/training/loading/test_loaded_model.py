"""SavedModels in memory: the same answers as TensorFlow's own loader gives, weights shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.errors import InputDataError
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.loading.loaded_model import LoadedModel
from training.models.registry import build_model
from training.serving.models.served_version import Loading, ServedVersion

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
    config = TrainConfig.model_validate({"dataset": "d", "name": "ranker", "model": RANKER})
    manifest = read_manifest(dataset)
    built = build_model(config.model, manifest, 3)
    (folder / "run").mkdir()
    trained = TrainedModel(folder / "run", built, config, manifest, dataset)
    return write_export(trained, ExportOptions(folder / "models"))


def draw(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {"ids": rng.integers(0, ROWS, count), "lists": rng.integers(0, ROWS, (count, 7))}


@pytest.mark.parametrize("is_shared", [False, True])
def test_answers_are_those_of_tensorflows_loader(table, tmp_path, is_shared) -> None:
    reference = tf.saved_model.load(str(table)).signatures["score"]
    model = LoadedModel(table, tmp_path if is_shared else None)
    assert {name: spec.dtype for name, spec in model.inputs["score"].items()} == {
        "ids": tf.int64, "lists": tf.int64}  # fmt: skip
    for count in (1, 5, 300):
        inputs = draw(count)
        found = model.call("score", inputs)
        wanted = reference(**{name: tf.constant(v) for name, v in inputs.items()})
        assert list(found) == sorted(wanted)
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values.numpy())
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.call("score", {**draw(2), "ids": np.array([0, ROWS])})


def test_exports_answer_the_same_from_shared_pages(version, tmp_path) -> None:
    alone, shared = (ServedVersion(version, Loading(pages=p)) for p in (None, tmp_path))
    assert alone.warm_up() == shared.warm_up() > 0
    reference = tf.saved_model.load(str(version)).signatures
    assert set(alone.signatures) == set(reference)


def test_weights_are_shared_by_name_and_those_of_one_name_are_refused(table, tmp_path) -> None:
    first, second = (LoadedModel(table, tmp_path / "pages") for _ in range(2))
    [file] = (tmp_path / "pages").glob("*.bin")
    weights = dict(first.read_weights())
    np.testing.assert_array_equal(
        np.fromfile(file, np.float32).reshape(ROWS, DIM), weights["table"]
    )
    np.testing.assert_array_equal(
        first.call("score", draw(3))["copy"], second.call("score", draw(3))["copy"]
    )
    made = Table(("same", "same"))
    tf.saved_model.save(made, str(tmp_path / "same"), signatures={"score": made.score})
    LoadedModel(tmp_path / "same").call("score", draw(3))
    with pytest.raises(InputDataError, match="one name") as caught:
        LoadedModel(tmp_path / "same", tmp_path / "others")
    assert "--processes 1" in str(caught.value.fix)


MEASURE = """
import sys
from pathlib import Path
import numpy as np
from training.loading.loaded_model import LoadedModel
def read(): return {k: int(v.split()[0]) for k, _, v in (
    line.partition(":") for line in open("/proc/self/status")) if k in ("RssAnon", "VmRSS")}
table, pages, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
import gc
model = LoadedModel(table, Path(pages) if pages else None)
name = next(iter(model.inputs))
before = read()
for _ in range(times):
    model = None
    gc.collect()
    model = LoadedModel(table, Path(pages) if pages else None)
    if name == "score":
        model.call(name, {"ids": np.arange(5), "lists": np.arange(5)[:, None]})
print({k: v - before[k] for k, v in read().items()})
"""


def measure(model: Path, pages: Path | None, times: int) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, str(model), str(pages or ""), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1].replace("'", '"'))
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_does_not_grow_by_loading_again_nor_by_gathers(table, version, tmp_path) -> None:
    """TensorFlow's own loader keeps some 50 MB of such a ranker with each load."""
    assert measure(version, None, 8)["VmRSS"] < 40_000
    kib = ROWS * DIM * 4 // 1024
    assert measure(table, tmp_path, 1)["RssAnon"] < kib / 4  # A gather of its own would copy it.
