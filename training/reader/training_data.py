"""A dataset version that a run trains on, and how many rows and steps its input leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.storage.locations import find_path
from conf.training.input import FilterConfig, InputConfig
from conf.training.train import TrainConfig
from training.reader.split_source import InputOptions, SplitSource, count_rows, count_steps


@dataclass(frozen=True)
class TrainingData:
    """A dataset version that a run trains on.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        counts_file: Keeps how many rows the input leaves, where they had to be counted; None
            keeps it for this process alone.
    """

    version_dir: ReadablePath
    manifest: Manifest
    counts_file: Path | None = None

    def steps_per_epoch(self, config: InputConfig) -> int:
        """Whole batches of an epoch; the rows left over are drawn anew each epoch.

        Args:
            config: How the train split is read. Only where it leaves rows out is the split read
                through, once.

        Raises:
            InputDataError: There is no whole batch, or a shard is damaged.
        """
        source = SplitSource(self.version_dir, self.manifest, "train", config)
        return count_steps(source, self.counts_file)

    def held_out_rows(
        self, config: InputConfig, evaluation_filter: tuple[FilterConfig, ...] = ()
    ) -> int:
        """Rows of train that `config.validation` keeps apart; counted as those of an epoch are.

        Args:
            config: How the train split is read.
            evaluation_filter: What the rows must pass as well.

        Raises:
            InputDataError: A shard is damaged.
        """
        source = SplitSource(
            self.version_dir,
            self.manifest,
            "train",
            config,
            InputOptions(evaluation_filter=evaluation_filter),
            is_held_out=True,
        )
        return count_rows(source, self.counts_file)

    def filtered_rows(self, split: str, evaluation_filter: tuple[FilterConfig, ...]) -> int:
        """Rows of a split that pass `evaluation.filter`.

        Args:
            split: Name of the split.
            evaluation_filter: The filter.

        Raises:
            InputDataError: There is no such split or feature, or a shard is damaged.
            ConfigError: A value is not of the feature's type.
        """
        config, options = InputConfig(), InputOptions(evaluation_filter=evaluation_filter)
        source = SplitSource(self.version_dir, self.manifest, split, config, options)
        return count_rows(source, self.counts_file)


def read_current_data(config: TrainConfig) -> TrainingData:
    """Reads the manifest of the dataset version that a new run of a config trains on.

    Raises:
        SluiceError: There is no such version, or it is damaged.
    """
    return _read_current(config.dataset, config)


def read_current_mixed(config: TrainConfig) -> tuple[TrainingData, ...]:
    """Reads the manifests of the versions that a new run mixes in, as `read_current_data` does."""
    return tuple(_read_current(part.dataset, config) for part in config.input.mix)


def _read_current(dataset: str, config: TrainConfig) -> TrainingData:
    version_dir = resolve_version(find_path(dataset))
    return TrainingData(version_dir, read_manifest(version_dir, config.input.tolerates))


def pin_mixed(config: TrainConfig, versions: Sequence[str]) -> TrainConfig:
    """Returns the config with versions in the place of the datasets of `input.mix`."""
    parts = zip(config.input.mix, versions, strict=True)
    mix = tuple(part.model_copy(update={"dataset": version}) for part, version in parts)
    return config.model_copy(update={"input": config.input.model_copy(update={"mix": mix})})
