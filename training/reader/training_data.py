"""A dataset version that a run trains on, and how many rows and steps its input leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.input import FilterConfig, InputConfig
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
