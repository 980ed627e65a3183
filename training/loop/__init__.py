"""The training loop: steps, optimizers, epochs, stopping, warm start."""
