"""What Spark wraps comes back as the error that caused it."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError, InputDataError, InternalError
from etl.tfrecord.spark.failures import describe_failure, known_failures, translate_failure

REGEX = "\tat java.base/java.util.regex.Pattern$Loop.match(Pattern.java:4898)"
NO_MODULE = "pyspark.errors.PythonException: ...\nModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (f"{NO_MODULE} 'etl.tfrecord.spark'", ConfigError, "--py-files"),
        (f"{NO_MODULE} 'numba'", ConfigError, "cannot import 'numba'"),
        ("java.io.IOException: No space left on device", InternalError, "disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded: 'x'", InternalError, "disk is full"),
        ("java.lang.OutOfMemoryError: Java heap space", InternalError, "out of memory"),
        # By its text: Spark ends the process of such a task.
        (f"java.lang.StackOverflowError\n{REGEX}", InputDataError, "too long"),
    ],
)
def test_failures_are_known_by_their_text(text, error, says):
    found = translate_failure(RuntimeError(text))
    assert isinstance(found, error)
    assert says in found.render()
    assert translate_failure(RuntimeError("java.lang.StackOverflowError\n\tat x")) is None


def test_a_file_that_does_not_read_to_its_end_is_refused(spark, tmp_path):
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    spark.range(1000).coalesce(1).write.parquet(str(tmp_path / "in"))
    (file,) = (tmp_path / "in").glob("*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(len(content) // 2) + content[100 + len(content) // 2 :])
    (tmp_path / "in" / f".{file.name}.crc").unlink()
    with pytest.raises((PySparkException, Py4JError)) as raised:
        spark.read.parquet(str(tmp_path / "in")).collect()
    found = translate_failure(raised.value)
    assert isinstance(found, InputDataError)
    assert file.name in str(found)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("cast(text as int) > 1", "'abc'"),
        ("1 / number > 0", "Division by zero"),
        ("9223372036854775807 + number + 1 > 2", "overflow"),
        ("array(1)[number + 5] > 1", "index 5"),
        ("regexp_extract(text, '(a', 1) = 'a'", "'(a'"),
        ("assert_true(number > 1) is null", "is not true"),
        # Java's words where the expression is compiled, Spark's where it is interpreted.
        ("text rlike concat('(', text)", "'(abc'|Unclosed group"),
        ("format_string('%d', text) = 'a'", "d != "),
        ("date_format(timestamp_seconds(number), 'YYYY') = '1970'", "'YYYY'"),
        (r"text like concat('a\\', text)", "escape character"),
        ("to_number(text, '99') = 1", "does not match the format"),
    ],
)
@pytest.mark.parametrize("in_python", [False, True])
def test_what_rows_alone_can_show_is_an_input_that_is_refused(spark, condition, says, in_python):
    """Whatever stands in a condition: two lines, and the exit code of refused input."""
    rows = spark.createDataFrame([("abc", 0)] * 3, "text string, number long").where(condition)
    if in_python:
        rows = rows.select("number").mapInArrow(lambda batches: batches, "number long")
    with pytest.raises(InputDataError) as refused, known_failures():
        rows.collect()
    assert any(words in str(refused.value) for words in says.split("|"))
    assert len(refused.value.render().splitlines()) == 2
    assert "SQLSTATE" not in str(refused.value)


def test_a_line_says_what_java_said():
    wrapped = "An error occurred while calling o1.load.\n: java.io.IOException: Not a file\n\tat x"
    assert describe_failure(RuntimeError(wrapped)) == "java.io.IOException: Not a file"
    assert describe_failure(RuntimeError("\nno such table\nmore")) == "no such table"
    assert describe_failure(RuntimeError()) == "RuntimeError"


def test_error_raised_in_a_real_task_comes_back(spark):
    from pyspark.errors import PySparkException

    def fail(batches):
        raise InputDataError("row 3 is bad", received=3, fix="mend it")
        yield from batches

    with pytest.raises(PySparkException) as raised:
        spark.range(1).mapInArrow(fail, "id long").collect()
    found = translate_failure(raised.value)
    assert isinstance(found, InputDataError)
    assert str(found) == "row 3 is bad\n  received: 3\n  fix:      mend it"
