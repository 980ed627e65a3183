"""Encoders: raw columns to features, with vocabularies fitted on the train split alone."""
