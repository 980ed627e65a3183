"""The manifest: the commit point of a dataset version, and all that a reader may open.

It also records where the version comes from: inputs read, where each row went, and the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from conf.errors import ConfigError, InputDataError
from conf.json_text import parse_json
from conf.manifest_checks import check_values
from conf.schema import FeatureSchema, FeatureSpec, PackedSlot


@dataclass(frozen=True)
class InputFile:
    """A file of a source at the time when it was read.

    Attributes:
        source: The source's name.
        path: Where it lies.
        bytes: Its size.
        modified_ms: When it was last written, milliseconds since 1970.
        state: Stamp that the file system changes with the file, or None where it was
            not asked.
    """

    source: str
    path: str
    bytes: int
    modified_ms: int
    state: str | None = None


@dataclass(frozen=True)
class InputTable:
    """A table or a query at the time when it was read.

    Attributes:
        source: The source's name.
        place: The table's name, or the database and what is read of it.
        state: The version in its catalogue, or a checksum of its rows; None where no check
            of changes exists.
    """

    source: str
    place: str
    state: str | None


@dataclass(frozen=True)
class SourceSnapshot:
    """The inputs and the config that the version was made from."""

    inputs: tuple[InputFile, ...]
    event_ts_ms_range: tuple[int, int] | None
    config: Mapping[str, Any]
    config_sha256: str
    tables: tuple[InputTable, ...] = ()


@dataclass(frozen=True)
class RowCounts:
    """Rows by outcome: every row of the event log is either kept or dropped for a reason.

    Attributes:
        read: Rows per source, bad ones included.
        quarantined: Bad rows per source and reason.
        joined: Event rows after parsing, de-duplication and dictionary joins.
        kept: Records written per split.
        dropped: Event rows left out, by reason.
        drawn: Negatives that were drawn and written, per split.
        unmatched: Event rows without an entry in a dictionary, by dictionary and reason, kept or
            not.
        lost_conversions: By label made of conversions, their `rows`, and by reason those that
            make no sample positive.
        matched: Event rows with an entry, by dictionary, kept or not.
        maturity: By label made of conversions: up to when it is known (`until_ts_ms`), the times of
            the last conversion and event, and the records whose 0 is not known
            (`unknown_as_0`, of `immature: keep`).
        short_users: Users with too few samples for leave_one_out: their events all stay in
            train.
        test_in_log: Events of a given test split without times whose user and item the samples of
            the log have too.
        late: Rows of the log under the run's days that are of earlier days: runs of these do
            not read them.
        ties: Events at the time of an earlier one of their user.
        labelled: Of several labels, by label and split, the records that have it.
    """

    read: Mapping[str, int]
    quarantined: Mapping[str, Mapping[str, int]]
    joined: int
    kept: Mapping[str, int]
    dropped: Mapping[str, int]
    drawn: Mapping[str, int] = field(default_factory=dict)
    unmatched: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lost_conversions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    matched: Mapping[str, int] = field(default_factory=dict)
    maturity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    short_users: int = 0
    test_in_log: int = 0
    late: int = 0
    ties: int = 0
    labelled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """The run that made the version.

    Attributes:
        fingerprint: Of all that decides the content: config, inputs, days, code version.
        first_day: First day that it was asked to build (`2026-01-31`), or None for no dates.
        last_day: Last day.
        days: Fingerprint of the run that made each day's partitions, by day.
        reused_rows: Records per split that the version shares with its parent.
    """

    fingerprint: str
    first_day: str | None = None
    last_day: str | None = None
    days: Mapping[str, str] = field(default_factory=dict)
    reused_rows: Mapping[str, int] = field(default_factory=dict)


MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT_VERSION = 1
SEQUENCE_RECORDS: Literal["SequenceExample"] = "SequenceExample"
"""Record type whose lists may stand in feature lists, a step each value."""
_LATER_KEYS = (
    (None, "spark"),
    (None, "train_counts"),
    (None, "vocabularies"),
    ("counts", "lost_conversions"),
    ("keys", "event_number"),
    ("counts", "matched"),
    ("counts", "maturity"),
    ("counts", "short_users"),
    ("counts", "test_in_log"),
    ("counts", "late"),
    ("counts", "ties"),
    ("counts", "labelled"),
)


@dataclass(frozen=True)
class ShardInfo:
    """One shard file.

    Attributes:
        path: Relative to the directory that holds the manifest.
        rows: Number of records.
        bytes: File size as stored (compressed where compression is on).
        crc32c: CRC32C of the file's bytes, 8 hex digits.
    """

    path: str
    rows: int
    bytes: int
    crc32c: str


@dataclass(frozen=True)
class SplitInfo:
    """One split: a name and its shards, in the order in which they are read."""

    name: str
    shards: tuple[ShardInfo, ...]

    @property
    def rows(self) -> int:
        """Number of records."""
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class FileInfo:
    """Any other file that belongs to the version (vocabularies, `encoders.json`)."""

    path: str
    bytes: int
    crc32c: str


@dataclass(frozen=True)
class DatasetKeys:
    """The feature of each part; None where the dataset has no such feature.

    Attributes:
        user: Scalar id of the user; None where rows belong to no one.
        item: Scalar id of the target item; None where rows are samples without one.
        history: Ragged item ids before the event, most recent first.
        seen: Ragged item ids that the user had met before the event, unbounded; of the events
            that the build counts, where it says which.
        candidates: Ragged item ids to rank against in a sampled protocol, target excluded.
        label: The label.
        weight: Factor of the sample's loss.
        sampling_probability: Probability by which a negative was sampled; 1 where it was not.
        event_number: Number of the event among its user's, where a user may have several records
            in a split; from 1, or after 10^9 times the event's day where days are replaced.
    """

    user: str | None
    item: str | None
    history: str | None = None
    seen: str | None = None
    candidates: str | None = None
    label: str | None = None
    weight: str | None = None
    sampling_probability: str | None = None
    event_number: str | None = None


WEIGHTED_MEAN = "weighted_mean"
"""Of a label's statistics: its mean with each row counted by its weight, where rows have one."""


