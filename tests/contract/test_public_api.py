"""The examples of docs/guide/api.md run, in their order, and importing the API loads nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.cli import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "api.md"


def read_examples() -> dict[str, str]:
    """The code of the page by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    blocks = {
        heading: "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {heading: code for heading, code in blocks.items() if code}


EXAMPLES = read_examples()


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples that ran so far have defined, and the folder that they run in."""
    folder = tmp_path_factory.mktemp("api")
    assert main(["data", "generate", "--out", str(folder / "logs"), "--ratings", "4000"]) == 0
    return {"spark": spark, "folder": folder}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_examples_run(heading: str, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    code = EXAMPLES[heading].replace("/data/", f"{found['folder']}/")
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), found)
    assert CHECKS[heading](found)


CHECKS = {
    "TFRecord files without Spark": lambda found: (
        found["shard"].rows == 2 and found["users"].to_pydict() == {"user": [1, 2]}
    ),
    "TFRecord files with Spark": lambda found: (
        sum(shard.rows for shard in found["manifest"].shards) == 2
        and sorted(row.user for row in found["scores"].collect()) == [1, 2]
    ),
    "Building a dataset": lambda found: (
        found["built"].is_new and (found["built"].version / "manifest.json").exists()
    ),
    "Training your own Keras model": lambda found: (
        found["history"].history["loss"][1] < found["history"].history["loss"][0]
        and len(found["history"].history["val_auc"]) == 2
    ),
    "Loading a run": lambda found: (
        found["vectors"].shape[0] == 8
        and found["run"].config.fit.epochs == 1
        and [value.shape[0] for value in found["probabilities"].values()] == [8]
        and all(0.0 < p < 1.0 for p in found["probabilities"]["label"].numpy())
    ),
    "Training by the trainer alone": lambda found: (
        found["result"].epochs == 1 and (found["directory"] / "checkpoints").is_dir()
    ),
}


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("etl", ("pyspark", "numba", "tensorflow")),
        ("etl.tfrecord", ("pyspark", "numba", "pyarrow", "tensorflow")),
        pytest.param(
            "training",
            ("tensorflow", "keras", "numba", "pyspark"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_names_are_loaded_when_they_are_asked_for(package: str, banned: tuple[str, ...]) -> None:
    code = (
        f"import sys, {package} as package\n"
        f"print(set(package.__all__) <= set(dir(package)), set({banned!r}) & set(sys.modules))\n"
        "print(all(callable(getattr(package, name)) for name in package.__all__))\n"
        "try:\n    package.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.splitlines() == [
        "True set()",
        "True",
        f"module '{package}' has no attribute 'nothing'",
    ]


def test_the_page_names_the_whole_api() -> None:
    import etl
    import training

    text = PAGE.read_text(encoding="utf-8")
    for name in (*etl.__all__, *training.__all__):
        assert f"`{name}`" in text, name
    assert set(CHECKS) == set(EXAMPLES)
