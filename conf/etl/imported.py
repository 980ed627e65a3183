"""The config of `sluice data import`: TFRecord files of one's own as a dataset."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from conf.config_base import PublishedRoot, Strict
from conf.local_paths import check_below
from conf.schema import DType, Role

SplitName = Literal["train", "validation", "test", "catalog", "users"]


class ImportedFeatureConfig(Strict):
    """A feature of the records; what is left out is found by reading them."""

    name: str = Field(
        min_length=1,
        description="Key of the feature in tf.train.Example, or in the context or the feature "
        "lists of tf.train.SequenceExample.",
    )
    role: Role = Field(
        description="Which side of a model reads it; `id` is carried along and read by none."
    )
    dtype: DType | None = Field(None, description="None: as the records have it.")
    length: int | None = Field(None, ge=1, description="Lists of exactly this many values.")
    max_len: int | None = Field(None, ge=1, description="Lists of any length: values kept.")
    ids: bool | Literal["keys"] | None = Field(
        None,
        description="Whether values are ids, rows of an embedding table; None: of int64 features "
        "of users, items and contexts they are. Id 0 is padding, 1 stands for an absent value. "
        "keys: 64-bit keys such as hashes, rows of a dynamic table.",
    )
    offset: Literal[0, 1, 2] | None = Field(
        None,
        description="What ids move up by. 2: ids start at 0, and -1 is none. 1: they start at 1, "
        "and 0 is none. 0: they start at 2 as they are. None: as 0, and records that hold ids 0 "
        "or 1 are refused. What is none pads a list; alone, it is an absent value.",
    )
    vocabulary_size: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Ids, as the records hold them, are below it; None: the highest of all files, "
        "plus 1.",
    )
    table: str | None = Field(None, description="Embedding table that features share.")
    pad_value: int | float | str | None = Field(
        None, description="Value where a record lacks the feature; None: records must have it."
    )
    order: Literal["latest_first", "oldest_first"] = Field(
        "latest_first",
        description="How the files order a list over time. Models want the latest first, and "
        "`max_len` keeps the first values: lists of the other order are turned round.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ImportedFeatureConfig:
        has_size, moves = self.vocabulary_size is not None, self.offset is not None
        contradictions = {
            "has both `length` and `max_len`": None not in (self.length, self.max_len),
            "has a `vocabulary_size` or `offset`, and `ids: false`": self.ids is False
            and (has_size or moves),
            "is of keys, which have no vocabulary_size, and stay as they are without an offset": (
                self.are_keys and (has_size or bool(self.offset))
            ),
            "has a `length`; only lists over time turn": self.turns and self.length is not None,
            f"is {self.dtype}; ids are int64": (self.reads_as_ids("bytes") or self.are_keys)
            and self.dtype not in (None, "int64"),
        }
        for what, is_so in contradictions.items():
            if is_so:
                raise ValueError(f"feature {self.name!r} {what}")
        return self

    @property
    def are_keys(self) -> bool:
        return self.ids == "keys"

    @property
    def is_list(self) -> bool:
        return self.length is not None or self.max_len is not None

    @property
    def turns(self) -> bool:
        return self.order == "oldest_first"

    @property
    def table_name(self) -> str:
        return self.table or self.name

    def reads_as_ids(self, dtype: DType) -> bool:
        """Whether values of a type are ids of a vocabulary."""
        if self.ids is not None:
            return self.ids is True
        is_said = self.vocabulary_size is not None or self.offset is not None
        return is_said or (dtype == "int64" and self.role in ("user", "item", "context"))


class ImportedKeysConfig(Strict):
    """The feature of each part; label and weight are the first of their role."""

    user: str | None = Field(None, description="Feature that names the user; None: there is none.")
    item: str | None = Field(None, description="Feature that names the item; None: there is none.")
    history: str | None = Field(None, description="List feature of the user's earlier items.")
    seen: str | None = Field(None, description="List feature of items that rankings leave out.")


class ImportOutputConfig(Strict):
    """The directory of datasets, and how the files get there."""

    root: PublishedRoot = Field(
        "work/datasets",
        description="Folder of datasets: a path, or a URI of s3://, gs://, az:// or hdfs://.",
    )
    files: Literal["link", "copy"] = Field(
        "link",
        description="link: a second name of the file, or a symbolic link where it lies on another "
        "file system; a program that writes into the file changes the version. copy: independent. "
        "Where ids move by an offset or lists are turned round, files are always written anew.",
    )


class ImportConfig(Strict):
    """Everything that `sluice data import` needs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the dataset.")
    data_dir: str = Field(".", description="Folder that relative paths start from.")
    splits: dict[SplitName, tuple[str, ...]] = Field(
        description="Files, folders or globs of each split; train is one of them."
    )
    record_type: Literal["Example", "SequenceExample"] | None = Field(
        None,
        description="What a record is: tf.train.Example or SequenceExample; None: found in the "
        "records. Named, files of SequenceExamples may lack feature lists altogether.",
    )
    features: tuple[ImportedFeatureConfig, ...] = Field(min_length=1)
    aligned: tuple[tuple[str, ...], ...] = Field(
        (),
        description="Groups of lists that are equally long in each record, such as items and their "
        "times.",
    )
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
        for path in (path for paths in self.splits.values() for path in paths):
            check_below(path)
        features = {feature.name: feature for feature in self.features}
        if len(features) < len(self.features):
            names = Counter(feature.name for feature in self.features)
            raise ValueError(f"features are declared twice: {names.most_common(1)[0][0]}")
        named = [(f"keys.{part}", name) for part, name in self.keys if name is not None]
        named += [("aligned", name) for group in self.aligned for name in group]
        named += [("packed", name) for names in self.packed.values() for name in names]
        for key, name in named:
            if name not in features:
                raise ValueError(f"{key}: {name!r} is no declared feature")
        self._check_lists(features)
        # Equal values of one table are to be the same ids.
        moves = {(f.table_name, f.offset or 0, f.are_keys) for f in self.features}
        tables = Counter(table for table, *_ in moves)
        if repeated := [table for table, count in tables.items() if count > 1]:
            raise ValueError(
                f"features share the table {repeated[0]!r}: give them the same `offset` and `ids`"
            )
        return self

    def _check_lists(self, features: dict[str, ImportedFeatureConfig]) -> None:
        for group in self.aligned:
            if len(set(group)) < max(2, len(group)):
                raise ValueError(f"aligned: a group has two or more lists, not {list(group)}")
            if len({features[name].order for name in group}) > 1:
                raise ValueError(f"aligned: give {', '.join(group)} the same `order`")
        scalars = Counter(name for names in self.packed.values() for name in names)
        for name, count in scalars.items():
            if features[name].is_list or count > 1:
                raise ValueError(f"packed: {name!r} must be one scalar, of one list")
        if clash := features.keys() & self.packed.keys():
            raise ValueError(f"packed: {', '.join(sorted(clash))} is a feature itself")

    @property
    def writes_anew(self) -> bool:
        """Whether records are written anew: ids move, or lists turn."""
        return any(feature.offset or feature.turns for feature in self.features)

    def resolved(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
