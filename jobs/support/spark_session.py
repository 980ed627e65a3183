"""The Spark session of the jobs: its settings, its code on executors, its workers."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import sluice_recsys
from conf.errors import (
    DISTRIBUTION,
    ConfigError,
    InternalError,
    read_code_version,
    was_interrupted,
)
from jobs.support.java_runtime import (
    ARCHIVE_OPTION,
    ensure_java,
    find_archive,
    set_java_locale,
    share_classes,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession


# See `etl.tfrecord.codec.kernels`; spelt out here, where nothing compiled is imported yet.
NO_JIT_CACHE_VARIABLE = "SLUICE_NO_JIT_CACHE"
# Set by spark-submit for the Python processes that it starts.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
# Options that Java takes from the environment, and those among them that choose a collector.
_JAVA_OPTIONS_VARIABLES = (
    "JAVA_TOOL_OPTIONS",
    "JDK_JAVA_OPTIONS",
    "_JAVA_OPTIONS",
    "SPARK_SUBMIT_OPTS",
)
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")
_LOG_CONFIG = Path(__file__).with_name("log4j2.properties").resolve()
# What Spark's defaults cost these jobs is in docs/performance.md.
FAST_PLANS = {
    # Below the greatest number Spark measures the batch anew for each row that it hands to Python,
    # which for lists takes time by the square of the batch. The bound on rows holds on.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    # Java never compiles a longer method: without this a parsed log runs in the interpreter.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # The events are kept for some passes, not for days: making them small costs more than they.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Lists are collected by user from rows that are sorted by user: no table of all users is built.
    "spark.sql.execution.useObjectHashAggregateExec": "false",
    # A join splits a shuffled partition of twice the median, not of five times, and from 64 MiB:
    # a key with some percent of the events would else keep one task busy alone.
    "spark.sql.adaptive.skewJoin.skewedPartitionFactor": "2",
    "spark.sql.adaptive.skewJoin.skewedPartitionThresholdInBytes": str(64 << 20),
}


SHORT_PARTITIONS = 2
"""Of a shuffle of short work, where each task costs more than the rows that it gets."""


def build_session(
    settings: Mapping[str, str], app_name: str, *, is_short: bool = False
) -> SparkSession:
    """Builds or joins the Spark session.

    Under spark-submit the cluster, memory and packages are the submitter's business: only what
    the job's correctness needs is set here, and what makes its plans fast where nobody says else.

    Args:
        settings: Those of a session that is started here, by Spark's names.
        app_name: Name shown by Spark.
        is_short: Whether the work is over before code that was compiled with care would pay.

    Raises:
        ConfigError: No Java runtime was found.
    """
    submitted = _SUBMITTED in os.environ
    if not submitted:
        ensure_java()
        set_java_locale()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    from etl.sources.session_settings import choose_partitions

    builder = SparkSession.builder.appName(app_name)
    for key, value in _settings(settings, submitted, is_short).items():
        builder = builder.config(key, value)
    # PySpark logs each failed query's context beside raising it, Py4J a trace beside each error.
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger", "py4j"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_py4j)
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM", RuntimeWarning)
    try:
        session = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise InternalError(
            "Spark did not start",
            received=str(error).splitlines()[0],
            fix="see the lines above; check Java and spark.driver.memory",
        ) from error
    if not submitted:
        # Every failure of a task reaches this process as an exception that says the same.
        session.sparkContext.setLogLevel("OFF")
        _quiet_accumulators(session.sparkContext)
        if not is_on_this_machine(_master(settings)):
            _ship_code(session.sparkContext)
    set_fast_plans(session, session.sparkContext.getConf())
    asked = SHORT_PARTITIONS if is_short and not submitted else None
    for key, value in choose_partitions(session, None, asked).items():
        session.conf.set(key, value)
    return session


def _quiet_accumulators(context: SparkContext) -> None:
    """Keeps PySpark from printing a trace where Java ends in the middle of an update of counters.

    The action that was running raises an error of its own.
    """
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        log = logging.getLogger("sluice")
        server.handle_error = lambda *_: log.debug("an update was cut off", exc_info=True)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether a record is to be shown: by the root logger Py4J logs a trace at Ctrl-C, and one
    beside the error that it raises where Java has ended.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_sending = record.msg == "Exception while sending command."
    return not (is_sending or (error is not None and was_interrupted(error)))


def warm_workers(session: SparkSession) -> threading.Thread:
    """Lets Spark's Python workers start, and import what a write needs, beside other work.

    Else the write waits for that, at the end of a build whose other stages need no Python. Spark
    ends workers that have been idle for a minute, so that this helps short builds alone.

    Args:
        session: A session on this machine.

    Returns:
        The thread that waits for them.
    """
    cores = session.sparkContext.defaultParallelism

    def warm() -> None:
        rows = session.range(0, cores, 1, cores)
        with suppress(Exception):  # Whoever needs the workers reports what is wrong with them.
            rows.mapInArrow(_import_in_worker, "id long").count()

    thread = threading.Thread(target=warm, daemon=True)
    thread.start()
    return thread


def _import_in_worker(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
    import etl.encoders.pipeline
    import etl.quality.statistics
    import etl.tfrecord.spark.write_task  # noqa: F401

    yield from batches


def check_executors(session: SparkSession) -> None:
    """Checks that tasks on other machines can import what those of a build and of training do.

    Said before any work: a build joins for long before it needs Python.

    Raises:
        ConfigError: The executors' Python lacks Sluice's code, or a package.
    """
    from etl.tfrecord.spark.failures import import_in_task

    if not is_on_this_machine(str(session.sparkContext.master)):
        import_in_task(session.sparkContext)


def check_work_dir(session: SparkSession, root: str) -> None:
    """Checks that executors on other machines can write where a build for a store works.

    Args:
        session: The session.
        root: `output.root`.

    Raises:
        ConfigError: `SLUICE_WORK_DIR` is not set, which names a directory that they share.
    """
    from conf.publication.working_copy import WORK_DIR_VARIABLE
    from conf.storage.locations import is_remote

    master = str(session.sparkContext.master)
    if is_remote(root) and not is_on_this_machine(master) and WORK_DIR_VARIABLE not in os.environ:
        raise ConfigError(
            "executors on other machines cannot write to the build's directory on this one",
            received=f"output.root {root}, master {master}, no {WORK_DIR_VARIABLE}",
            allowed="a directory that driver and executors share: the version is made there, and "
            "brought to the store whole",
            fix=f"set {WORK_DIR_VARIABLE} to one",
        )


def is_on_this_machine(master: str) -> bool:
    """Whether a master's tasks run in the driver's process."""
    return master.startswith("local")  # `local[…]`; `local-cluster[…]` has executors of its own


def _ship_code(context: SparkContext) -> None:
    """Sends Sluice's code to executors that have none, or one of another version."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-code-"))  # Spark serves the file from there
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context.addPyFile(str(pack_code(folder / "sluice.zip")))


