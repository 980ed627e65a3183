"""Data quality: the contract of a version, statistics, drift, leakage, train/serve skew."""
