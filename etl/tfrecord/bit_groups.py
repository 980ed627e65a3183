"""The 7-bit groups of varints: taken together from eight bytes, and spread over eight bytes.

BMI2's `pext` and `pdep` do either at once; elsewhere three steps of masks and shifts do.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from etl.tfrecord.kernels import inlined, intrinsic

_GROUPS = 0x7F7F7F7F7F7F7F7F
# Their `pext` and `pdep` are microcode of up to some hundred steps.
_SLOW_CPUS = ("znver1", "znver2", "bdver4")


def _build_instruction(name: str) -> Callable[..., Any]:
    """Wraps an LLVM intrinsic of a word and a mask, the mask being that of the groups."""

    @intrinsic
    def apply(typingctx: Any, word: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            integer = ir.IntType(64)
            function = builder.module.declare_intrinsic(
                name, (), ir.FunctionType(integer, [integer, integer])
            )
            return builder.call(function, [args[0], integer(_GROUPS)])

        return types.uint64(types.uint64), codegen

    return apply


@inlined
def _gather_by_shifts(word):
    word &= np.uint64(_GROUPS)
    word = (word & np.uint64(0x007F007F007F007F)) | (
        (word & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    word = (word & np.uint64(0x00003FFF00003FFF)) | (
        (word & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    return (word & np.uint64(0x000000000FFFFFFF)) | (
        (word & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )


@inlined
def _spread_by_shifts(value):
    value &= np.uint64(0x00FFFFFFFFFFFFFF)
    value = (value & np.uint64(0x000000000FFFFFFF)) | (
        (value & np.uint64(0x00FFFFFFF0000000)) << np.uint64(4)
    )
    value = (value & np.uint64(0x00003FFF00003FFF)) | (
        (value & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
    )
    return (value & np.uint64(0x007F007F007F007F)) | (
        (value & np.uint64(0x3F803F803F803F80)) << np.uint64(1)
    )


def select_groups(
    triple: str, features: dict[str, bool], cpu: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Picks the fastest implementation for a CPU.

    Args:
        triple: LLVM target triple, e.g. `x86_64-unknown-linux-gnu`.
        features: CPU features by LLVM name.
        cpu: LLVM's name of the CPU.

    Returns:
        Two kernels uint64 -> uint64: joins the low seven bits of each byte to 56 bits, and
        spreads the low 56 bits over eight bytes.
    """
    if triple.startswith("x86_64") and features.get("bmi2") and cpu not in _SLOW_CPUS:
        return (
            _build_instruction("llvm.x86.bmi.pext.64"),
            _build_instruction("llvm.x86.bmi.pdep.64"),
        )
    return _gather_by_shifts, _spread_by_shifts


gather_groups, spread_groups = select_groups(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features()), llvm.get_host_cpu_name()
)
