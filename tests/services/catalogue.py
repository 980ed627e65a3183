"""What `make test-all` tests against beside the packages of the environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from etl.records.jvm_connector import CONNECTOR_PACKAGE
from tests.services import recipes

_SPARK = version("pyspark")
# Of Spark's own release where the registry has it; else the last that works with it.
_AVRO = tuple(f"org.apache.spark:spark-avro_2.13:{spark}" for spark in (_SPARK, "4.1.1"))
_GCS = "github.com/fsouza/fake-gcs-server@v1.56.1"
# The last that runs on Node.js 20.
_AZURITE = "azurite@3.35.0"


@dataclass(frozen=True)
class Service:
    """A server or a peer.

    Attributes:
        name: Of its folder, and on the command line.
        variables: What tests find it by.
        pins: What is installed; another pin is another installation.
        install: Fills an empty folder; returns the variables' values.
    """

    name: str
    variables: tuple[str, ...]
    pins: tuple[str, ...]
    install: Callable[[Path], dict[str, str]]


def _locked(name: str, lock: str, program: str, variable: str) -> Service:
    pin = (recipes.HERE / lock).read_text(encoding="utf-8")
    made = partial(recipes.make_environment, lock, program, variable)
    return Service(name, (variable,), (pin,), made)


def _jars(name: str, variable: str, *choices: tuple[str, ...]) -> Service:
    pins = tuple(jar for jars in choices for jar in jars)
    return Service(name, (variable,), pins, partial(recipes.install_jars, choices, variable))


# The slowest come first.
SERVICES = (
    _locked("airflow", "airflow.lock", "python", "SLUICE_AIRFLOW"),
    _locked("torch", "torch.lock", "python", "SLUICE_TORCH_PYTHON"),
    _locked("tfx", "tfx.lock", "python", "SLUICE_TFX_PYTHON"),
    Service(
        "gcs",
        ("SLUICE_GCS_EMULATOR",),
        (_GCS,),
        partial(recipes.install_go, _GCS, "SLUICE_GCS_EMULATOR"),
    ),
    Service(
        "hdfs",
        ("SLUICE_HDFS_CLASSPATH",),
        recipes.HADOOP_JARS,
        recipes.install_hdfs,
    ),
    Service(
        "kerberos",
        ("SLUICE_KERBEROS_CLASSPATH",),
        recipes.KDC_JARS,
        recipes.install_kerberos,
    ),
    Service("browser", ("SLUICE_CHROMEDRIVER", "SLUICE_CHROMIUM"), ("1",), recipes.install_browser),
    Service(
        "azurite",
        ("SLUICE_AZURITE",),
        (_AZURITE,),
        partial(recipes.install_npm, _AZURITE, "azurite-blob", "SLUICE_AZURITE"),
    ),
    _locked("jax", "jax.lock", "python", "SLUICE_JAX_PYTHON"),
    _locked("moto", "moto.lock", "moto_server", "SLUICE_MOTO_SERVER"),
    _locked("mlflow", "mlflow.lock", "mlflow", "SLUICE_MLFLOW"),
    Service(
        "postgres",
        ("SLUICE_POSTGRES_HOME", "SLUICE_POSTGRES_JAR"),
        (recipes.POSTGRES_DRIVER,),
        recipes.install_postgres,
    ),
    _jars("connector", "SLUICE_CONNECTOR_JAR", (CONNECTOR_PACKAGE,)),
    _jars("avro", "SLUICE_AVRO_JAR", *((jar,) for jar in _AVRO)),
    Service(
        "lakes",
        ("SLUICE_DELTA_JARS", "SLUICE_ICEBERG_JARS", "SLUICE_LAKE_SPARK"),
        (recipes.LAKE_SPARK, *recipes.DELTA_JARS, *recipes.ICEBERG_JARS),
        recipes.install_lakes,
    ),
)
