"""Errors that Spark raises, turned back into the error that caused them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from conf.errors import (
    ConfigError,
    InputDataError,
    InternalError,
    SluiceError,
    UpstreamNotReadyError,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

_CLASSES: tuple[type[SluiceError], ...] = (
    ConfigError,
    InputDataError,
    InternalError,
    UpstreamNotReadyError,
)
_RAISED = re.compile(
    r"conf\.errors\.(?P<name>\w+): (?P<text>.*?)"
    r"(?=\n\s*\n|\n\s+at |\n\s*SQLSTATE: |\n[A-Za-z_.]+(?:Error|Exception)\b|\Z)",
    re.DOTALL,
)
# A file that is gone or forbidden has a condition of its own.
_UNREADABLE = re.compile(
    r"\[FAILED_READ_FILE\.(?:NO_HINT|CANNOT_READ_FILE_FOOTER)\] "
    r"Encountered error while reading file (?P<path>\S+?)\.(?:\s|$)"
)
# SQL's class 22: a value that an expression cannot take, as of a cast or a division by 0; what
# `raise_error` and `assert_true` say, and patterns, have classes of Spark's own, or are Java's.
_OF_A_VALUE = re.compile(
    r"\[[A-Z][\w.]+\] (?P<value>[^\n]*?)\.? *SQLSTATE: (?:22\w{3}|P0001)"
    r"|\[INVALID_FORMAT\.\w+\] (?P<form>[^\n]*?)\.? *SQLSTATE: "
    r"|(?P<time>Fail to recognize '[^\n]*' pattern in the DateTimeFormatter)"
    r"|java\.util\.(?:regex\.)?\w*(?:PatternSyntax|Format)\w*Exception: (?P<java>[^\n]*)"
)

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'")
_OWN_PACKAGES = ("conf", "etl", "jobs", "training")


def describe_failure(error: BaseException) -> str:
    """Says in a line what Spark raised: the message of Java's error, not that there was one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        return lines[1].removeprefix(":").strip()
    return lines[0] if lines else type(error).__name__


@contextmanager
def known_failures() -> Iterator[None]:
    """Raises the cause of what Spark raises, where it is one of the known kinds."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        known = translate_failure(error)
        if known is None:
            raise
        raise known from error


def import_in_task(context: SparkContext) -> None:
    """Runs a task that imports what those of a write do, and says what its Python lacks."""
    with known_failures():
        context.parallelize([""], 1).foreach(_import_code)


def _import_code(_: str) -> None:
    import etl.tfrecord.spark.write_task  # noqa: F401


def translate_failure(error: BaseException) -> SluiceError | None:
    """The error to show the user for one that came through Spark; None: the cause is not known."""
    text = str(error)
    raised = _RAISED.search(text)
    if raised:
        for cls in _CLASSES:
            if cls.__name__ == raised["name"]:
                return cls(raised["text"].strip())
    unreadable = _UNREADABLE.search(text)
    if unreadable:
        causes = [line.strip() for line in text.splitlines() if line.startswith("Caused by:")]
        return InputDataError(
            "an input file is damaged: Spark cannot read it to its end",
            received=": ".join(
                [unreadable["path"], *(c.removeprefix("Caused by: ") for c in causes[-1:])]
            ),
            fix="write the file anew, or take it out of the source's path; nothing was published",
        )
    if of_a_value := _OF_A_VALUE.search(text):
        return InputDataError(
            f"Spark cannot evaluate a row: {of_a_value[of_a_value.lastgroup or 0]}",
            fix="correct the value, or write in `events.where` what gives null for it, such as "
            "try_cast, try_divide or nullif; nothing was published",
        )
    if "java.lang.StackOverflowError" in text and "java.util.regex" in text:
        return InputDataError(
            "a line is too long for the regular expression that it is matched with",
            fix="write sources.<name>.pattern without a group under * or +: [^,]*+ for (a|b)*",
        )
    missing = _MISSING_MODULE.search(text)
    if missing:
        return _refuse_worker(missing["name"])
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return InternalError(
            "the disk is full",
            received="No space left on device",
            fix="free some space, or set output.root and spark.local.dir to another disk; what "
            "was published before is untouched",
        )
    if "java.lang.OutOfMemoryError" in text:
        return InternalError(
            "Spark ran out of memory",
            fix="raise spark.driver_memory (local) or the executors' memory (cluster)",
        )
    return None


def _refuse_worker(module: str) -> ConfigError:
    """Says what the Python of Spark's workers lacks: Sluice's code, or a package that it needs."""
    package = module.partition(".")[0]
    received = f"No module named {module!r} in a task"
    if package in _OWN_PACKAGES:
        return ConfigError(
            "the Python of Spark's executors cannot import Sluice",
            received=received,
            allowed="Sluice as an archive, or installed there",
            fix="give spark-submit --py-files sluice.zip",
        )
    return ConfigError(
        f"the Python of Spark's executors cannot import {package!r}",
        received=received,
        allowed="numpy, numba and pyarrow; for training what the extra `training` brings",
        fix=f"install {package} where PYSPARK_PYTHON points, or ship an environment by --archives",
    )
