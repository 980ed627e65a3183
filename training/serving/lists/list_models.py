"""Which models answer `/v1/recommend`: one that finds items, one that orders them, or either."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tensorflow as tf

from conf.artefacts.export import RANK_ITEMS
from conf.errors import ConfigError, did_you_mean
from training.apply.ranker import find_items_input
from training.serving.lists.row_inputs import ListModel
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import RecommendConfig
from training.serving.requests.errors import NOT_FOUND, RequestError

KINDS = ("retrieval", "ranking")

_log = logging.getLogger("sluice.training.serving")


class ListModels:
    """Chooses what answers, and refuses versions that cannot.

    A model that was the only one of its kind goes on answering where a second one appears.

    Raises:
        ConfigError: A named model is not there, or of the other kind; or the ranking model that
            would order lists cannot.
    """

    def __init__(self, store: ModelStore, config: RecommendConfig) -> None:
        self._store, self._config = store, config
        self._names: dict[str, str] = {}
        self._kept: dict[str, ListModel] = {}
        for kind in KINDS:
            name, found = config.find_name(kind), self._list(kind)
            if name is not None and name not in found:
                raise ConfigError(
                    f"there is no exported {kind} model of that name",
                    received=name,
                    allowed=", ".join(found) or "none",
                    fix=did_you_mean(name, found),
                )
        for name in self._list("ranking"):
            self.check_version(store.get(name))
        for kind in KINDS:
            if self._find_name(kind) is None and len(names := self._list(kind)) > 1:
                _log.warning("/v1/recommend refuses requests: %s", _ask_for_one(kind, names))

    def check_version(self, version: ServedVersion) -> None:
        """Refuses a new version with which the ranking model could not order the lists.

        Raises:
            ConfigError: It could not, and was named, or would be asked for each list.
        """
        retrieval, ranker = (self._find_with(kind, version) for kind in KINDS)
        if ranker is None or version not in (retrieval, ranker):
            return
        if self._config.ranker is None and retrieval is None:
            return  # It answers for itself, and orders nothing.
        if (reason := explain_no_ranking(ranker, retrieval)) is not None:
            beside = "" if version is ranker else f", beside {_name(version)},"
            raise ConfigError(
                f"ranking model {_name(ranker)}{beside or ','} cannot order lists",
                received=reason,
                fix="name another one by --ranker, go back to an earlier version by `sluice models "
                "rollback`, or give --no-ranker: lists of the retrieval model alone",
            )

    def choose(self) -> tuple[ListModel | None, ListModel | None]:
        """Returns what retrieves and what ranks.

        Raises:
            RequestError: There is neither, or there are several.
        """
        retrieval, ranker = (self._choose(kind) for kind in KINDS)
        if ranker is not None and RANK_ITEMS not in ranker.signatures:
            ranker = None  # It is alone: else it was refused when it was loaded.
        if retrieval is None and ranker is None:
            raise RequestError(self._explain_none(), NOT_FOUND)
        return self._prepare(retrieval), self._prepare(ranker)

    def _prepare(self, version: ServedVersion | None) -> ListModel | None:
        if version is None:
            return None
        kept = self._kept.get(version.name)
        if kept is None or kept.version is not version:
            kept = self._kept[version.name] = ListModel(version)
        return kept

    def _choose(self, kind: str) -> ServedVersion | None:
        if (name := self._find_name(kind)) is not None:
            return self._store.get(name)
        if (names := self._list(kind)) and self._is_asked(kind):
            raise RequestError(_ask_for_one(kind, names))
        return None

    def _is_asked(self, kind: str) -> bool:
        return kind == "retrieval" or self._config.is_ranked

    def _list(self, kind: str) -> list[str]:
        return [n for n in self._store.names if self._store.get(n).card["kind"] == kind]

    def _find_name(self, kind: str) -> str | None:
        """Returns the model of a kind that answers; None: there is none, or there are several."""
        if not self._is_asked(kind):
            return None
        if len(names := self._list(kind)) == 1:
            self._names.setdefault(kind, names[0])
        return self._config.find_name(kind) or self._names.get(kind)

    def _find_with(self, kind: str, version: ServedVersion) -> ServedVersion | None:
        """Returns what would answer if a new version took its place."""
        name, is_kind = self._find_name(kind), version.card["kind"] == kind
        if is_kind and (name == version.name or (name is None and not self._list(kind))):
            return version if self._is_asked(kind) else None
        return None if name is None else self._store.get(name)

    def _explain_none(self) -> str:
        """Says of each ranking model why it orders no items; there is no retrieval model."""
        models = [self._store.get(name) for name in self._store.names]
        unused = "the server was started with --no-ranker"
        reasons = [f"{one.name}: {explain_no_ranking(one, None) or unused}" for one in models]
        return f"no model of the server recommends items: {'; '.join(reasons)}"


def _name(version: ServedVersion) -> str:
    return f"{version.name}, version {version.number}"


def _ask_for_one(kind: str, names: Sequence[str]) -> str:
    option = "--retrieval" if kind == "retrieval" else "--ranker"
    return f"several {kind} models answer: {', '.join(names)}; start the server with {option}"


def explain_no_ranking(ranker: ServedVersion, retrieval: ServedVersion | None) -> str | None:
    """Says why a ranking model cannot order lists; None: it can.

    Args:
        ranker: The ranking model.
        retrieval: What finds the items; None: the ranking model orders its catalogue.
    """
    if RANK_ITEMS not in ranker.signatures:
        return f"no signature {RANK_ITEMS}, as {ranker.card['no_item_scores']}"
    if ranker.known is None:
        return "its export holds no items"
    if retrieval is None or retrieval.known is None:
        return None
    name, keys = find_items_input(ranker.card), retrieval.known.keys
    spec = ranker.find_specs(RANK_ITEMS)[name]
    if keys and isinstance(keys[0], str) != (spec.dtype == tf.string):
        kind = "text" if isinstance(keys[0], str) else "whole numbers"
        return f"its input {name} is {spec.dtype.name}, and keys of {retrieval.name} are {kind}"
    if ranker.known.position_of.keys().isdisjoint(retrieval.known.position_of):
        return f"it knows none of the items of {retrieval.name}"
    return None
