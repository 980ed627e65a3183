"""Folders that jobs publish to."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from conf.dataset import local_path
from conf.errors import ConfigError


def _check_root(root: str) -> str:
    try:
        local_path(root)
    except ConfigError as error:
        raise ValueError(
            "it must lie on a file system, local or mounted: what is published there is locked "
            "and renamed, which object stores cannot do; publish there, and copy what is finished "
            "to the store (a dataset: its version first, CURRENT last)"
        ) from error
    return root


PublishedRoot = Annotated[str, AfterValidator(_check_root)]
