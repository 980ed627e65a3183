"""Embedding tables, static and dynamic, and the optimizers that touch only a batch's rows."""
