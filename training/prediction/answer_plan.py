"""What each row gets, a score, a list or a vector: one plan for a run and for its export.

`sluice predict` carries it out with the run's model, `sluice score` with the exported one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from conf.artefacts.export import Give
from conf.errors import ConfigError, did_you_mean

TaskT = TypeVar("TaskT")


@dataclass(frozen=True)
class Answerer:
    """What decides which answers a model can give.

    Attributes:
        is_ranking: Whether it scores pairs, rather than comparing vectors.
        has_items: Whether there are items to rank.
    """

    is_ranking: bool
    has_items: bool = True


@dataclass(frozen=True)
class Asked:
    """What a user asks for.

    Attributes:
        give: What each row gets; None: what fits the model and the rows.
        for_lists: Whether an option asks for lists without saying so.
        has_rows: Whether there are rows of raw values, or of a split of events.
        holds_items: Whether each row holds an item: those of a split of events do.
        task: Task that ranks; None: the first.
        list_options: Options that were given, and are about lists alone.
        say_lists: Option by which the command gives lists.
    """

    give: Give | None = None
    for_lists: bool = False
    has_rows: bool = False
    holds_items: bool = False
    task: str | None = None
    list_options: tuple[str, ...] = ()
    say_lists: str = "--lists"


def plan_answers(model: Answerer, asked: Asked) -> Give:
    """Returns what each row gets.

    Raises:
        ConfigError: The model cannot give it, or an option would be ignored.
    """
    give = asked.give or _choose(model, asked)
    if asked.list_options and give is not Give.LISTS:
        raise ConfigError(
            f"these options are about lists, and rows get {give}",
            received=" ".join(asked.list_options),
            fix=f"leave them out, or say {asked.say_lists}",
        )
    if asked.task is not None and not model.is_ranking:
        raise ConfigError("a retrieval model has no tasks", received=asked.task,
                          fix="leave the task out")  # fmt: skip
    if give is Give.SCORES and not model.is_ranking and not asked.holds_items:
        raise ConfigError(
            "a retrieval model gives lists and vectors, no scores of rows without an item",
            received="scores",
            allowed=", ".join(value for value in Give if value is not Give.SCORES),
        )
    return give


def _choose(model: Answerer, asked: Asked) -> Give:
    """A file of a retrieval model holds what is known of users, and no item: rows get lists."""
    if asked.for_lists:
        return Give.LISTS
    if asked.holds_items:
        return Give.SCORES
    if model.is_ranking and (asked.has_rows or not model.has_items):
        return Give.SCORES
    return Give.LISTS


def find_task(tasks: Mapping[str, TaskT], name: str | None) -> TaskT:
    """Returns the task of a ranking model that ranks: the first where none is named.

    Raises:
        ConfigError: The model has no task of that name.
    """
    if name is None:
        return next(iter(tasks.values()))
    if name not in tasks:
        raise ConfigError(
            "the model has no such task",
            received=name,
            allowed=", ".join(tasks),
            fix=did_you_mean(name, tasks),
        )
    return tasks[name]
