"""Object stores and HDFS, each reached by the library that knows it, behind one small interface.

S3, Google Cloud Storage and Azure by `obstore`, which has conditional puts; HDFS by `hdfs_native`
(`conf.storage.hdfs_client`). Settings come from options, else from the environment.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

Settings = tuple[tuple[str, str], ...]
Version = Mapping[str, str]
"""Tells the contents that an object has had apart; what it holds is the store's affair."""

ANONYMOUS = "anonymous"
# The libraries would go on for some minutes where nobody answers.
_RETRY_S = 60
_RETRIES = 10
# A copy of some GB inside a store answers at its end.
_ANSWER_S = 600
# S3 takes 10,000 parts of an upload: objects of 78 GB.
_PART_BYTES, _PARTS_AT_A_TIME = 8 << 20, 2
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it: its size, and when it was put, 0 if the store hides it."""

    bytes: int
    mtime_ns: int


class Upload(Protocol):
    """An object on its way, which appears when this is closed."""

    def write(self, data: Any, /) -> object: ...
    def close(self) -> None: ...


class StoreClient(Protocol):
    """What is asked of a bucket or of HDFS; paths are relative to its root.

    All raise an `OSError` where the store does not answer, or refuses; what reads an object that
    is not there a `FileNotFoundError`.
    """

    def head(self, path: str) -> StoredObject | None: ...
    def list_below(self, folder: str) -> Iterator[tuple[str, StoredObject]]: ...
    def list_folders(self, folder: str) -> Iterator[str]: ...
    def get(self, path: str) -> tuple[bytes, Version]: ...
    def open_input(self, path: str) -> BinaryIO: ...
    def open_output(self, path: str) -> Upload: ...

    def put(self, path: str, data: bytes, over: Version | Literal["any"] | None) -> None:
        """Replaces an object of a version, None: creates it; else raises `FileExistsError`."""

    def move(self, source: str, target: str) -> None:
        """Renames an object, over another one; where the store can only copy, the source stays."""

    def delete(self, path: str, within: str) -> None:
        """Deletes an object, if it is there; on HDFS folders too, below one, that become empty."""

    # As in stores, where a folder is but a part of names and a rule of the bucket ends uploads.
    def has_bucket(self) -> bool:
        return True

    def move_folder(self, source: str, target: str) -> bool:
        """Moves a folder in one step; returns False, and does nothing, where the store cannot."""
        return False

    def remove_folder(self, folder: str) -> bool:
        """Removes a folder and uploads in one step; else as `move_folder`."""
        return False

    def remove_uploads(self, folder: str, held: str) -> None:
        """Removes shown uploads that never ended, but in folders that hold an object `held`."""
        return None


class _RangeReader(io.RawIOBase):
    def __init__(self, size: int, fetch: Callable[[int, int], Any]) -> None:
        self._size, self._fetch, self._position = size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._position))
        if length:
            buffer[:length] = memoryview(self._fetch(self._position, length))
            self._position += length
        return length


def open_ranges(size: int, fetch: Callable[[int, int], Any]) -> BinaryIO:
    """Opens for reading and seeking what is fetched by offset and length, in bytes."""
    return cast(BinaryIO, io.BufferedReader(_RangeReader(size, fetch), _READ_BYTES))


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
        raise FileExistsError(first_line(error)) from error
    except exceptions.BaseError as error:
        reason = _REASON.search(str(error))
        text = f"{reason[1]}: {' '.join(reason[2].split())}; " if reason else ""
        raise OSError(f"{text}{first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0].removesuffix(": ")


class ObstoreClient(StoreClient):
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

    def list_folders(self, folder: str) -> Iterator[str]:
        with _translating():
            yield from self._api.list_with_delimiter(self.store, folder or None)["common_prefixes"]

    def has_bucket(self) -> bool:
        try:  # A listing of one that is not there looks empty.
            self.get(_NO_KEY)
        except FileNotFoundError as error:
            return not _NO_BUCKET.search(str(error))
        return True

    def get(self, path: str) -> tuple[bytes, Version]:
        with _translating():
            answer = self._api.get(self.store, path)
            named = {name: answer.meta[name] for name in ("e_tag", "version")}
            return bytes(answer.bytes()), {n: value for n, value in named.items() if value}

    def open_input(self, path: str) -> BinaryIO:
        def fetch(start: int, length: int) -> Any:
            with _translating():
                return self._api.get_range(self.store, path, start=start, length=length)

        with _translating():
            size = self._api.head(self.store, path)["size"]
        return open_ranges(size, fetch)

    def open_output(self, path: str) -> Upload:
        sizes: dict[str, Any] = {"buffer_size": _PART_BYTES, "max_concurrency": _PARTS_AT_A_TIME}
        with _translating():
            return _TranslatingUpload(self._api.open_writer(self.store, path, **sizes))

    def put(self, path: str, data: bytes, over: Version | Literal["any"] | None) -> None:
        mode: Any = "create" if over is None else "overwrite" if over == "any" else dict(over)
        with _translating():
            self._api.put(self.store, path, data, mode=mode, use_multipart=False)

    def move(self, source: str, target: str) -> None:
        with _translating():
            self._api.copy(self.store, source, target)

    def delete(self, path: str, within: str) -> None:
        with _translating(), contextlib.suppress(FileNotFoundError):
            self._api.delete(self.store, path)


def _describe(item: Mapping[str, Any]) -> StoredObject:
    return StoredObject(item["size"], int(item["last_modified"].timestamp() * 1e9))


_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}


def add_environment(scheme: str, settings: Settings) -> Settings:
    """Adds the endpoint that the environment names, unless the settings name one."""
    given = dict(settings)
    named = (os.environ.get(name) for name in _ENDPOINT_VARIABLES.get(scheme, ()))
    url = next(filter(None, named), None)
    if url is None or "endpoint_override" in given:
        return settings
    found = {"endpoint_override": (url if "://" in url else f"http://{url}").rstrip("/")}
    found |= {ANONYMOUS: "true"} if scheme == "gs" else {}
    return tuple(sorted({**found, **given}.items()))


BUCKET_SETTINGS = {
    "s3": {"endpoint_override": "endpoint"},
    "gs": {"endpoint_override": "base_url"},
    "az": {"endpoint_override": "endpoint", "account": "account_name"},
}
"""Names of settings in `obstore`, where it has others."""


def connect_bucket(scheme: str, bucket: str, settings: Settings) -> StoreClient:
    from obstore import store

    config: Any = {BUCKET_SETTINGS[scheme].get(name, name): text for name, text in settings}
    if config.pop(ANONYMOUS, "").lower() == "true":  # Reads only go unsigned,
        config["skip_signature"] = True
        config |= {"bearer_token": ANONYMOUS} if scheme == "gs" else {}  # as in emulators.
    if scheme != "s3":
        make = store.GCSStore if scheme == "gs" else store.AzureStore
        return ObstoreClient(make(bucket, config=config, **_limits()))
    environment = map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION"))
    if not (config.keys() & {"endpoint", "region"} or any(environment)):
        from pyarrow import fs

        config["region"] = fs.resolve_s3_region(bucket)
    provider = None if "skip_signature" in config else _find_profile()
    found = store.S3Store(bucket, config=config, credential_provider=provider, **_limits())
    return ObstoreClient(found)


def _limits() -> dict[str, Any]:
    """How long a store is asked; plain HTTP is spoken where the endpoint says so."""
    timeouts = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=_ANSWER_S)}
    retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    return {"client_options": {"allow_http": True, **timeouts}, "retry_config": retries}


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
