"""Networks of sequence models, by the name of their config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras

from conf.training.models import BSTConfig, ComiRecConfig, GRUConfig, HSTUConfig, SASRecConfig
from training.networks.hstu import SequenceTimes, build_hstu
from training.networks.sequences import (
    UserSequence,
    build_bst_encoder,
    build_comirec,
    build_gru,
    build_sasrec,
)


@dataclass(frozen=True)
class SequenceNetwork:
    """A network over a user's sequence.

    Attributes:
        build: From the sequence, when its items were met (None: that is not read) and the model's
            config to `[batch, length, dim]` if it looks back; else to `[batch, dim]`, or
            `[batch, interests, dim]`.
        looks_back: Whether a position reads itself and what came before alone, so that each has a
            vector of the user. The config then says by `every_position` if each is trained.
        is_grouped: Whether rows of like length are worth a computation of their own.
    """

    build: Callable[..., keras.KerasTensor]
    looks_back: bool = True
    is_grouped: bool = True


def _build_sasrec(
    sequence: UserSequence, _times: SequenceTimes | None, config: SASRecConfig
) -> keras.KerasTensor:
    return build_sasrec(
        sequence,
        blocks=config.blocks,
        heads=config.heads,
        feed_forward_units=config.feed_forward_units,
        dropout=config.dropout,
        is_gated=config.block == "ligr",
    )


def _build_hstu(
    sequence: UserSequence, times: SequenceTimes | None, config: HSTUConfig
) -> keras.KerasTensor:
    return build_hstu(
        sequence, times, blocks=config.blocks, heads=config.heads, dropout=config.dropout
    )


def _build_gru(
    sequence: UserSequence, _times: SequenceTimes | None, config: GRUConfig
) -> keras.KerasTensor:
    return build_gru(sequence, layers=config.layers, dropout=config.dropout)


def _build_bst(
    sequence: UserSequence, _times: SequenceTimes | None, config: BSTConfig
) -> keras.KerasTensor:
    return build_bst_encoder(
        sequence,
        blocks=config.blocks,
        heads=config.heads,
        feed_forward_units=config.feed_forward_units,
        dropout=config.dropout,
    )


def _build_comirec(
    sequence: UserSequence, _times: SequenceTimes | None, config: ComiRecConfig
) -> keras.KerasTensor:
    return build_comirec(
        sequence,
        interests=config.interests,
        attention_units=config.attention_units,
        dropout=config.dropout,
    )


SEQUENCE_NETWORKS: dict[str, SequenceNetwork] = {
    "sasrec": SequenceNetwork(_build_sasrec),
    "hstu": SequenceNetwork(_build_hstu),
    # A GRU goes over positions one after the other, in each group anew; ComiRec is quick.
    "gru": SequenceNetwork(_build_gru, is_grouped=False),
    "bst": SequenceNetwork(_build_bst, looks_back=False),
    "comirec": SequenceNetwork(_build_comirec, looks_back=False, is_grouped=False),
}
