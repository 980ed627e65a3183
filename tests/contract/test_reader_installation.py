"""The reader alone: Sluice without its dependencies, beside the packages of the extra `reader`."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.release import install_check
from tests.training.tiny_dataset import write_tiny_dataset
from training import open_dataset

ROOT = Path(__file__).parents[2]
READ = """
import hashlib, sys
from training import open_batches

digest, state = hashlib.sha256(), None
reader = open_batches(sys.argv[1], 48, seed=3, filter=[{"feature": "label", "value": 1}])
for batch in reader:
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
reader.restore(reader.state())
print(digest.hexdigest())
"""


def hash_dataset(version: Path) -> str:
    digest = hashlib.sha256()
    filters = [{"feature": "label", "value": 1}]
    for inputs, label in open_dataset(version, 48, seed=3, filter=filters):
        batch = {**inputs, "label": label}
        for name in sorted(batch):
            digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("uv"), reason="needs uv, which builds and installs")
def test_the_packages_of_the_extra_are_enough(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path / "dataset")
    environment = install_check.Environment(tmp_path)
    (tmp_path / "dist").mkdir()
    wheel, _ = install_check.build(tmp_path / "dist")
    python = environment.binaries / "python"
    install_check.call("uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    pip = ("uv", "pip", "install", "--quiet", "--python", python, "--no-deps")
    lock = ROOT / "requirements" / "reader.lock"
    install_check.call(*pip, "--require-hashes", "-r", lock)
    install_check.call(*pip, wheel)
    (tmp_path / "read.py").write_text(READ)
    done = environment.run(f"python read.py '{version}'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hash_dataset(version)
    packages = environment.run("ls venv/lib/python3*/site-packages").stdout.split()
    assert "numba" in packages
    assert not {"tensorflow", "keras", "pyspark", "typer", "matplotlib"} & set(packages)
