"""How the suite's Javas start: options for short lives, and classes that are parsed once.

A Spark session loads some fifteen thousand classes. Read from an archive of the machine's own
Java (application class-data sharing), that takes a third of the time. `make test` makes the archive
before the tests; where there is none, they do without.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VARIABLE = "SPARK_SUBMIT_OPTS"
# Ends what the user gave, for the processes below that find our options there too.
_MARK = "-Dsluice.tests=true"
_GIVEN = os.environ.get(_VARIABLE, "").partition(_MARK)[0]
_WAIT_S = 120.0
# Parts of lines that Java and Spark write at each start, which nobody who runs a command shall see.
START_LINES = ("incubator", "log4j", "Setting default log level", "native-hadoop", " WARN ")
# Every Java that the suite starts lives for seconds, on data of kilobytes: the compiler for long
# runs took a third of its processor time and never paid.
_SHORT_LIFE = "-XX:TieredStopAtLevel=1"
# Classes come from Spark's own jars, and from its generator.
_UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


@functools.cache
def find_folder() -> Path:
    """Where this checkout keeps what its Javas share; a folder for this process, if it cannot.

    Its `conf` stands first on their class path, and stays empty: Java archives no class path that
    has a filled directory.
    """
    folder = ROOT / ".pytest_cache" / "java"
    try:
        (folder / "conf").mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="sluice-java-"))
        (folder / "conf").mkdir()
    return folder


def name_archive() -> Path:
    """The archive of this Java and this Spark, made or not."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    spark = importlib.util.find_spec("pyspark")
    parts = [Path(java).resolve()] if java else []
    parts += [Path(spark.origin).with_name("jars")] if spark and spark.origin else []
    told = "\n".join(f"{part} {part.stat().st_mtime_ns}" for part in parts)
    return find_folder() / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.jsa"


def set_options() -> None:
    """Tells every Spark that is started below this process from now on."""
    archive = name_archive()
    # Whoever changes the class path does without, and is not told on standard output.
    # Options are divided at blanks.
    is_usable = archive.exists() and " " not in str(archive)
    shared = f" -XX:SharedArchiveFile={archive} -Xlog:cds*=off" if is_usable else ""
    options = f"{_SHORT_LIFE} {_UNVERIFIED}{shared}"
    executors = f'"-Dspark.executor.defaultJavaOptions={options}"'
    os.environ[_VARIABLE] = f"{_GIVEN} {_MARK} {options} {executors}"
    os.environ["SPARK_CONF_DIR"] = str(find_folder() / "conf")


def make_archive(archive: Path) -> None:
    """Makes the archive when a session that has done a little of everything ends.

    Args:
        archive: Where it shall be; complete from the moment when it is there.
    """
    with tempfile.TemporaryDirectory(dir=find_folder()) as folder:
        made = Path(folder, "made.jsa")
        # Java archives verified classes only, and says on the way what it leaves out.
        options = f"{_SHORT_LIFE} -Xlog:disable -XX:ArchiveClassesAtExit={made}"
        os.environ[_VARIABLE] = f"{_GIVEN} {_MARK} {options}"
        os.environ["SPARK_CONF_DIR"] = str(find_folder() / "conf")
        _run_session(folder)
        if made.exists():
            made.rename(archive)


def _run_session(folder: str) -> None:
    """Uses Spark until its Java has ended."""
    from conf.etl.spark_session import SparkConfig
    from jobs.support.spark_session import build_session

    spark = build_session(SparkConfig(master="local[2]", shuffle_partitions=2), "classes")
    frame = spark.range(20).selectExpr("id", "id % 3 as k", "string(id) as s", "array(id) as l")
    frame.write.parquet(f"{folder}/parquet", partitionBy="k")
    frame.selectExpr("s", "string(k) as t").write.csv(f"{folder}/csv", sep=":")
    lines = spark.read.csv(f"{folder}/csv", sep=":", schema="s string, t string")
    spark.read.parquet(f"{folder}/parquet").join(lines, "s").createOrReplaceTempView("rows")
    found = spark.sql(
        """SELECT k, l, collect_list(s) OVER (PARTITION BY k ORDER BY id) AS h,
        row_number() OVER (PARTITION BY k ORDER BY id DESC) AS n, sha2(s, 256) AS d FROM rows"""
    ).cache()
    found.groupBy("k").agg({"n": "max", "h": "count"}).orderBy("k").collect()
    found.mapInArrow(lambda batches: batches, found.schema).count()
    process = spark.sparkContext._gateway.proc
    spark.stop()
    process.stdin.close()
    process.wait(_WAIT_S)


def main() -> None:
    """Makes the archive; of several processes at once, one."""
    from jobs.support.java_runtime import ensure_java

    archive = name_archive()  # by the machine's Java, as `set_options` finds it
    ensure_java()
    with (find_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            make_archive(archive)


if __name__ == "__main__":
    main()
