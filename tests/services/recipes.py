"""How each server and peer gets into a folder: ordinary package clients, pinned versions.

A recipe is given an empty folder, fills it, and returns the variables by which tests find what is
in it. What it cannot do on this machine it says by `UnavailableError`: no test may need it then.
Debian's packages alone have no pinned version: its archive keeps the newest only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
HADOOP_JARS = (
    "org.apache.hadoop:hadoop-client-minicluster:3.5.0",
    "org.apache.hadoop:hadoop-client-api:3.5.0",
    "org.apache.hadoop:hadoop-client-runtime:3.5.0",
    # What the cluster's class is compiled against.
    "org.mockito:mockito-core:4.11.0",
    "junit:junit:4.13.2",
)
KDC_JARS = ("org.apache.hadoop:hadoop-minikdc:3.5.0",)
# Of one Spark, which is older than ours: table formats follow its releases by months.
LAKE_SPARK = "4.1.1"
DELTA_JARS = ("io.delta:delta-spark_2.13:4.3.0", "io.delta:delta-storage:4.3.0")
ICEBERG_JARS = ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",)
POSTGRES_DRIVER = "42.7.7"
_PATIENCE_S = 3600.0
_SAID_LINES = 3


class UnavailableError(Exception):
    """This machine cannot have it; the message says why."""


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a package client; returns what it printed.

    Raises:
        UnavailableError: The client is not on this machine, or failed.
    """
    program = str(command[0])
    if not shutil.which(program):
        raise UnavailableError(f"there is no `{program}` on this machine")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
    )  # fmt: skip
    if done.returncode:
        said = re.sub(r"\x1b\[\d*m", "", f"{done.stdout}\n{done.stderr}").splitlines()
        faults = [line for line in said if "error" in line.lower()] or said[-_SAID_LINES:]
        raise UnavailableError(f"`{program}` failed: {' / '.join(faults[:_SAID_LINES])[:600]}")
    return done.stdout


def make_environment(lock: str, program: str, variable: str, folder: Path) -> dict[str, str]:
    """A virtual environment of exactly what a lock file lists.

    Args:
        lock: Name of the lock file beside this module.
        program: Of the environment, which the variable names.
        variable: What tests find it by.
        folder: Where.
    """
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", "-r", HERE / lock, cwd=folder)
    return {variable: str(python.with_name(program))}


def install_go(module: str, variable: str, folder: Path) -> dict[str, str]:
    """A program from a Go module."""
    call("go", "install", module, cwd=folder, GOBIN=str(folder))
    return {variable: str(folder / module.split("@")[0].rsplit("/", 1)[1])}


def install_npm(package: str, program: str, variable: str, folder: Path) -> dict[str, str]:
    """A program from an npm package."""
    quiet = ("--no-fund", "--no-audit", "--loglevel=error")
    call("npm", "install", *quiet, "--prefix", folder, package, cwd=folder)
    return {variable: str(folder / "node_modules" / ".bin" / program)}


_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>t</groupId><artifactId>t</artifactId><version>1</version>
<dependencies>{dependencies}</dependencies></project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{0}</groupId><artifactId>{1}</artifactId><version>{2}</version>"
    "</dependency>"
)
_ALONE = "-DexcludeTransitive=true"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"


def copy_jars(coordinates: Iterable[str], folder: Path, is_transitive: bool = False) -> list[Path]:
    """Jars by their Maven coordinates (`group:artifact:version`), alone or with what they need."""
    dependencies = "".join(_DEPENDENCY.format(*name.split(":")) for name in coordinates)
    (folder / "pom.xml").write_text(_POM.format(dependencies=dependencies))
    options = [f"-DoutputDirectory={folder}", *([] if is_transitive else [_ALONE])]
    try:
        # What the registry lacked the last time is asked for again.
        call("mvn", "-U", "-q", "-B", "-f", folder / "pom.xml", _COPY, *options, cwd=folder)
    except UnavailableError as error:
        lacking = re.search(r"(\S+:jar:[^: ]+)(?: was not found| in )", str(error))
        reason = f"the Maven registry has no {lacking[1]}" if lacking else str(error)
        raise UnavailableError(reason) from None
    return sorted(folder.glob("*.jar"))


