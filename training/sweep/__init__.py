"""Many runs over a space of configs, by Optuna."""

from training.sweep.runner import SweepResult, run_sweep

__all__ = ["SweepResult", "run_sweep"]
