"""Training steps: what a large table costs, and how they compare with stock Keras."""