def pack_code(archive: Path) -> Path:
    """Writes Sluice's own code as a zip file, which `--py-files` takes; returns the file.

    The same code gives the same bytes: executors look up what they have compiled by these.

    Args:
        archive: The file to write.
    """
    root = Path(sluice_recsys.__file__).parent
    name = f"{DISTRIBUTION.replace('-', '_')}-{read_code_version()}.dist-info/METADATA"
    metadata = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {read_code_version()}\n"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(zipfile.ZipInfo(name), metadata)
        for file in _list_code(root):
            entry = zipfile.ZipInfo(str(file.relative_to(root)))
            packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive


def _list_code(root: Path) -> list[Path]:
    files = [root / f"{module}.py" for module in sluice_recsys.MODULES]
    for package in sluice_recsys.PACKAGES:
        paths = sorted((root / package).rglob("*"))
        files += [file for file in paths if file.is_file() and file.parent.name != "__pycache__"]
    return files


def set_fast_plans(session: SparkSession, given: SparkConf) -> None:
    """Sets what makes the plans of these jobs fast, but for what has been set by somebody.

    Args:
        session: The session.
        given: What the application was started with.
    """
    for key, value in FAST_PLANS.items():
        if not given.contains(key):
            session.conf.set(key, value)


def _forwarded_environment() -> dict[str, str]:
    """Variables of this process that the executors' Python workers must see too."""
    value = os.environ.get(NO_JIT_CACHE_VARIABLE)
    return {} if value is None else {f"spark.executorEnv.{NO_JIT_CACHE_VARIABLE}": value}


def java_options(is_short: bool = False) -> list[str]:
    """Options of a Java that is started here: its pauses stop nobody, its work counts.

    Args:
        is_short: Whether its work is short: then compiling is most of it.
    """
    # Drivers of databases read times without a zone in Java's, where some hours do not exist.
    options = [f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()}", "-Duser.timezone=UTC"]
    given = " ".join(os.environ.get(name, "") for name in _JAVA_OPTIONS_VARIABLES)
    # Java refuses to start with two collectors.
    if not _COLLECTOR.search(given):
        options.append("-XX:+UseParallelGC")
    if is_short:
        options.append("-XX:TieredStopAtLevel=1")
    home = os.environ.get("JAVA_HOME")
    if home is not None and ARCHIVE_OPTION not in given:
        options += share_classes(find_archive(Path(home)))
    return options


_OF_SUBMITTER = ("spark.master", "spark.driver.memory")


def _master(settings: Mapping[str, str]) -> str:
    return settings.get("spark.master", "local[*]")


def _settings(given: Mapping[str, str], submitted: bool, is_short: bool) -> dict[str, str]:
    needed = {
        # Event times are instants; a laptop's zone must not shift them.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        **_forwarded_environment(),
        **given,
    }
    if submitted:
        return {name: value for name, value in needed.items() if name not in _OF_SUBMITTER}
    here = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    return {
        "spark.master": _master(given),
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": " ".join(java_options(is_short)),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        # Executors of other machines have to reach the driver.
        **(here if is_on_this_machine(_master(given)) else {}),
        **needed,
    }
