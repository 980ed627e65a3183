"""The same job under spark-submit, `python -m` and the console command: the same dataset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.paths import read_manifest, resolve_version
from jobs.support.spark_session import ensure_java
from tests.etl.logs import build_config, write_logs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_spark_submit_builds_what_python_builds(built, tmp_path):
    ensure_java()
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    file = tmp_path / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("spark-submit"),
            "--master",
            "local[2]",
            "--conf",
            "spark.ui.enabled=false",
            "--conf",
            "spark.sql.shuffle.partitions=3",
            ROOT / "jobs" / "build_dataset.py",
            file,
            "--log-format",
            "json",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    submitted = read_manifest(resolve_version(tmp_path / "datasets" / "small"))
    checksums = {s.path: s.crc32c for split in submitted.splits for s in split.shards}
    expected = built[0].manifest
    assert checksums == {s.path: s.crc32c for split in expected.splits for s in split.shards}
    assert json.loads(done.stdout.splitlines()[-1])["kept"] == dict(submitted.counts.kept)
