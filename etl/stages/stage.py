"""What a stage of a build is, and what stages share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from conf.etl.build import BuildConfig
from conf.manifest import Manifest
from etl.encoders.feature_plan import FeaturePlan
from etl.quality.contract import BuildChecks
from etl.versions.run_fingerprint import RunRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from etl.encoders.fit import EarlierEncoders
    from etl.events.event_counts import EventCounts
    from etl.quality.time_units import CountedSources
    from etl.records.fitted_encoders import FittedEncoders
    from etl.records.stage import RecordStage, WrittenRecords
    from etl.sources.source import Source

logger = logging.getLogger("sluice.build")


@dataclass
class StageClock:
    """Wall time of each stage, logged as it ends.

    Attributes:
        announce: Called with the name of each stage as it begins: Spark's jobs bear it.
    """

    announce: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage."""
        logger.info("%s …", name)
        self.announce(name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        logger.info("%s: %.1f s", name, self.seconds[name])


@dataclass(frozen=True)
class ConfigChecks:
    """What stages check before anything is read.

    Attributes:
        config: The build's config.
        plan: Its features.
        request: What of it is to be built.
    """

    config: BuildConfig
    plan: FeaturePlan
    request: RunRequest


@dataclass(frozen=True)
class BuildInputs:
    """What a build begins with.

    Attributes:
        spark: Session.
        config: The build's config.
        plan: Its features.
        request: What of it is to be built.
        sources: The sources, as files or tables.
        staging: Directory of the version.
        base: Version whose other partitions are kept; None: all is built.
        earlier_encoders: Encoders that are continued where all is built; None: there are none.
    """

    spark: SparkSession
    config: BuildConfig
    plan: FeaturePlan
    request: RunRequest
    sources: Mapping[str, Source]
    staging: Path
    base: tuple[Path, Manifest] | None = None
    earlier_encoders: EarlierEncoders | None = None


@dataclass
class Build:
    """A build under way: what it began with, and what each stage leaves for the next ones.

    Attributes:
        inputs: What it began with.
        checks: What looks at the data on its way.
        resources: What is released when the stages are over.
        counted: The sources with their rows counted.
        log: Each row of the log, with what becomes of it.
        event_counts: What became of events.
        events: Events that become samples.
        encoders: Encoders.
        record_stage: What makes records.
        written: What was written.
        drawn: Negatives that were drawn, by split.
    """

    inputs: BuildInputs
    checks: BuildChecks
    resources: ExitStack
    counted: CountedSources = field(init=False)
    log: DataFrame = field(init=False)
    event_counts: EventCounts = field(init=False)
    events: DataFrame = field(init=False)
    encoders: FittedEncoders = field(init=False)
    record_stage: RecordStage = field(init=False)
    written: WrittenRecords = field(init=False)
    drawn: Mapping[str, int] = field(init=False)


@dataclass(frozen=True)
class Stage:
    """A stage of a build.

    Attributes:
        name: What the log and the manifest call it.
        run: Does its work.
        check: Refuses a config with a `ConfigError`, before anything is read.
    """

    name: str
    run: Callable[[Build], None]
    check: Callable[[ConfigChecks], None] = lambda _: None
