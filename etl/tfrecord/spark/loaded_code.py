"""What a Python worker of Spark has loaded, kept out of its garbage collections.

After every task Spark's worker collects garbage in full, which looks at each object of NumPy,
Arrow, Numba and PySpark again: 30 ms and more, whatever the task did. So do the processes that look
a format up, plan and commit, 20 ms each: Spark keeps them too.
"""

from __future__ import annotations

import gc
import sys

_PLANNERS = "pyspark.sql.worker."  # what their modules are called by


class _Frozen:
    modules = 0


def freeze_planner() -> None:
    """Does so in a process of Spark's that plans; nothing where a user calls the same code."""
    if any(name.startswith(_PLANNERS) for name in sys.modules):
        freeze_loaded_code()


def freeze_loaded_code() -> None:
    """Moves all that is loaded out of sight of later collections, once for the same modules.

    To be called at the end of a task, when all that tasks of its kind use has been loaded. What is
    garbage is collected before; objects without cycles go on to be freed when nobody holds them.
    """
    if len(sys.modules) == _Frozen.modules:
        return
    _Frozen.modules = len(sys.modules)
    gc.collect()
    gc.freeze()