def install_jars(choices: Iterable[Iterable[str]], variable: str, folder: Path) -> dict[str, str]:
    """Jars for Spark, by commas.

    Args:
        choices: Coordinates; the first choice that the registry has all of.
        variable: What tests find them by.
        folder: Where.

    Raises:
        UnavailableError: The registry has none of the choices.
    """
    faults = []
    for jars in choices:
        try:
            return {variable: ",".join(map(str, copy_jars(jars, folder)))}
        except UnavailableError as error:
            faults.append(str(error))
    raise UnavailableError(faults[0])


def install_lakes(folder: Path) -> dict[str, str]:
    """Delta Lake and Iceberg, and the Spark that both are made for, as a folder of packages."""
    spark = folder / "spark"
    options = ("-q", "--no-deps", "--target", spark)
    call(sys.executable, "-m", "pip", "install", *options, f"pyspark=={LAKE_SPARK}", cwd=folder)
    found = {"SLUICE_LAKE_SPARK": str(spark)}
    for name, jars in (("DELTA", DELTA_JARS), ("ICEBERG", ICEBERG_JARS)):
        place = folder / name.lower()
        place.mkdir()
        found |= install_jars([jars], f"SLUICE_{name}_JARS", place)
    return found


def find_java_home() -> Path:
    """The JDK on this machine.

    Raises:
        UnavailableError: There is none.
    """
    # The product's own JAVA_HOME is a runtime without a compiler.
    places = [os.path.join(os.environ.get("JAVA_HOME", ""), "bin"), None]
    found = [shutil.which("javac", path=place) for place in places]
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise UnavailableError("there is no JDK on this machine (`javac`)")
    return Path(compiler).resolve().parents[1]


def install_hdfs(folder: Path) -> dict[str, str]:
    """Hadoop's cluster in one process."""
    jars = copy_jars(HADOOP_JARS, folder, is_transitive=True)
    return {"SLUICE_HDFS_CLASSPATH": os.pathsep.join(map(str, jars))}


def install_kerberos(folder: Path) -> dict[str, str]:
    """Hadoop's KDC for tests; its log goes where Hadoop's own does."""
    jars = copy_jars(KDC_JARS, folder, is_transitive=True)
    used = [str(jar) for jar in jars if not jar.name.startswith("slf4j-")]
    return {"SLUICE_KERBEROS_CLASSPATH": os.pathsep.join(used)}


def install_debian(packages: Iterable[str], folder: Path) -> None:
    """Packages of Debian, where this process may install them.

    Raises:
        UnavailableError: It may not.
    """
    wanted = " ".join(packages)
    if not shutil.which("apt-get") or os.geteuid():
        raise UnavailableError(f"to be installed by root: apt-get install {wanted}")
    call("apt-get", "update", "-qq", cwd=folder)
    options = ("-y", "-qq", "--no-install-recommends")
    # Another process may hold the lock of Debian's database.
    command = ("apt-get", "-o", "DPkg::Lock::Timeout=600", "install", *options, *wanted.split())
    call(*command, cwd=folder, DEBIAN_FRONTEND="noninteractive")


def _find_postgres() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return places[-1].parents[1] if places else None


def install_postgres(folder: Path) -> dict[str, str]:
    """Debian's server, and the JDBC driver."""
    home = _find_postgres()
    if home is None:
        install_debian(["postgresql", "postgresql-client"], folder)
        home = _find_postgres()
    if home is None:
        raise UnavailableError("Debian's package of PostgreSQL has no initdb")
    (jar,) = copy_jars([f"org.postgresql:postgresql:{POSTGRES_DRIVER}"], folder)
    return {"SLUICE_POSTGRES_HOME": str(home), "SLUICE_POSTGRES_JAR": str(jar)}


def install_browser(folder: Path) -> dict[str, str]:
    """Debian's Chromium and its driver."""
    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        install_debian(["chromium", "chromium-driver"], folder)
    return {
        "SLUICE_CHROMEDRIVER": shutil.which("chromedriver") or "",
        "SLUICE_CHROMIUM": shutil.which("chromium") or "",
    }
