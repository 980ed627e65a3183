"""A trained run for the commands after training: its model, config overrides, and the run card."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from pydantic import BaseModel

from conf.artefacts.run import update_run_card
from conf.errors import ConfigError, did_you_mean
from conf.load import load_config
from jobs.support.terminal import quiet_tensorflow

if TYPE_CHECKING:
    from training.checkpoint.restore import TrainedModel

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class CheckpointChoice(StrEnum):
    """Which of a run's checkpoints is used."""

    BEST = "best"
    LAST = "last"


RunOption = Annotated[str, typer.Option(help="A run, or a series: its last finished run.")]
CheckpointOption = Annotated[
    CheckpointChoice, typer.Option(help="The best epoch's weights, or the last one's.")
]
DATASET_HELP = "Measure on this later version of the run's dataset, in place of its own."
OnDataset = Annotated[str | None, typer.Option("--dataset", metavar="DIR", help=DATASET_HELP)]


def restore_run(
    run: str | Path,
    checkpoint: str = CheckpointChoice.BEST,
    dataset: str | None = None,
    split: str | None = None,
) -> TrainedModel:
    """Loads the model of a run with TensorFlow's start-up messages held back.

    Args:
        run: A run's directory, or a series' (its last finished run).
        checkpoint: `best` or `last`.
        dataset: Another version of the run's dataset to put it on, see
            `training.other_version`; None: its own.
        split: The split that it is measured on there.

    Raises:
        ConfigError: The run cannot be put on that version.
        UpstreamNotReadyError: There is no such run, checkpoint or version.
        InputDataError: The checkpoint or a dataset version is damaged or gone.
    """
    from training.checkpoint.stored_runs import find_run

    run_dir = find_run(run)  # A wrong path is refused before TensorFlow starts.
    with quiet_tensorflow():
        from training.checkpoint.restore import load_run

    which: Literal["best", "last"] = "last" if checkpoint == CheckpointChoice.LAST else "best"
    trained = load_run(run_dir, which)
    if dataset is None:
        return trained
    from training.other_version import move_to_version

    return move_to_version(trained, dataset, which, split)


def restore_for_evaluation(
    run: str | Path,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
    dataset: str | None = None,
    split: str | None = None,
) -> TrainedModel:
    """Loads the model of a run, with overrides of its section `evaluation`.

    Args:
        run: A run's directory, or a series' (its last finished run).
        checkpoint: `best` or `last`.
        overrides: `evaluation.key=value` each.
        dataset: As for `restore_run`.
        split: As for `restore_run`.

    Raises:
        ConfigError: An override does not fit, or the run cannot be put on that version.
        UpstreamNotReadyError: There is no such run or checkpoint.
        InputDataError: The checkpoint or its dataset version is damaged or gone.
    """
    trained = restore_run(run, checkpoint, dataset, split)
    if dataset is not None and not any(".filter" in text.partition("=")[0] for text in overrides):
        from training.other_version import require_filter

        require_filter(trained)
    section = override_section("evaluation", trained.config.evaluation, overrides)
    return replace(trained, config=trained.config.model_copy(update={"evaluation": section}))


def override_section(section: str, config: ConfigT, overrides: Sequence[str]) -> ConfigT:
    """Applies `section.key=value` overrides to one section of a run's config.

    Args:
        section: Name of the section; the others are part of the trained model.
        config: The section as the run was trained with it.
        overrides: `section.key=value` each.

    Raises:
        ConfigError: Another section, an unknown key, or a value that does not fit.
    """
    prefix = f"{section}."
    for override in overrides:
        if not override.strip().startswith(prefix):
            key = override.partition("=")[0].strip()
            raise ConfigError(
                "after training only one section of the config can be overridden here",
                received=override,
                allowed=", ".join(f"{prefix}{name}" for name in type(config).model_fields),
                fix=did_you_mean(key, [f"{prefix}{name}" for name in type(config).model_fields]),
            )
    base = [f"{name}={json.dumps(value)}" for name, value in config.model_dump(mode="json").items()]
    given = [override.strip().removeprefix(prefix) for override in overrides]
    return load_config(type(config), "training", None, [*base, *given])


@contextmanager
def timed(run_dir: Path, name: str) -> Iterator[None]:
    """Writes how long a block took into the run card, when it ends well.

    What the block has changed is brought to the store then, where the run lies in one.
    """
    from training.checkpoint.stored_runs import bring_back

    start = time.monotonic()
    yield
    seconds = round(time.monotonic() - start, 3)
    update_run_card(run_dir, timing={f"{name}_seconds": seconds})
    bring_back(run_dir)
