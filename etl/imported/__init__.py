"""TFRecord files of others, as a dataset version: found, read through, described."""
