"""How the suite's Javas start: options for short lives."""

from __future__ import annotations

import os

_VARIABLE = "SPARK_SUBMIT_OPTS"
# Ends what the user gave, for the processes below that find our options there too.
_MARK = "-Dsluice.tests=true"
_GIVEN = os.environ.get(_VARIABLE, "").partition(_MARK)[0]
# Parts of lines that Java and Spark write at each start, which nobody who runs a command shall see.
START_LINES = ("incubator", "log4j", "Setting default log level", "native-hadoop", " WARN ")
# Every Java that the suite starts lives for seconds, on data of kilobytes: the compiler for long
# runs took a third of its processor time and never paid.
_SHORT_LIFE = "-XX:TieredStopAtLevel=1"
# Classes come from Spark's own jars, and from its generator.
_UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


def set_options() -> None:
    """Tells every Spark that is started below this process from now on.

    The class path stays as it is, else Java would not read the archive of Spark's classes
    (`jobs.support.java_runtime`).
    """
    options = f"{_SHORT_LIFE} {_UNVERIFIED}"
    executors = f'"-Dspark.executor.defaultJavaOptions={options}"'
    os.environ[_VARIABLE] = f"{_GIVEN} {_MARK} {options} {executors}"
