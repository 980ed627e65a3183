"""The encoder of a vocabulary: known tokens to their ids, unknown ones to OOV or its buckets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from conf.encoders import VocabularySpec
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.buffers import to_arrow, valid_mask
from etl.encoders.hashed import hash_to_buckets
from etl.encoders.lookup import build_lookup
from etl.encoders.vocabulary import RETIRED_COLUMN


class TokenEncoder:
    """Ids of tokens.

    Args:
        spec: The plan's entry.
        table: The vocabulary.

    Raises:
        InputDataError: The table holds a null or a token twice.
    """

    output_type = pa.int64()

    def __init__(self, spec: VocabularySpec, table: pa.Table) -> None:
        retired = None
        if RETIRED_COLUMN in table.schema.names:
            retired = table[RETIRED_COLUMN].to_numpy()
        self._lookup = build_lookup(table["token"], spec.first_token_id, retired)
        self._oov_buckets = spec.oov_buckets

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes tokens `[values]` to int64 ids `[values]`; null is always `OOV_ID`."""
        if self._oov_buckets is None:
            return self._lookup.encode(values)
        values = self._lookup.cast(values)
        ids = self._lookup.encode(values).to_numpy().copy()
        unknown = (ids == OOV_ID) & valid_mask(values)
        if unknown.any():
            rest = values.filter(pa.array(unknown))
            ids[unknown] = hash_to_buckets(rest, self._oov_buckets) + FIRST_TOKEN_ID
        return to_arrow(np.ascontiguousarray(ids))
