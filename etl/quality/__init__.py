"""Data quality: the contract that a version must keep, drift, leakage, train/serve skew."""
