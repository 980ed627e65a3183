"""CRC-32C of long buffers by folding, 64 bytes at a time (VPCLMULQDQ on AVX-512).

A message's remainder does not change when 128 bits of it are replaced by their product with a
power of x, added to what lies that far behind (Gopal et al., Fast CRC Computation for Generic
Polynomials Using PCLMULQDQ Instruction, Intel, 2009). Four registers of four such lanes each fold
independently of each other; what is left in the end goes through the CRC instruction.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from etl.tfrecord.kernels import inlined, intrinsic

BLOCK_BYTES = 64
_NEEDED = ("avx512f", "vpclmulqdq", "sse4.2")
_POLYNOMIAL = 0x82F63B78  # bit-reflected
_CHAINS = 4

_WORD, _WORDS = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)


def _power(exponent: int) -> int:
    """x**exponent modulo the polynomial, in a reflected 64-bit word."""
    register = 1 << 31
    for _ in range(exponent):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register << 32


def _factors(*distances: int) -> Any:
    """A register of the factors that move each of four lanes by so many bits; 0 for none."""
    # A product of reflected words is one bit short of a lane: hence the exponents' - 1.
    pairs = [(_power(d + 63), _power(d - 1)) if d else (0, 0) for d in distances]
    return ir.Constant(_WORDS, [word for pair in pairs for word in pair])


def _fold(builder: Any, register: Any, factors: Any) -> Any:
    byte = ir.IntType(8)
    function = builder.module.declare_intrinsic(
        "llvm.x86.pclmulqdq.512", (), ir.FunctionType(_WORDS, [_WORDS, _WORDS, byte])
    )
    low, high = (builder.call(function, [register, factors, byte(i)]) for i in (0x00, 0x11))
    return builder.xor(low, high)


def _finish(builder: Any, register: Any) -> Any:
    """The CRC register, uint32, that a register of four lanes stands for."""
    moved = _fold(builder, register, _factors(384, 256, 128, 0))
    index = ir.IntType(32)
    crc_type = ir.FunctionType(_WORD, [_WORD, _WORD])
    advance = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), crc_type)
    crc = _WORD(0)
    for half in (0, 1):
        word = builder.extract_element(register, index(6 + half))
        for lane in (0, 1, 2):
            word = builder.xor(word, builder.extract_element(moved, index(2 * lane + half)))
        crc = builder.call(advance, [crc, word])
    return builder.trunc(crc, index)


@intrinsic
def _fold_blocks(typingctx: Any, crc: Any, address: Any, blocks: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        crc, address, blocks = args
        source = builder.inttoptr(address, _WORDS.as_pointer())

        def load(index: Any) -> Any:
            return builder.load(builder.gep(source, [index]), align=1)

        zero = ir.IntType(32)(0)
        seed = builder.insert_element(ir.Constant(_WORDS, None), builder.zext(crc, _WORD), zero)
        chains = [load(_WORD(i)) for i in range(_CHAINS)]
        chains[0] = builder.xor(chains[0], seed)
        places = [cgutils.alloca_once_value(builder, chain) for chain in chains]
        far, near = _factors(*[512 * _CHAINS] * 4), _factors(*[512] * 4)
        rounds = builder.udiv(blocks, _WORD(_CHAINS))
        with cgutils.for_range(builder, rounds, start=_WORD(1)) as loop:
            first = builder.mul(loop.index, _WORD(_CHAINS))
            for i, place in enumerate(places):
                moved = _fold(builder, builder.load(place), far)
                data = load(builder.add(first, _WORD(i)))
                builder.store(builder.xor(moved, data), place)
        joined = builder.load(places[0])
        for place in places[1:]:
            joined = builder.xor(_fold(builder, joined, near), builder.load(place))
        last = cgutils.alloca_once_value(builder, joined)
        done = builder.mul(rounds, _WORD(_CHAINS))
        with cgutils.for_range(builder, blocks, start=done) as loop:
            moved = _fold(builder, builder.load(last), near)
            builder.store(builder.xor(moved, load(loop.index)), last)
        return _finish(builder, builder.load(last))

    return types.uint32(types.uint32, types.int64, types.int64), codegen


@inlined
def _keep(crc, address, blocks):
    return np.uint32(crc)


def select_fold(triple: str, features: dict[str, bool]) -> tuple[Callable[..., Any], int]:
    """Picks what a CPU can do.

    Args:
        triple: LLVM target triple.
        features: CPU features by LLVM name.

    Returns:
        The kernel `(register, address, blocks) -> register`, which advances a CRC register past
        blocks of `BLOCK_BYTES`, and the length in bytes from which on it is to be used.
    """
    if triple.startswith("x86_64") and all(features.get(name) for name in _NEEDED):
        return _fold_blocks, 16 * BLOCK_BYTES
    return _keep, 1 << 62  # never


fold_blocks, MIN_FOLDED_BYTES = select_fold(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
)
