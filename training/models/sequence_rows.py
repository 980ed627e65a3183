"""What a sequence model makes of a dataset's rows: its sequence, and the targets of each row."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list, has_sequences
from conf.schema import FeatureSpec
from conf.training.input import HeldOutConfig
from conf.training.models import ModelConfig, SequenceConfig
from training.models.dssm import select_features
from training.networks.sequence_registry import SEQUENCE_NETWORKS
from training.reader.feature_columns import list_length


def trains_everywhere(config: SequenceConfig) -> bool:
    """Whether each item of a history is a target, not the row's item alone."""
    looks_back = SEQUENCE_NETWORKS[config.name].looks_back
    return looks_back and bool(getattr(config, "every_position", False))


def compare_rows(config: SequenceConfig, manifest: Manifest) -> tuple[str, ...]:
    """Says that targets are lost, or repeat; nothing where the build did not make the histories."""
    build = manifest.source.config
    makes_histories = build.get("history") or build.get("histories")
    if not makes_histories:
        return ()
    if trains_everywhere(config) is has_sequences(build):
        return _compare_lengths(config, manifest)
    if not has_sequences(build):
        return (
            f"{config.name} learns each item of a history, and each event has a row with those "
            "before it: an item is a target many times in an epoch; build with train_samples, or "
            "set model.every_position=false",
        )
    return (
        f"{config.name} learns the item of a row alone, and rows stand for whole sequences "
        f"(train_samples: {build['train_samples']}): their other items are no targets; build with "
        "a row for each event (train_samples: all)",
    )


def _compare_lengths(config: SequenceConfig, manifest: Manifest) -> tuple[str, ...]:
    """Says that pieces of sequences overlap, or leave events between them."""
    samples = manifest.source.config.get("train_samples")
    length = list_length(find_lists(config, manifest)[0])
    if not isinstance(samples, int) or length in (None, samples):
        return ()
    if samples > length:
        return (
            f"of {samples} events (train_samples) a sequence holds {length} (max_len): the others "
            "are no targets; build with the same number for both",
        )
    return (
        f"a sequence holds {length} events (max_len), and begins anew every {samples} "
        "(train_samples): an event is the target of several rows; build with the same number for "
        "both",
    )


def require_held_out(
    model: ModelConfig, held_out: HeldOutConfig | None, manifest: Manifest
) -> None:
    """Refuses held-out rows that later rows' histories would train on, position by position.

    Raises:
        ConfigError: `input.validation` does not hold whole users out, and the histories of their
            later rows reach back to the held-out ones.
    """
    if held_out is None or not isinstance(model, SequenceConfig) or not trains_everywhere(model):
        return
    if set(held_out.key) == {manifest.keys.user} or not _reaches_back(model, held_out, manifest):
        return
    samples = manifest.source.config.get("train_samples", "all")
    raise ConfigError(
        f"{model.name} trains on every item of a history: a held-out row whose user has later "
        "ones is trained on all the same",
        received=f"input.validation.hash_of: {held_out.hash_of!r}, model.every_position: true, "
        f"rows by train_samples: {samples}",
        allowed="whole users: hash_of the user's feature; or rows that share no target: "
        "train_samples of the sequence's max_len or more",
        fix="hold users out, or set model.every_position=false",
    )


def _reaches_back(model: SequenceConfig, held_out: HeldOutConfig, manifest: Manifest) -> bool:
    """Whether rows have the targets of other rows of their user in their histories."""
    build = manifest.source.config
    made = [*(build.get("histories") or ()), *filter(None, [build.get("history")])]
    if all(history.get("within_session") for history in made):  # Or the rows bring their own.
        return manifest.keys.item in held_out.key
    samples = build.get("train_samples", "all")
    if not isinstance(samples, int):
        return not has_sequences(build)
    return samples < (list_length(find_lists(model, manifest)[0]) or 0)


def count_queries(config: SequenceConfig, manifest: Manifest) -> int:
    """Returns how many positions of a row are trained, padding included.

    Raises:
        ConfigError: The config names no sequence that the dataset has.
    """
    if not trains_everywhere(config):
        return 1
    return list_length(find_lists(config, manifest)[0]) or 1


def find_lists(config: SequenceConfig, manifest: Manifest) -> list[FeatureSpec]:
    """Returns the lists of the sequence, that of the items first, with their bounds."""
    names = config.sequence
    if names is None:
        history, several = manifest.find_history(), manifest.histories
        if history is None:
            raise ConfigError(
                "the model reads a sequence, and the dataset has "
                + ("several histories" if several else "no history"),
                received=", ".join(several) or None,
                allowed="keys.history, or model.sequence",
                fix=f"set model.sequence=[{several[0]}]"
                if several
                else "build the dataset with a history, or name a list in model.sequence",
            )
        names = (history,)
    found = select_features(manifest, config, names, "user", "model.sequence")
    return [bound_list(manifest, spec) for spec in found]


def require_length(interests: int, sequence: FeatureSpec) -> int:
    """Returns the number of interests, which the sequence has as many positions for.

    Raises:
        ConfigError: There are more interests than positions: some would always be alike.
    """
    length = list_length(sequence)
    if length is not None and interests > length:
        raise ConfigError(
            "each interest is made of items of the sequence, and there are more of them",
            received=f"model.interests = {interests}, {sequence.name}: {length} items at most",
            allowed=f"1 to {length}",
            fix="lower model.interests, or build the sequence with a larger max_len",
        )
    return interests
