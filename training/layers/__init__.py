"""Building blocks of models: pooling, towers, losses."""
