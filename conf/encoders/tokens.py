"""Encodings of tokens by a vocabulary, and of values as they are: neither needs an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from conf.encoders.declaration import MAX_BUCKETS, Encoding, Options, key

if TYPE_CHECKING:
    from conf.config_base import Name


class TopPerGroupConfig(Options):
    """Keeps the most frequent tokens of each group, so that a small group is not crowded out."""

    column: str = key(description="Column of the event whose values are the groups.")
    k: int = key(ge=1, description="Tokens kept of each group.")


class TokensConfig(Encoding):
    """The tokens of the train split that a vocabulary holds."""

    name: Name | None = key(None, description="Vocabulary to share; None: one of its own.")
    min_count: int = key(
        1, ge=1, description="Tokens with fewer occurrences in the train split are left out."
    )
    max_size: int | None = key(None, ge=1, description="Most frequent tokens kept.")
    top_per_group: TopPerGroupConfig | None = None
    path: str | None = key(
        None,
        min_length=1,
        description="File of the tokens by rising id, in the place of those of the train "
        "split: text, one on each line, or Parquet with a column `token`.",
    )

    def check(self) -> None:
        """Refuses limits of tokens that are given."""
        if self.path is not None and (self.min_count > 1 or self.max_size or self.top_per_group):
            raise ValueError(
                "`path` gives all tokens: leave `min_count`, `max_size` and `top_per_group` out"
            )


class VocabularyConfig(TokensConfig):
    """A vocabulary fitted on the train split: 0 pad, 1 OOV, then by falling frequency."""

    kind: Literal["vocabulary"] = "vocabulary"
    oov_buckets: int | None = key(
        None, ge=1, le=MAX_BUCKETS, description="Ids that unknown tokens are hashed to."
    )
    incremental: bool = key(
        False, description="Keep the ids of the previous version; append what is new."
    )
    expire_after_days: int | None = key(
        None, ge=1, description="Retire tokens not seen for longer than this; incremental only."
    )

    def check(self) -> None:
        """Refuses what only a vocabulary that grows may have."""
        super().check()
        if self.expire_after_days is not None and not self.incremental:
            raise ValueError("`expire_after_days` needs `incremental: true`")
        if self.incremental and self.path is not None:
            raise ValueError("`path` gives all tokens: leave `incremental` out")


class IdentityConfig(Encoding):
    """The value as it is, cast to the feature's type."""

    kind: Literal["identity"] = "identity"
