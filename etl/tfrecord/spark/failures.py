"""Errors that Spark raises, turned back into the error that caused them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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

_CLASSES: dict[str, type[SluiceError]] = {
    cls.__name__: cls for cls in (ConfigError, InputDataError, InternalError, UpstreamNotReadyError)
}
_RAISED = re.compile(
    r"conf\.errors\.(?P<name>\w+): (?P<text>.*?)"
    r"(?=\n\s*\n|\n\s+at |\n\s*SQLSTATE: |\n[A-Za-z_.]+(?:Error|Exception)\b|\Z)",
    re.DOTALL,
)


_NO_MODULE = "ModuleNotFoundError: No module named "
# By Spark's text; what the groups found is given on.
_KNOWN: tuple[tuple[str, Callable[[str], SluiceError]], ...] = (
    (
        # A file that is gone or forbidden has a condition of its own.
        r"(?s)\[FAILED_READ_FILE\.(?:NO_HINT|CANNOT_READ_FILE_FOOTER)\] Encountered error while "
        r"reading file (\S+?)\.(?:\s|$)(?:.*\n\s*Caused by: ([^\n]*))?",
        lambda said: InputDataError(
            "an input file is damaged: Spark cannot read it to its end",
            received=said,
            fix="write the file anew, or take it out of the source's path; nothing was published",
        ),
    ),
    (
        # SQL's class 22: a value that an expression cannot take, as of a cast or a division by 0;
        # what `raise_error` and `assert_true` say, and patterns, have classes of Spark's own, or
        # are Java's.
        r"\[[A-Z][\w.]+\] ([^\n]*?)\.? *SQLSTATE: (?:22\w{3}|P0001)"
        r"|\[INVALID_FORMAT\.\w+\] ([^\n]*?)\.? *SQLSTATE: "
        r"|(Fail to recognize '[^\n]*' pattern in the DateTimeFormatter)"
        r"|java\.util\.(?:regex\.)?\w*(?:PatternSyntax|Format)\w*Exception: ([^\n]*)",
        lambda said: InputDataError(
            f"Spark cannot evaluate a row: {said}",
            fix="correct the value, or write in `events.where` what gives null for it, such as "
            "try_cast, try_divide or nullif; nothing was published",
        ),
    ),
    (
        r"(?s)java\.lang\.StackOverflowError.*java\.util\.regex",
        lambda _: InputDataError(
            "a line is too long for the regular expression that it is matched with",
            fix="write sources.<name>.pattern without a group under * or +: [^,]*+ for (a|b)*",
        ),
    ),
    (
        rf"{_NO_MODULE}'((?:conf|etl|jobs|training)(?:\.[\w.]*)?)'",
        lambda said: ConfigError(
            "the Python of Spark's executors cannot import Sluice",
            received=f"No module named {said!r} in a task",
            allowed="Sluice as an archive, or installed there",
            fix="give spark-submit --py-files sluice.zip",
        ),
    ),
    (
        rf"{_NO_MODULE}'(\w+)[\w.]*'",
        lambda said: ConfigError(
            f"the Python of Spark's executors cannot import {said!r}",
            allowed="numpy, numba and pyarrow; for training what the extra `training` brings",
            fix=f"install {said} where PYSPARK_PYTHON points, or ship an environment by --archives",
        ),
    ),
    (
        r"FileNotFoundError: \[Errno 2\] ([^\n]*)",
        lambda said: InputDataError(
            "a file is gone since it was listed",
            received=said,
            fix="read anew: a view, and a frame, keep the files of their first read",
        ),
    ),
    (
        "No space left on device|Disk quota exceeded",
        lambda _: InternalError(
            "the disk is full",
            received="No space left on device",
            fix="free some space, or set output.root and spark.local.dir to another disk; what "
            "was published before is untouched",
        ),
    ),
    (
        r"java\.lang\.OutOfMemoryError",
        lambda _: InternalError(
            "Spark ran out of memory",
            fix="raise spark.driver.memory (local) or the executors' memory (cluster)",
        ),
    ),
)


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
    if raised and raised["name"] in _CLASSES:
        return _CLASSES[raised["name"]](raised["text"].strip())
    for pattern, build in _KNOWN:
        if found := re.search(pattern, text):
            return build(": ".join(filter(None, found.groups())))
    return None
