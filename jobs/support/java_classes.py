"""Spark's classes, parsed once for all Javas of this machine (application class-data sharing).

A build loads some fifteen thousand classes, which takes several seconds of a core. Read from an
archive of the machine's own Java it takes a third of that. `python -m jobs.support.warm_java`
makes the archive, as `make install` does; where there is none, Java does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

ARCHIVE_OPTION = "-XX:SharedArchiveFile="


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
