"""The config of `sluice data import`: TFRecord files of one's own as a dataset."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from conf.config_base import PublishedRoot, Strict
from conf.schema import DType, Role

SplitName = Literal["train", "validation", "test", "catalog", "users"]
_EMBEDDED_ROLES = ("user", "item", "context")


class ImportedFeatureConfig(Strict):
    """A feature of the records; what is left out is found by reading them."""

    name: str = Field(min_length=1, description="Key of the feature in tf.train.Example.")
    role: Role = Field(
        description="Which side of a model reads it; `id` is carried along and read by none."
    )
    dtype: DType | None = Field(None, description="None: as the records have it.")
    length: int | None = Field(None, ge=1, description="Lists of exactly this many values.")
    max_len: int | None = Field(None, ge=1, description="Lists of any length: values kept.")
    ids: bool | None = Field(
        None,
        description="Whether values are ids, rows of an embedding table; None: of int64 features "
        "of users, items and contexts they are. Id 0 is padding, 1 stands for an absent value.",
    )
    vocabulary_size: int | None = Field(
        None, ge=1, description="Ids are below it; None: the highest of all files, plus 1."
    )
    table: str | None = Field(None, description="Embedding table that features share.")
    pad_value: int | float | str | None = Field(
        None, description="Value where a record lacks the feature; None: records must have it."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ImportedFeatureConfig:
        if self.length is not None and self.max_len is not None:
            raise ValueError(f"feature {self.name!r} has both `length` and `max_len`")
        if self.ids is False and self.vocabulary_size is not None:
            raise ValueError(f"feature {self.name!r} has a vocabulary_size, and `ids: false`")
        if self.are_ids and self.dtype not in (None, "int64"):
            raise ValueError(f"feature {self.name!r} is {self.dtype}; ids are int64")
        return self

    @property
    def are_ids(self) -> bool:
        """Whether the config says that values are ids."""
        return bool(self.ids) or self.vocabulary_size is not None

    def reads_as_ids(self, dtype: DType) -> bool:
        """Whether values of a type are ids."""
        if self.ids is None and self.vocabulary_size is None:
            return dtype == "int64" and self.role in _EMBEDDED_ROLES
        return self.are_ids


class ImportedKeysConfig(Strict):
    """The feature of each part."""

    user: str | None = Field(None, description="Feature that names the user; None: there is none.")
    item: str | None = Field(None, description="Feature that names the item; None: there is none.")
    history: str | None = Field(None, description="List feature of the user's earlier items.")
    seen: str | None = Field(None, description="List feature of items that rankings leave out.")
    candidates: str | None = Field(None, description="List feature of the items to rank.")
    label: str | None = Field(None, description="None: the first feature of role label.")
    weight: str | None = Field(None, description="None: the first feature of role weight.")


class ImportOutputConfig(Strict):
    """The directory of datasets, and how the files get there."""

    root: PublishedRoot = Field(
        "work/datasets",
        description="Folder of datasets: a path, or a URI of s3://, gs:// or az://.",
    )
    files: Literal["link", "copy"] = Field(
        "link",
        description="link: a second name of the file, or a symbolic link where it lies on another "
        "file system; a program that writes into the file changes the version. copy: independent.",
    )


class ImportConfig(Strict):
    """Everything that `sluice data import` needs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the dataset.")
    data_dir: str = Field(".", description="Folder that relative paths start from.")
    splits: dict[SplitName, tuple[str, ...]] = Field(
        description="Files, folders or globs of each split; train is one of them."
    )
    features: tuple[ImportedFeatureConfig, ...] = Field(min_length=1)
    packed: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="By key of a list in the records: the scalars that it holds, in their order.",
    )
    keys: ImportedKeysConfig = ImportedKeysConfig()
    output: ImportOutputConfig = ImportOutputConfig()

    @model_validator(mode="after")
    def _consistent(self) -> ImportConfig:
        if not self.splits.get("train"):
            raise ValueError("`splits` needs files of `train`")
        names = [feature.name for feature in self.features]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(f"features are declared twice: {', '.join(repeated)}")
        for part, name in self.keys:
            if name is not None and name not in names:
                raise ValueError(f"keys.{part}: {name!r} is no declared feature")
        self._check_packed(set(names))
        return self

    def _check_packed(self, names: set[str]) -> None:
        scalars = [name for listed in self.packed.values() for name in listed]
        lists = {f.name for f in self.features if f.length is not None or f.max_len is not None}
        for name in scalars:
            if name not in names:
                raise ValueError(f"packed: {name!r} is no declared feature; give it a role")
            if name in lists or scalars.count(name) > 1:
                raise ValueError(f"packed: {name!r} must be one scalar, of one list")
        if clash := names & set(self.packed):
            raise ValueError(f"packed: {', '.join(sorted(clash))} is a feature itself")

    def find_key(self, role: Literal["label", "weight"]) -> str | None:
        """Name of the label or weight that is meant, None where there is none."""
        named = self.keys.label if role == "label" else self.keys.weight
        return named or next((f.name for f in self.features if f.role == role), None)

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
