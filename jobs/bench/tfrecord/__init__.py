"""Measures the TFRecord wire: the codec on one core, Spark end to end, and scale."""
