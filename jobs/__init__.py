"""Entry points: each module parses a config, calls one side, logs, returns an exit code."""

from sluice_recsys import refuse_hidden_packages

refuse_hidden_packages()  # `python -m jobs.train`, too, may run beside a folder named `conf`
