"""Settings of the session: ours, but for what its user has said."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest
from pydantic import TypeAdapter, ValidationError
from pyspark import SparkConf

import sluice_recsys
from conf.etl.spark_session import SparkSettings, read_vocabulary_bytes
from etl.sources.session_settings import choose_partitions
from jobs.support import java_runtime, spark_session
from jobs.support.java_runtime import set_java_locale
from jobs.support.spark_session import java_options, set_fast_plans

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
PARTITIONS = "spark.sql.shuffle.partitions"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def test_the_zone_of_times_is_no_setting():
    with pytest.raises(ValidationError, match="is always UTC"):
        TypeAdapter(SparkSettings).validate_python({"sql.session.timeZone": "Asia/Tokyo"})


def test_the_bound_of_vocabularies_is_a_setting_of_its_own():
    assert read_vocabulary_bytes({}) == 256 << 20
    read = TypeAdapter(SparkSettings).validate_python
    assert read_vocabulary_bytes(read({"sluice": {"vocabularyBytes": 5}})) == 5
    for wrong in ("", "5m", 0, -1):
        with pytest.raises(ValidationError, match="positive whole number"):
            read({"sluice.vocabularyBytes": wrong})


def test_plans_are_fast_unless_the_user_says_else(spark):
    session = spark.newSession()
    session.conf.set(BYTES, "1000000")
    session.conf.unset("spark.sql.codegen.hugeMethodLimit")
    set_fast_plans(session, SparkConf(loadDefaults=False).set(BYTES, "1000000"))
    assert session.conf.get(BYTES) == "1000000"
    assert session.conf.get("spark.sql.codegen.hugeMethodLimit") == "8000"


def test_lists_are_handed_over_in_batches_of_rows_alone(spark):
    session = spark.newSession()
    session.conf.set(ROWS, "5000")
    frame = session.range(10_000, numPartitions=1).selectExpr("sequence(id, id + 49) as x")

    def sizes(given: SparkConf) -> list[int]:
        set_fast_plans(session, given)
        batches = frame.mapInArrow(
            lambda rows: (row.select([0]).slice(0, 1) for row in rows), frame.schema
        )
        return [batches.count()]

    session.conf.set(BYTES, "100000")
    assert sizes(SparkConf(loadDefaults=False).set(BYTES, "100000"))[0] > 10
    assert sizes(SparkConf(loadDefaults=False)) == [2]


@pytest.fixture
def java():
    """The Java that Spark is started with here; it need not be on the path."""
    return str(java_runtime.ensure_java() / "bin" / "java")


@pytest.mark.parametrize("given", ["", "-XX:+UseSerialGC", "-Dx=1 -XX:+UseG1GC"])
def test_java_starts_whatever_collector_the_environment_names(given, java, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", given)
    asked = [java, *java_options(), "-XX:+PrintFlagsFinal", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    flags = {line.split()[1]: line.split()[3] for line in done.stdout.splitlines() if "Use" in line}
    wanted = given.rpartition("+")[2] or "UseParallelGC"
    assert flags[wanted] == "true"


@pytest.mark.parametrize(("is_short", "level"), [(True, "1"), (False, "4")])
def test_java_of_short_work_compiles_lightly(is_short, level, java):
    asked = [java, *java_options(is_short), "-XX:+PrintFlagsFinal", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[3] for line in lines if line[1:2] == ["TieredStopAtLevel"]] == [level]


@pytest.mark.parametrize("given", ["C", "POSIX", "C.UTF-8"])
def test_java_reads_file_names_as_python_does(given, java, monkeypatch):
    monkeypatch.setenv("LC_ALL", given)
    set_java_locale()
    asked = [java, "-XshowSettings:properties", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "sun.jnu.encoding = UTF-8" in done.stderr


def test_errors_of_java_itself_reach_the_user():
    code = (
        "from jobs.support.spark_session import build_session\n"
        "build_session({'spark.master': 'local[1]'}, 'test')"
    )
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": "-Xssbad"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "Invalid thread stack size: -Xssbad" in done.stderr
    assert "Spark did not start" in done.stderr


def test_code_is_packed_whole_and_the_same_each_time(tmp_path):
    packed = [spark_session.pack_code(tmp_path / name) for name in ("a.zip", "b.zip")]
    assert packed[0].read_bytes() == packed[1].read_bytes()
    code = (
        "import conf.load, etl.tfrecord.spark.options, jobs.cli, sluice_recsys\n"
        "from conf.errors import read_code_version\n"
        "print(conf.load.__file__, conf.load.preset_names('etl')[0], read_code_version())"
    )
    first = "import sys; sys.path.insert(0, './a.zip')\n"  # as Spark's executors name it
    run = [sys.executable, "-I", "-c", first + code]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["./a.zip/conf/load.py", "a9a"]
    assert done.stdout.split()[2] != "unknown"
    listed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(sluice_recsys.MODULES) == set(listed["tool"]["setuptools"]["py-modules"])


@pytest.mark.parametrize(
    ("conf", "memory", "partitions"),
    [({}, "2g", None), ({"spark.driver.memory": "9g", PARTITIONS: "8"}, "9g", "8")],
)
def test_settings_of_a_config_are_those_of_its_session(conf, memory, partitions):
    settings = spark_session._settings(
        {"spark.master": "local[2]", **conf}, submitted=False, is_short=True
    )
    assert (settings["spark.driver.memory"], settings.get(PARTITIONS)) == (memory, partitions)


@pytest.mark.parametrize(
    ("master", "asked", "input_bytes", "chosen"),
    [
        ("local[2]", None, 10**12, "8"),
        ("local[2]", 3, None, "3"),
        ("yarn", None, 10_000, "8"),
        ("yarn", None, 64_000_000 * 20 + 1, "21"),
        ("spark://a:7077", None, 10**12, "200"),
        ("yarn", None, None, None),
        ("yarn", 500, 10**12, "500"),
    ],
)
def test_shuffles_have_partitions_by_the_machine_and_what_is_read(
    master, asked, input_bytes, chosen
):
    session = SimpleNamespace(
        conf=SimpleNamespace(getAll={}), sparkContext=SimpleNamespace(master=master)
    )
    settings = choose_partitions(session, input_bytes, asked)
    assert settings == ({} if chosen is None else {PARTITIONS: chosen})
    session.conf.getAll[PARTITIONS] = "50"
    assert choose_partitions(session, input_bytes, asked) == {}


SUBMITTED = """
import sys
from jobs.support.spark_session import build_session
asked = {"spark.sql.shuffle.partitions": sys.argv[1]} if int(sys.argv[1]) else {}
session = build_session(asked, "test", is_short=True)
print("partitions", session.conf.get("spark.sql.shuffle.partitions"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "asked", "partitions"),
    [([], 0, 8), ([], 5, 5), (["--conf", "spark.sql.shuffle.partitions=6"], 0, 6)],
)
def test_a_submitted_job_has_the_partitions_that_somebody_set(tmp_path, given, asked, partitions):
    script = tmp_path / "job.py"
    script.write_text(SUBMITTED)
    submit = Path(pyspark.__file__).with_name("bin") / "spark-submit"
    command = [submit, "--master", "local[1]", *given, script, str(asked)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert f"partitions {partitions}\n" in done.stdout, done.stderr[-2000:]


def test_an_update_of_counters_that_is_cut_off_prints_no_trace(spark, capfd):
    """As where Java and this process are sent SIGTERM together."""
    server = spark.sparkContext._accumulatorServer
    try:
        raise EOFError("a message that ends early")
    except EOFError:
        server.handle_error(None, ("here", 1))
    assert capfd.readouterr().err == ""


def test_workers_get_ready_beside_other_work(spark):
    warming = spark_session.warm_workers(spark)
    assert spark.range(5).count() == 5
    warming.join(600)
    assert not warming.is_alive()
    assert spark.sparkContext.statusTracker().getActiveJobsIds() == []


def test_java_reads_the_archive_of_its_own_spark_alone(tmp_path, monkeypatch):
    home = tmp_path / "java-home-1"
    (home / "lib").mkdir(parents=True)
    archive = java_runtime.find_archive(home)
    assert archive.parent == tmp_path
    for name in spark_session._JAVA_OPTIONS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert not any(java_runtime.ARCHIVE_OPTION in option for option in java_options())
    archive.touch()
    assert f"{java_runtime.ARCHIVE_OPTION}{archive}" in java_options()
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", f"{java_runtime.ARCHIVE_OPTION}/theirs")
    assert not any(java_runtime.ARCHIVE_OPTION in option for option in java_options())
    os.utime(home / "lib", ns=(1, 1))  # Another Java: its classes may differ.
    assert java_runtime.find_archive(home) != archive


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_archive_is_made_of_what_a_build_loads(tmp_path, monkeypatch):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    if home := environment.get("JAVA_HOME"):  # Of a session before: it lies in another cache.
        environment["JAVA_HOME"] = str(Path(home, "lib").resolve().parent)
    given = spark_session._JAVA_OPTIONS_VARIABLES
    installing = {name: value for name, value in environment.items() if name not in given}
    command = [sys.executable, "-m", "jobs.support.warm_java"]
    subprocess.run(command, env=installing, check=True, capture_output=True)
    (archive,) = (tmp_path / "sluice").glob("*.jsa")
    assert archive.stat().st_size > 50e6
    loaded = tmp_path / "loaded.log"
    code = (
        "from jobs.support.spark_session import build_session\n"
        "print(build_session({'spark.master': 'local[1]'}, 'test').range(3).count())"
    )
    # The suite's own Javas read it too.
    environment["SPARK_SUBMIT_OPTS"] += f" -Xlog:class+load:file={loaded}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == "3\n"
    assert loaded.read_text().count("shared objects file (top)") > 5000
