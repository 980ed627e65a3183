"""The dependency rules between the packages, read from the sources and from a live import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import etl
from conf.errors import DISTRIBUTION
from jobs.support.run_app import EXTRAS

ROOT = Path(__file__).parents[2]
STDLIB = set(sys.stdlib_module_names)
PACKAGES = ("conf", "etl", "training", "jobs")
WIRE_FOR_TRAINING = tuple(f"etl.tfrecord.{m}" for m in ("codec.", "types.features", "types.parts"))
WIRE_PACKAGES = {"numpy", "numba", "llvmlite", "pyarrow", "conf", "etl"}
CONF_PURE = ("errors", "dates", "schema", "manifest", "paths", "run", "encoders", "operations")
TENSORFLOW = {"tensorflow", "keras"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_NAMES = {
    "faiss-cpu": "faiss",
    "hdfs-native": "hdfs_native",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "tensorflow-serving-api": "tensorflow_serving",
    "pyyaml": "yaml",
    "keras-rs": "keras_rs",
    "mlflow-skinny": "mlflow",
    "openlineage-python": "openlineage",
}
# Used beside Sluice, or by the name that uvicorn knows: nothing imports them.
TOOLS = {"httptools", "tensorboard", "uvloop"}


def modules(package: str) -> list[Path]:
    """The files of a package; those of `jobs/dags/` live in Airflow's environment, not in ours."""
    found = (ROOT / package).rglob("*.py")
    return sorted(path for path in found if path.parent != ROOT / "jobs" / "dags")


Imports = tuple[ast.Import | ast.ImportFrom, ...]


@cache
def read_imports(path: Path) -> tuple[Imports, Imports]:
    """The imports of a file, and those of them that are not for type checking only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return found, tuple(node for node in found if id(node) not in skipped)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, lazily or not, except for type checking only."""
    for node in read_imports(path)[1]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative imports hide the layers"
            yield node.module or ""


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", modules("conf"), ids=str)
def test_conf_imports_neither_side(path):
    allowed = STDLIB | {"conf"}
    if path.stem not in CONF_PURE:
        allowed |= {"pydantic", "yaml", "filelock"}
    if path.parent.name in ("storage", "artefacts"):
        allowed |= {"numpy", "pyarrow"}
    if path.parent.name == "storage":
        allowed |= EXTRA["stores"]
    assert {top(module) for module in imports_of(path)} <= allowed


@pytest.mark.parametrize("path", modules("etl"), ids=str)
def test_etl_knows_neither_tensorflow_nor_training_nor_jobs(path):
    assert not {top(m) for m in imports_of(path)} & (TENSORFLOW | {"training", "jobs"})


@pytest.mark.parametrize("path", modules("training"), ids=str)
def test_training_knows_the_wire_and_nothing_else_of_etl(path):
    for module in imports_of(path):
        assert top(module) not in {"pyspark", "jobs"}, module
        if top(module) == "etl":
            assert module.startswith(WIRE_FOR_TRAINING), module


@pytest.mark.parametrize("path", modules("etl/tfrecord"), ids=str)
def test_the_wire_needs_numpy_numba_and_pyarrow_alone(path):
    allowed = STDLIB | WIRE_PACKAGES
    if path.parent.name == "spark":
        allowed |= {"pyspark", "py4j"}
    if path.name == "table.py":
        allowed |= {"pandas"}
    imported = set(imports_of(path))
    assert {top(module) for module in imported} <= allowed
    assert not {m for m in imported if top(m) == "etl" and not m.startswith("etl.tfrecord.")}


@pytest.mark.parametrize("path", modules("jobs"), ids=str)
def test_each_job_takes_one_side(path):
    sides = {top(module) for module in imports_of(path)} & {"etl", "training"}
    assert len(sides) <= 1, sides


