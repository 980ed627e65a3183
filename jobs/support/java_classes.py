"""Spark's classes, parsed once for all Javas of this machine (application class-data sharing).

A build loads some fifteen thousand classes, which takes several seconds of a core. Read from an
archive of the machine's own Java it takes a third of that. `python -m jobs.support.java_classes`
makes the archive, as `make install` does; where there is none, Java does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

ARCHIVE_OPTION = "-XX:SharedArchiveFile="
_SUBMIT_OPTIONS = "SPARK_SUBMIT_OPTS"
_WAIT_S = 180.0
_RATINGS = 3000
"""Of the log whose build loads the classes."""


def find_archive(java_home: Path) -> Path:
    """Returns where the archive of a Java and of this environment's Spark lies, made or not.

    Args:
        java_home: Home of the Java, as `ensure_java` gives it: the archive lies beside it.
    """
    spark = importlib.util.find_spec("pyspark")
    parts = [java_home / "lib"]  # of the wrapper's home: a link to the real one
    if spark is not None and spark.origin is not None:
        parts.append(Path(spark.origin).with_name("jars"))
    told = [f"{part.resolve()} {part.stat().st_mtime_ns}" for part in parts if part.exists()]
    name = hashlib.sha256("\n".join([str(java_home), *told]).encode()).hexdigest()[:16]
    return java_home.parent / f"spark-classes-{name}.jsa"


def share_classes(archive: Path) -> list[str]:
    """Returns the options by which a Java reads an archive; none where it is not there.

    A Java with another class path does without, and says nothing of it.
    """
    if not archive.is_file() or " " in str(archive):  # Options are divided at blanks.
        return []
    return [f"{ARCHIVE_OPTION}{archive}", "-Xlog:cds*=off"]


def make_archive(archive: Path) -> None:
    """Makes an archive, of the classes that the build of a small log loads.

    Args:
        archive: Where it shall be; complete from the moment when it is there.
    """
    from pyspark import SparkContext

    from conf.etl.build import BuildConfig
    from conf.load import load_config
    from etl.sample_data.config import SampleConfig
    from etl.sample_data.movielens import write_sample
    from etl.versions.run_fingerprint import RunRequest
    from jobs.build_dataset import build

    given = os.environ.get(_SUBMIT_OPTIONS, "")
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, "made.jsa")
        # Java says at its end which classes it leaves out.
        os.environ[_SUBMIT_OPTIONS] = f"{given} -Xlog:disable -XX:ArchiveClassesAtExit={made}"
        write_sample(SampleConfig(ratings=_RATINGS), Path(folder, "logs"))
        settings = [
            f"data_dir={folder}/logs",
            f"output.root={folder}/datasets",
            "split.validation_users=20",
        ]
        build(load_config(BuildConfig, "etl", "demo", settings), RunRequest())
        gateway: Any = SparkContext._gateway
        process = gateway.proc
        process.stdin.close()  # Its Java ends, and writes.
        process.wait(_WAIT_S)
        if made.exists():
            made.rename(archive)


def main() -> None:
    """Makes the archive of this machine's Java, unless it is there."""
    from jobs.support.spark_session import ensure_java

    archive = find_archive(ensure_java())
    if not archive.exists():
        make_archive(archive)


if __name__ == "__main__":
    main()
