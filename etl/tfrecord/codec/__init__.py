"""The record codec: Arrow columns ⇄ bytes of `tf.train.Example`, compiled by numba."""
