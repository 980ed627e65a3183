"""Two small models to serve, one that retrieves and one that ranks, and a row for them."""

from __future__ import annotations

TOWERS = {"name": "dssm", "user_hidden_units": [6], "embedding_dim": 6}
SCORES = {
    "kind": "ranking", "network": "shared_bottom", "embedding_dim": 4,
    "embedding_stddev": 1.0,
    "tasks": {"click": {"label": "label"},
              "value": {"label": "label", "objective": "squared_error"}},
}  # fmt: skip
PAD = -(2**63)
ROW = {"user_id": 1003, "gender": "F", "history": [101, 105, PAD], "movie_id": 107,
       "genres": ["genre_1", "<sluice:pad>"]}  # fmt: skip
