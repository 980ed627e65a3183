"""Paths as users give them: local ones, and directories of object stores."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from conf.errors import ConfigError, did_you_mean
from etl.tfrecord.connectors import ANONYMOUS, CONNECTORS, Settings, split_endpoint
from etl.tfrecord.storage import Storage

STORAGE_OPTION, STORAGE_PREFIX = "storage", "fs."

_ALIASES = {"s3a": "s3", "s3n": "s3"}
_SETTINGS = (ANONYMOUS, "endpoint_override", "region", "scheme")
STORAGE_OPTIONS = (STORAGE_OPTION, *(f"{STORAGE_PREFIX}{name}" for name in _SETTINGS))
_SECRETS = re.compile("key|secret|token|password|credential", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FROM_ENVIRONMENT = (
    "credentials come from the environment of driver and executors (AWS_ACCESS_KEY_ID, profiles, "
    "instance roles, GOOGLE_APPLICATION_CREDENTIALS): options are shown in plans and logs"
)


def split_storage_options(options: Mapping[str, str]) -> tuple[dict[str, str], Settings]:
    """Takes the settings of object stores out of data source options.

    Args:
        options: `fs.<setting>` each, or a JSON object in `storage`; names in any case.

    Returns:
        The other options, and the settings.

    Raises:
        ConfigError: An unknown setting, or one that holds a secret, whose value is not shown.
    """
    rest: dict[str, str] = {}
    settings: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() == STORAGE_OPTION:
            settings.update(_parse_storage(value))
        elif name.lower().startswith(STORAGE_PREFIX):
            settings[name[len(STORAGE_PREFIX) :].lower()] = value
        else:
            rest[name] = value
    return rest, check_settings(settings)


def _parse_storage(text: str) -> dict[str, str]:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise ConfigError(
            "TFRecord option 'storage' is no JSON object of strings",
            allowed='such as {"endpoint_override": "https://minio:9000", "region": "eu-west-1"}',
        )
    return data


def check_settings(settings: Mapping[str, str]) -> Settings:
    """Checks settings of an object store.

    Args:
        settings: `endpoint_override` (host and port, or a URL), `region`, `scheme`, and
            `anonymous`: `true` asks without credentials.

    Raises:
        ConfigError: An unknown setting, or one that holds a secret, whose value is not shown.
    """
    resolved: dict[str, str] = {}
    for name, value in settings.items():
        if _SECRETS.search(name) or "@" in value:
            raise ConfigError(
                f"no credentials in options: setting {name!r} is refused", fix=_FROM_ENVIRONMENT
            )
        if name not in _SETTINGS:
            raise ConfigError(
                f"unknown setting {name!r} of an object store",
                allowed=", ".join(f"{STORAGE_PREFIX}{n}" for n in _SETTINGS),
                fix=did_you_mean(name, _SETTINGS),
            )
        resolved[name] = value
    if resolved.get(ANONYMOUS, "true") not in ("true", "false"):
        raise ConfigError(
            f"setting {ANONYMOUS!r} of an object store",
            received=resolved[ANONYMOUS],
            allowed="true, false",
        )
    return tuple(sorted(split_endpoint(resolved).items()))


def find_scheme(path: str) -> str | None:
    """Scheme of a URI, in lower case and by its usual name; None for a plain path."""
    found = _SCHEME.match(path)
    return None if found is None else _ALIASES.get(found[1].lower(), found[1].lower())


def is_remote(path: str) -> bool:
    """Whether a path lies in an object store that can be reached."""
    return find_scheme(path) in CONNECTORS


def parse_storage(path: str, settings: Settings = ()) -> Storage:
    """Reads the URI of a directory or an object of an object store.

    Args:
        path: For example `s3a://bucket/data/train`; taken as it is, nothing is unescaped.
        settings: What `check_settings` returned.

    Raises:
        ConfigError: Credentials or parameters in the URI (it is not shown then), or no bucket.
    """
    scheme, _, rest = path.partition("://")
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise ConfigError(
            f"a {scheme}:// path holds more than a place: what stands before @ or behind ? is "
            "refused",
            allowed=f"{scheme}://<bucket>/<path>, settings as options fs.endpoint_override, "
            "fs.region, fs.scheme",
            fix=_FROM_ENVIRONMENT,
        )
    parts = [part for part in rest.split("/") if part]
    if not parts or rest.startswith("/") or {".", ".."} & set(parts):
        raise ConfigError(
            "no place in an object store",
            received=path,
            allowed=f"{scheme}://<bucket>/<path>, without . and ..",
        )
    return Storage(find_scheme(path) or "", "/".join(parts), settings)


def resolve_local_path(path: str) -> str:
    """Turns a plain path or a `file:` URI into an absolute local path.

    Args:
        path: As the user gave it.

    Raises:
        ConfigError: Another scheme, or a `file:` URI that names a host.
    """
    scheme = _SCHEME.match(path)
    local = path
    if scheme is not None and scheme[1].lower() == "file":
        local = re.sub(r"^file:(//(localhost)?(?=/))?", "", path, flags=re.IGNORECASE)
    if not path or (scheme is not None and local == path) or local.startswith("//"):
        raise ConfigError(
            "not a local path",
            received=_without_credentials(path) or "no path",
            allowed="a path such as /data/train, or file:///data/train; where shards are read and "
            "written also s3://, s3a:// and gs://, and hdfs:// for reading",
            fix="use one of these, or a file system that driver and executors share as a mount",
        )
    return str(Path(local).absolute())


def _without_credentials(path: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", path)


def parse_path(path: str, settings: Settings) -> tuple[str, Storage | None]:
    """Reads the path of a data set.

    Args:
        path: As the user gave it.
        settings: Of object stores.

    Returns:
        Absolute local path and None, or URI and its place in an object store.

    Raises:
        ConfigError: Another scheme, or a URI with more than a place in it.
    """
    if not is_remote(path):
        return resolve_local_path(path), None
    storage = parse_storage(path, settings)
    return storage.uri, storage


@dataclass(frozen=True)
class FileOpener:
    """Opens input files wherever they lie; picklable.

    Attributes:
        settings: Of the object stores among them.
    """

    settings: Settings = ()

    def __call__(self, path: str | Path) -> BinaryIO:
        """Opens a file for reading and seeking.

        Raises:
            OSError: It cannot be read.
        """
        if isinstance(path, str) and is_remote(path):
            return parse_storage(path, self.settings).open_input()
        return Path(path).open("rb", buffering=0)