def has_sequences(config: Mapping[str, Any]) -> bool:
    """Whether rows of train stand for sequences of their user, by the config that made them."""
    return bool(config.get("train_samples", "all") != "all")


def find_histories(keys: DatasetKeys, schema: FeatureSchema) -> tuple[str, ...]:
    """Finds the lists of items that the user met before the event, `keys.history` first.

    Beside that key these are the lists of role user whose ids are the item's. A list of other ids
    is none, as the videos of columns are not columns.
    """
    if keys.item is None or keys.item not in schema:
        return ()
    item, named = schema[keys.item], keys.history
    found = [
        spec.name
        for spec in schema.features
        if spec.role == "user" and spec.is_list and spec.shares_ids(item)
    ]
    if named is not None and named in schema:
        is_known = named in found or _is_keyed_alike(schema[named], item)
        found = [*([named] if is_known else []), *(name for name in found if name != named)]
    return tuple(found)


@dataclass(frozen=True)
class Manifest:
    """A published dataset version.

    Attributes:
        parent: Version that was current when this one was built, None for the first.
        run: The run that made it; None where an earlier release wrote the manifest.
        exports: Further files: the records as Parquet, statistics of single shards.
        slots: Places of scalars that share a list, in imported records; else empty.
        label_rate: By split, of `keys.label`.
        label_rates: By label and split, of further binary labels.
        vocabularies: Tokens by vocabulary, retired ones left out.
        spark: `application`, Spark's id of the build, and `event_log`, the folder of its log, where
            one was written.
        train_counts: By key (`user`, `item`), the file that counts its ids in the train split
            (`conf.artefacts.train_counts`); empty where an earlier release built the version.
        feature_lists: Features in the feature lists of SequenceExamples, where that was found in
            the records; None: the build's config says it, see `find_feature_lists`.
    """

    dataset_name: str
    dataset_version: str
    created_at: str
    record_type: str
    compression: str | None
    splits: tuple[SplitInfo, ...]
    schema: FeatureSchema
    keys: DatasetKeys
    encoder_files: tuple[FileInfo, ...]
    encoders_fingerprint: str
    statistics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    label_rate: Mapping[str, float]
    source: SourceSnapshot
    counts: RowCounts
    code_version: str
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    parent: str | None = None
    run: RunInfo | None = None
    exports: tuple[FileInfo, ...] = ()
    statistics_file: FileInfo | None = None
    contract: tuple[Mapping[str, Any], ...] = ()
    slots: tuple[PackedSlot, ...] = ()
    label_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    spark: Mapping[str, str] = field(default_factory=dict)
    train_counts: Mapping[str, FileInfo] = field(default_factory=dict)
    feature_lists: tuple[str, ...] | None = None
    format_version: int = MANIFEST_FORMAT_VERSION

    @property
    def other_files(self) -> tuple[FileInfo, ...]:
        """All listed files but the shards."""
        statistics = () if self.statistics_file is None else (self.statistics_file,)
        return (*self.encoder_files, *self.exports, *statistics, *self.train_counts.values())

    @property
    def bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(split.bytes for split in self.splits) + sum(f.bytes for f in self.other_files)

    def split(self, name: str) -> SplitInfo:
        """Returns a split by name.

        Raises:
            InputDataError: The version has no such split.
        """
        for split in self.splits:
            if split.name == name:
                return split
        raise InputDataError(
            f"dataset {self.dataset_name!r} version {self.dataset_version} has no such split",
            received=name,
            allowed=", ".join(split.name for split in self.splits),
        )

    def require_key(self, part: Literal["user", "item"]) -> str:
        """Returns the feature that is the user's or the item's id.

        Raises:
            ConfigError: The dataset has none: its rows are samples without users or items.
        """
        name = self.keys.user if part == "user" else self.keys.item
        if name is None:
            raise ConfigError(
                f"dataset {self.dataset_name!r} has no {part}: nothing can be looked up or ranked "
                f"by {part}",
                received=f"keys.{part} = None",
                allowed=f"a dataset whose build config declares events.{part}",
                fix=f"declare events.{part} and build again, or use what needs a label alone",
            )
        return name

    @property
    def histories(self) -> tuple[str, ...]:
        """Lists of items that the user met before the event, `keys.history` first."""
        return find_histories(self.keys, self.schema)

    def find_history(self) -> str | None:
        """Returns `keys.history`, else the only one of `histories`; None where there is no such."""
        if self.keys.history is not None or len(self.histories) != 1:
            return self.keys.history
        return self.histories[0]

    def find_label_rate(self, label: str) -> Mapping[str, float]:
        """Returns the mean of a label by split; empty where it is not known."""
        return self.label_rate if label == self.keys.label else self.label_rates.get(label, {})

    def may_lack(self, spec: FeatureSpec) -> bool:
        """Whether records may lack a label: one of several, a float32 that is NaN then."""
        is_label = spec.role == "label" and len(self.schema.by_role("label")) > 1
        is_number = spec.dtype == "float32" and not spec.is_list
        return is_label and is_number and spec.pad_value is None

    def find_feature_lists(self) -> frozenset[str]:
        """Returns the features that stand in the feature lists of SequenceExamples.

        A build's `output.feature_lists` names them; where it does not, all lists are.
        """
        if self.record_type != SEQUENCE_RECORDS:
            return frozenset()
        named = self.feature_lists
        if named is None:
            named = self.source.config.get("output", {}).get("feature_lists")
        if named is None:
            return frozenset(spec.name for spec in self.schema.features if spec.is_list)
        return frozenset(named)

    def find_weight(self) -> str | None:
        """Returns the feature that rows are weighted by, or None."""
        if self.keys.weight is not None:
            return self.keys.weight
        specs = self.schema.by_role("weight")
        return specs[0].name if specs else None

    def find_label_mean(self, label: str, split: str) -> float | None:
        """Returns the mean of a label in a split, rows counted by their weights.

        It is what a constant learns that is trained as models are.

        Args:
            label: Feature of numbers.
            split: Name of a split.

        Returns:
            The mean; None where it is not known.
        """
        statistics = self.statistics.get(split, {}).get(label, {})
        mean = (
            statistics.get("mean") if self.find_weight() is None else statistics.get(WEIGHTED_MEAN)
        )
        if mean is None and self.find_weight() is None:
            mean = self.find_label_rate(label).get(split)
        return None if mean is None else float(mean)

    def has_split(self, name: str) -> bool:
        """Whether the version has that split with at least one record."""
        return any(split.name == name and split.rows > 0 for split in self.splits)

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as a JSON object."""
        data = asdict(self)
        data["schema"] = self.schema.to_json()
        data["schema_fingerprint"] = self.schema.fingerprint
        # Manifests from before these keep their fingerprints, which runs name.
        for part, key in _LATER_KEYS:
            held = data if part is None else data[part]
            if not held[key]:
                del held[key]
        if self.feature_lists is None:
            del data["feature_lists"]
        return data

    def dumps(self) -> str:
        """Returns the text of `manifest.json`."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True, default=dict) + "\n"

    @classmethod
    def loads(cls, text: str, origin: str = MANIFEST_FILE) -> Manifest:
        """Builds a manifest from its text.

        Args:
            text: Content of `manifest.json`.
            origin: Where it came from, for the error message.

        Raises:
            InputDataError: Not JSON, another format version, a key missing, a schema that does
                not match its fingerprint, or a value that cannot be true.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise InputDataError(
                f"{origin} is not valid JSON",
                received=str(error),
                fix="build the dataset again; earlier versions are untouched",
            ) from error
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != MANIFEST_FORMAT_VERSION:
            raise InputDataError(
                f"{origin} has another format version",
                received=version,
                allowed=MANIFEST_FORMAT_VERSION,
                fix="read it with the version of Sluice that wrote it, or build again",
            )
        try:
            manifest = cls(**_manifest_fields(data, origin))
            check_values(manifest, origin)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputDataError(f"{origin} is not complete", received=repr(error)) from error
        return manifest


def _is_keyed_alike(history: FeatureSpec, item: FeatureSpec) -> bool:
    """Whether two features of no common vocabulary have ids of one kind: plain keys, or hashes."""
    kind = history.encoding.partition(":")[0]
    if history.dtype != "int64" or kind != item.encoding.partition(":")[0]:
        return False
    return kind != "hash" or history.vocabulary_size == item.vocabulary_size


def _manifest_fields(data: dict[str, Any], origin: str) -> dict[str, Any]:
    fields = dict(data)
    schema = FeatureSchema.from_json(fields.pop("schema"))
    if fields.pop("schema_fingerprint") != schema.fingerprint:
        raise InputDataError(
            f"{origin}: the schema does not match its fingerprint",
            fix="the file was edited or damaged; build the dataset again",
        )
    source, run = fields.pop("source"), fields.pop("run", None)
    listed, lists = fields.get("statistics_file"), fields.get("feature_lists")
    time_range = source.pop("event_ts_ms_range")
    return {
        **fields,
        "schema": schema,
        "splits": tuple(
            SplitInfo(split["name"], tuple(ShardInfo(**shard) for shard in split["shards"]))
            for split in fields["splits"]
        ),
        "keys": DatasetKeys(**fields["keys"]),
        "encoder_files": tuple(FileInfo(**item) for item in fields["encoder_files"]),
        "exports": tuple(FileInfo(**item) for item in fields.get("exports", ())),
        "run": None if run is None else RunInfo(**run),
        "source": SourceSnapshot(
            inputs=tuple(InputFile(**item) for item in source.pop("inputs")),
            event_ts_ms_range=None if time_range is None else (time_range[0], time_range[1]),
            tables=tuple(InputTable(**item) for item in source.pop("tables", ())),
            **source,
        ),
        "counts": RowCounts(**fields["counts"]),
        "statistics_file": None if listed is None else FileInfo(**listed),
        "contract": tuple(fields.get("contract", ())),
        "slots": tuple(PackedSlot(**slot) for slot in fields.get("slots", ())),
        "feature_lists": None if lists is None else tuple(lists),
        "train_counts": {
            name: FileInfo(**item) for name, item in fields.get("train_counts", {}).items()
        },
    }


def bound_list(
    manifest: Manifest, spec: FeatureSpec, splits: Sequence[str] = ("train",)
) -> FeatureSpec:
    """Bounds a list without `max_len` by the longest of some splits, as the statistics have it.

    Any other feature is returned as it is.
    """
    if not spec.is_ragged or spec.max_len is not None:
        return spec
    found = [manifest.statistics.get(split, {}).get(spec.name, {}) for split in splits]
    longest = max((one.get("length", {}).get("max") or 0 for one in found), default=0)
    return replace(spec, max_len=int(longest)) if longest else spec


def bound_row_list(manifest: Manifest, spec: FeatureSpec) -> FeatureSpec:
    """Bounds a list by the longest of train, as `bound_list`; a list of an item stays as it is.

    The catalogue holds lists of items that train does not.
    """
    return spec if spec.role == "item" else bound_list(manifest, spec)
