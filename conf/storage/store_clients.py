"""Object stores and HDFS, each reached by the library that knows it, behind one small interface.

S3, Google Cloud Storage and Azure by `obstore`, which has conditional puts; HDFS by `hdfs_native`
(`conf.storage.hdfs_client`). Settings come from options, else from the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from conf.errors import ConfigError, install_hint
from conf.storage.store_interface import (
    Settings,
    StoreClient,
    StoredObject,
    Upload,
    Version,
    open_ranges,
)

if TYPE_CHECKING:
    pass

ANONYMOUS = "anonymous"
# The libraries would go on for some minutes where nobody answers.
_RETRY_S = 60
_RETRIES = 10
# A copy of some GB inside a store answers at its end.
_ANSWER_S = 600
# S3 takes 10,000 parts of an upload: objects of 78 GB.
_PART_BYTES, _PARTS_AT_A_TIME = 8 << 20, 2

_FIX = (
    "check name, region, endpoint and credentials, and renew what has expired; credentials come "
    "from the environment of driver and executors, in the way of the store's own tools"
)
_FIX_HDFS = (
    "name the NameNode's host and port, or a name service that core-site.xml and hdfs-site.xml in "
    "HADOOP_CONF_DIR know; the user is HADOOP_USER_NAME, else that of the process or, with "
    "Kerberos (set in core-site.xml too), of its ticket (kinit, or KRB5_CLIENT_KTNAME)"
)


@dataclass(frozen=True)
class _TranslatingUpload:
    """Ends in an `OSError` what the library's upload ends in an error of its own."""

    stream: Any

    def write(self, data: Any, /) -> object:
        with _translating():
            # A copy: the library keeps what it is given until the part goes out.
            return self.stream.write(bytes(memoryview(data)))

    def close(self) -> None:
        with _translating():
            self.stream.close()


_NO_KEY, _NO_BUCKET = "_sluice/no such key", re.compile("NoSuchBucket|ContainerNotFound")
_REASON = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    """Turns errors of `obstore`, which are no `OSError`, into one with the store's reason."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(_first_line(error)) from error
    except exceptions.BaseError as error:
        reason = _REASON.search(str(error))
        text = f"{reason[1]}: {' '.join(reason[2].split())}; " if reason else ""
        raise OSError(f"{text}{_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0].removesuffix(": ")


class ObstoreClient:
    """A bucket of S3 or Google, or a container of Azure."""

    def __init__(self, store: Any) -> None:
        import obstore

        self.store, self._api = store, obstore

    def head(self, path: str) -> StoredObject | None:
        try:
            with _translating():
                return _describe(self._api.head(self.store, path))
        except FileNotFoundError:
            return None
        except OSError:
            next(self.list_below(path), None)  # the answer to HEAD had no body with the reason
            raise

    def list_below(self, folder: str) -> Iterator[tuple[str, StoredObject]]:
        with _translating():
            for page in self._api.list(self.store, folder or None):
                for item in page:
                    if item["path"] != folder:
                        yield item["path"], _describe(item)

    def has_bucket(self) -> bool:
        """Whether the bucket is there: a listing of one that is not looks empty."""
        try:
            self.get(_NO_KEY)
        except FileNotFoundError as error:
            return not _NO_BUCKET.search(str(error))
        return True

    def list_folders(self, folder: str) -> Iterator[str]:
        with _translating():
            yield from self._api.list_with_delimiter(self.store, folder or None)["common_prefixes"]

    def get(self, path: str) -> tuple[bytes, Version]:
        with _translating():
            answer = self._api.get(self.store, path)
            named = {"e_tag": answer.meta["e_tag"], "version": answer.meta["version"]}
            data = bytes(answer.bytes())
        return data, {name: value for name, value in named.items() if value is not None}

    def open_input(self, path: str) -> BinaryIO:
        def fetch(start: int, length: int) -> Any:
            with _translating():
                return self._api.get_range(self.store, path, start=start, length=length)

        with _translating():
            size = self._api.head(self.store, path)["size"]
        return open_ranges(size, fetch)

    def put(self, path: str, data: bytes, over: Version | Literal["any"] | None) -> None:
        mode: Any = "create" if over is None else "overwrite" if over == "any" else dict(over)
        with _translating():
            self._api.put(self.store, path, data, mode=mode, use_multipart=False)

    def open_output(self, path: str) -> Upload:
        with _translating():
            return _TranslatingUpload(
                self._api.open_writer(
                    self.store, path, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME
                )
            )

    def move(self, source: str, target: str) -> None:
        """Copies an object inside the store: there are no renames."""
        with _translating():
            self._api.copy(self.store, source, target)

    def delete(self, path: str, within: str) -> None:
        with _translating(), contextlib.suppress(FileNotFoundError):
            self._api.delete(self.store, path)

    def move_folder(self, source: str, target: str) -> bool:
        """Does nothing: there are no renames."""
        return False

    def remove_folder(self, folder: str) -> bool:
        """Does nothing: a folder is but a part of names."""
        return False

    def remove_uploads(self, folder: str, held: str) -> None:
        """Does nothing: no listing shows them; a rule of the bucket ends them."""


def _describe(item: Mapping[str, Any]) -> StoredObject:
    return StoredObject(item["size"], int(item["last_modified"].timestamp() * 1e9))


def split_endpoint(settings: Mapping[str, str]) -> dict[str, str]:
    """Takes the scheme of an endpoint that is given as a URL apart."""
    resolved = dict(settings)
    endpoint = re.fullmatch(r"(https?)://(.+?)/?", resolved.get("endpoint_override", ""))
    if endpoint is not None:
        resolved.setdefault("scheme", endpoint[1])
        resolved["endpoint_override"] = endpoint[2]
    return resolved


_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}


def add_environment(scheme: str, settings: Settings) -> Settings:
    """Adds the endpoint that the environment names, unless the settings name one.

    That of `STORAGE_EMULATOR_HOST` is reached without credentials.
    """
    given = dict(settings)
    if "endpoint_override" in given:
        return settings
    found: dict[str, str] = {}
    named = (os.environ.get(name) for name in _ENDPOINT_VARIABLES.get(scheme, ()))
    if url := next(filter(None, named), None):
        found = split_endpoint({"endpoint_override": url if "://" in url else f"http://{url}"})
        found |= {ANONYMOUS: "true"} if scheme == "gs" else {}
    return tuple(sorted({**found, **given}.items()))


def _split_settings(settings: Settings) -> tuple[str | None, Any]:
    """The URL of the endpoint, and the settings by obstore's names."""
    given: dict[str, Any] = dict(settings)
    scheme, endpoint = given.pop("scheme", "https"), given.pop("endpoint_override", None)
    if given.pop(ANONYMOUS, "false") == "true":
        given["skip_signature"] = True
    return (None if endpoint is None else f"{scheme}://{endpoint}"), given


