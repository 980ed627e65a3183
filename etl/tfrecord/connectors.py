"""How the file system of each kind of object store is reached: settings, environment, errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from pyarrow import fs

from conf.errors import ConfigError

Settings = tuple[tuple[str, str], ...]

ANONYMOUS = "anonymous"
# Google's client would go on for a quarter of an hour where nobody answers, or where it finds no
# credentials.
_RETRY_S = 60

_FIX = (
    "check name, region, endpoint and credentials; credentials come from the environment of "
    "driver and executors, in the way of the store's own tools"
)
# Java inside of this process would answer SIGTERM by ending it, before a run is saved.
_KEEP_SIGNALS = "-Xrs"
_FIX_HDFS = (
    "HDFS is reached through libhdfs: install a Hadoop client, and set for driver and executors "
    "JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR, the folder of libhdfs.so) and "
    "CLASSPATH=$(hadoop classpath --glob); name the NameNode's host and port, or a name service "
    "that the configuration on CLASSPATH knows"
)


def split_endpoint(settings: Mapping[str, str]) -> dict[str, str]:
    """Takes the scheme of an endpoint that is given as a URL apart, as `pyarrow.fs` wants it."""
    resolved = dict(settings)
    endpoint = re.fullmatch(r"(https?)://([^/]+)/?", resolved.get("endpoint_override", ""))
    if endpoint is not None:
        resolved.setdefault("scheme", endpoint[1])
        resolved["endpoint_override"] = endpoint[2]
    return resolved


def add_environment(scheme: str, settings: Settings) -> Settings:
    """Adds what the environment says of a store, unless the settings name an endpoint.

    Args:
        scheme: Of the store.
        settings: As the user gave them.

    Returns:
        The settings, with the endpoint of `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, or of
        `STORAGE_EMULATOR_HOST`, which is reached without credentials.
    """
    given = dict(settings)
    if "endpoint_override" in given:
        return settings
    found: dict[str, str] = {}
    if scheme == "s3":
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        found = split_endpoint({"endpoint_override": url}) if url else {}
    elif scheme == "gs" and (host := os.environ.get("STORAGE_EMULATOR_HOST")):
        url = host if "://" in host else f"http://{host}"
        found = {ANONYMOUS: "true", **split_endpoint({"endpoint_override": url})}
    return tuple(sorted({**found, **given}.items()))


def _connect_s3(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    given = dict(settings)
    if given.pop(ANONYMOUS, "false") == "false":
        return _connect(scheme, authority, tuple(given.items()))
    # Not to be said in a URI of S3.
    if "region" not in given and "endpoint_override" not in given:
        given["region"] = fs.resolve_s3_region(authority)
    return fs.S3FileSystem(anonymous=True, **given)


def _connect_gs(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    given = dict(settings)
    user = f"{ANONYMOUS}@" if given.pop(ANONYMOUS, "false") == "true" else ""
    given["retry_limit_seconds"] = str(_RETRY_S)
    return _connect(scheme, f"{user}{authority}", tuple(given.items()))


def _connect_hdfs(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    if not os.environ.get("CLASSPATH"):  # libhdfs would end the process in the middle of Java
        raise OSError("CLASSPATH names no Hadoop client")
    options = os.environ.get("LIBHDFS_OPTS", "").split()
    if _KEEP_SIGNALS not in options:
        os.environ["LIBHDFS_OPTS"] = " ".join([*options, _KEEP_SIGNALS])
    system = _connect(scheme, authority, settings)
    # A NameNode that does not answer looks like one that has nothing.
    if system.get_file_info("/").type != fs.FileType.Directory:
        raise OSError("the NameNode does not answer, or does not let this user look at /")
    return system


def _connect(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    query = f"?{urlencode(settings)}" if settings else ""
    file_system, _ = fs.FileSystem.from_uri(f"{scheme}://{authority}/{query}")
    return file_system


# How to reach the file system of each scheme; tests add one of their own.
CONNECTORS: dict[str, Callable[[str, str, Settings], fs.FileSystem]] = {
    "s3": _connect_s3,
    "gs": _connect_gs,
    "hdfs": _connect_hdfs,
}


def connect(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    """Builds the file system of a bucket or host.

    Args:
        scheme: `s3`, `gs` or `hdfs`.
        authority: Bucket, or host and port.
        settings: As `add_environment` returned them.

    Raises:
        ConfigError: The settings do not fit, or what reaches the store is not installed.
    """
    try:
        return CONNECTORS[scheme](scheme, authority, settings)
    except (OSError, ImportError, NotImplementedError, ValueError) as error:
        raise unreachable(f"{scheme}://{authority}", error) from error


def unreachable(uri: str, error: Exception) -> ConfigError:
    """Builds the error of a store that does not answer, or refuses."""
    lines = str(error).splitlines() or [repr(error)]
    return ConfigError(
        f"{uri} cannot be reached",
        received=lines[0],
        fix=_FIX_HDFS if uri.startswith("hdfs:") else _FIX,
    )