def test_every_own_module_that_is_imported_is_there():
    """Of tests and for type checking too: mypy lets imports pass that it does not find."""
    missing = []
    for path in (path for package in (*PACKAGES, "tests") for path in modules(package)):
        for node in read_imports(path)[0]:
            is_from = isinstance(node, ast.ImportFrom)
            named = [node.module or ""] if is_from else [alias.name for alias in node.names]
            for module in (name for name in named if top(name) in (*PACKAGES, "tests")):
                place = ROOT / module.replace(".", "/")
                if not (place.is_dir() or place.with_name(f"{place.name}.py").is_file()):
                    missing.append(f"{path.relative_to(ROOT)}: {module}")
    assert not missing


def test_no_job_hides_a_module_of_the_standard_library():
    # spark-submit puts the script's own folder first on the path.
    assert not {path.stem for path in (ROOT / "jobs").glob("*.py")} & STDLIB


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        ("etl", ["pyspark", "numba", "pyarrow", "numpy", "pydantic", "tensorflow"]),
        ("conf.load", ["pyspark", "tensorflow", "keras", "etl", "training"]),
        ("jobs.cli", ["pyspark", "tensorflow", "keras", "etl", "training"]),
        (
            "jobs.train, jobs.export, jobs.models, jobs.index, jobs.serve, jobs.compare",
            ["pyspark", "tensorflow", "keras", "etl", "numba", "pyarrow"],
        ),
        (
            "etl.encoders.pipeline, etl.quality.statistics, etl.tfrecord.codec.decode",
            ["tensorflow", "pyspark", "pandas", "pydantic"],
        ),
        ("etl.tfrecord", ["numba", "pyspark", "pandas", "pyarrow", "pydantic", "tensorflow"]),
        # Spark starts a process each to look a format up, to plan a read or write, to commit it.
        (
            "etl.tfrecord.spark.datasource, pyspark_tfrecord, etl.tfrecord.spark.frames",
            ["numba", "tensorflow", "pandas", "pydantic"],
        ),
        ("etl.build", ["tensorflow", "keras", "training"]),
        ("training, training.loop.plan", ["tensorflow", "keras", "pyspark"]),
        pytest.param(
            "training.loop.trainer, training.export.saved_model",
            ["pyspark", "py4j"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_live_imports_bring(modules, banned):
    code = (
        f"import sys, {modules}\n"
        f"print(sorted({{m.partition('.')[0] for m in sys.modules}} & set({banned!r})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


def declared(requirements: list[str]) -> set[str]:
    """Top-level modules of the distributions that a list of requirements names."""
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in requirements}
    return {IMPORT_NAMES.get(name, name) for name in names - {DISTRIBUTION}}


def third_party(packages: tuple[str, ...]) -> set[str]:
    found = {top(m) for package in packages for path in modules(package) for m in imports_of(path)}
    return found - STDLIB - set(PACKAGES) - {"sluice_recsys"}


BASE = declared(PROJECT["dependencies"])
EXTRA = {name: declared(given) for name, given in PROJECT["optional-dependencies"].items()}
WITH_COMMANDS = ("etl", "training", "sweep", "serve", "lineage", "mlflow", "stores")
SIDES = {
    "conf": EXTRA["stores"],
    "etl": EXTRA["etl"] | EXTRA["stores"],
    "training": EXTRA["training"] | EXTRA["sweep"] | EXTRA["mlflow"] | EXTRA["serve"],
}


@pytest.mark.parametrize("side", SIDES)
def test_all_that_a_side_imports_is_declared(side):
    assert third_party((side,)) <= BASE | SIDES[side]


def test_the_jobs_import_nothing_undeclared():
    assert third_party(("jobs",)) <= BASE.union(*EXTRA.values())


def test_all_that_is_declared_is_imported():
    used = BASE.union(
        *(
            EXTRA[name]
            for name in ("etl", "training", "sweep", "serve", "lineage", "mlflow", "stores", "jre")
        )
    )
    assert used - third_party(PACKAGES) == TOOLS
    benches = {top(m) for path in modules("tests/bench") for m in imports_of(path)}
    assert "psutil" in benches & EXTRA["dev"]


def test_the_command_line_knows_which_extra_brings_a_package():
    named = {name: {p for p, extra in EXTRAS.items() if extra == name} for name in EXTRA}
    for extra in WITH_COMMANDS:
        assert named[extra] == EXTRA[extra] - TOOLS, extra


READER = """
import sys
import training
training.open_batches
tops = {name.partition(".")[0] for name in sys.modules}
print(*sorted(tops & set(sys.argv[1:])))
"""


def test_the_reader_needs_what_its_extra_lists():
    """Also of what Sluice needs anyway: an image may hold the reader and these packages alone."""
    others = BASE.union(*EXTRA.values()) - EXTRA["dev"]
    done = subprocess.run(
        [sys.executable, "-c", READER, *sorted(others - {"pandas"})],  # which Arrow loads if it can
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert set(done.stdout.split()) == EXTRA["reader"]


def test_the_distribution_has_one_name():
    assert PROJECT["name"] == DISTRIBUTION


def test_training_exports_its_public_api():
    import training
    from training.checkpoint.restore import load_run
    from training.loop.trainer import Trainer

    assert (training.load_run, training.Trainer) == (load_run, Trainer)
    assert {"load_run", "Trainer"} <= set(training.__all__) <= set(dir(training))
    assert all(hasattr(training, name) for name in training.__all__)
    assert not hasattr(training, "no_such_name")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_circle_of_imports():
    paths = {dotted(path): path for package in PACKAGES for path in modules(package)}
    graph = {name: set(local_imports(path, paths)) - {name} for name, path in paths.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(paths)


def read_folders() -> dict[str, dict[str, tuple[str, str]]]:
    """Returns the folders that each folder imports, with a module and what it imports there."""
    paths = {dotted(path): path for package in PACKAGES for path in modules(package)}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for name, path in paths.items():
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found.setdefault(folder, {})
        for other in local_imports(path, paths):
            is_package = paths[other].name == "__init__.py"
            below = other if is_package else other.rpartition(".")[0]
            if below != folder:
                found[folder].setdefault(below, (name, other))
    return found


def test_folders_are_layers():
    """No two folders import each other, directly or in a longer circle."""
    folders = read_folders()
    try:
        list(TopologicalSorter(folders).static_order())
    except CycleError as error:
        circle = error.args[1][::-1]
        said = [f"{folders[a][b][0]} imports {folders[a][b][1]}" for a, b in pairwise(circle)]
        pytest.fail(f"folders in a circle: {' -> '.join(circle)}: {'; '.join(said)}")


def test_the_picture_of_the_layers_is_that_of_the_code():
    """`docs/architecture.md` lists the folders from bottom to top; each imports those above it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"[\w.]+", text.partition("<!-- layers -->")[2].partition("```")[2]
                       .partition("\n")[2].partition("```")[0])  # fmt: skip
    folders = read_folders()
    assert sorted(shown) == sorted(folders)
    place = {name: number for number, name in enumerate(shown)}
    wrong = [why for name, below in folders.items() for other, why in below.items()
             if place[other] > place[name]]  # fmt: skip
    assert not wrong


def local_imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, lazily or not."""
    for node in read_imports(path)[1]:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from {full if full in known else node.module or ""} & known.keys()
        else:
            yield from {alias.name for alias in node.names} & known.keys()


def test_the_public_functions_of_etl_are_imported_on_first_use():
    assert set(etl.__all__) <= set(dir(etl))
    for name in etl.__all__:
        function = getattr(etl, name)
        assert function.__name__ == name
        assert function is getattr(sys.modules[function.__module__], name)
    with pytest.raises(AttributeError, match="no attribute 'write_records'"):
        _ = etl.write_records  # type: ignore[attr-defined]


def test_every_public_name_of_the_wire_is_there():
    import etl.tfrecord as wire

    assert sorted(wire._MODULES) == wire.__all__ == sorted(wire.__all__)
    for name in wire.__all__:
        assert callable(getattr(wire, name)), name
        assert name in dir(wire)
    with pytest.raises(AttributeError, match="no attribute 'write_table_'"):
        _ = wire.write_table_
