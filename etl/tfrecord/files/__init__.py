"""TFRecord files: where they lie, how they are framed, written, listed and split."""