def _limits() -> dict[str, Any]:
    """How long a store is asked; plain HTTP is spoken where the endpoint says so."""
    timeouts = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=_ANSWER_S)}
    retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    return {"client_options": {"allow_http": True, **timeouts}, "retry_config": retries}


def _connect_s3(bucket: str, settings: Settings) -> StoreClient:
    from obstore.store import S3Store

    endpoint, config = _split_settings(settings)
    environment = ("AWS_REGION", "AWS_DEFAULT_REGION")
    if endpoint is not None:
        config["endpoint"] = endpoint
    elif not (config.get("region") or any(map(os.environ.get, environment))):
        from pyarrow import fs

        config["region"] = fs.resolve_s3_region(bucket)
    provider = None if "skip_signature" in config else _find_profile()
    return ObstoreClient(S3Store(bucket, config=config, credential_provider=provider, **_limits()))


def _find_profile() -> Any:
    """What gives the credentials of a profile, None where the environment names none."""
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    has_profile = "AWS_PROFILE" in os.environ or Path(file).expanduser().is_file()
    if "AWS_ACCESS_KEY_ID" in os.environ or not has_profile:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ImportError("profiles of AWS are read by boto3: pip install boto3") from error
    return Boto3CredentialProvider()


def _connect_gs(bucket: str, settings: Settings) -> StoreClient:
    from obstore.store import GCSStore

    endpoint, config = _split_settings(settings)
    if endpoint is not None:
        config["base_url"] = endpoint
    if "skip_signature" in config:  # reads only go unsigned; emulators take any token
        config["bearer_token"] = ANONYMOUS
    return ObstoreClient(GCSStore(bucket, config=config, **_limits()))


def _connect_az(container: str, settings: Settings) -> StoreClient:
    from obstore.store import AzureStore

    endpoint, config = _split_settings(settings)
    if endpoint is not None:
        config["endpoint"] = endpoint
    if "account" in config:
        config["account_name"] = config.pop("account")
    return ObstoreClient(AzureStore(container, config=config, **_limits()))


def _connect_hdfs(authority: str, settings: Settings) -> StoreClient:
    from conf.storage.hdfs_client import connect_hdfs

    if settings:
        raise ValueError("HDFS is configured by the files in HADOOP_CONF_DIR, not by settings")
    return connect_hdfs(authority)


# How to reach the store of each scheme; tests add one of their own.
CONNECTORS: dict[str, Callable[[str, Settings], StoreClient]] = {
    "s3": _connect_s3,
    "gs": _connect_gs,
    "az": _connect_az,
    "hdfs": _connect_hdfs,
}


def connect(scheme: str, authority: str, settings: Settings) -> StoreClient:
    """Builds the client of a bucket or host."""
    try:
        return CONNECTORS[scheme](authority, settings)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed",
            received=error.name,
            fix=f"{install_hint('stores')}, for driver and executors",
        ) from error
    except Exception as error:  # the library's own errors have no common class besides
        raise unreachable(f"{scheme}://{authority}", error) from error


def unreachable(uri: str, error: Exception) -> ConfigError:
    """Builds the error of a store that does not answer, or refuses."""
    return ConfigError(
        f"{uri} cannot be reached",
        received=_first_line(error),
        fix=_FIX_HDFS if uri.startswith("hdfs:") else _FIX,
    )
