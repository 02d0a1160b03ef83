"""The inner product of the fast path: six rows times two vectors of columns, held in registers.

Written in LLVM's own instructions, because numba turns a loop over an array into loads and stores.
Every product is one chain of multiply-adds over d, whatever tile it falls in: its value does not
depend on the lists' lengths, their order or the chunk. numba keeps what it compiled by the date of
`loops.py`: touch that file after a change here. Needs numba; see `selection`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE_ROWS = 6
"""Rows of a tile: 12 sums, 2 vectors of columns and a number of a row fill 16 registers."""
_emitted: Any = intrinsic
_BYTES = 32
"""Of a vector."""


def tile_columns(dtype: Any) -> int:
    """Columns of a tile: two vectors."""
    return 2 * _BYTES // np.dtype(dtype).itemsize


def _pointer(
    context: Any, builder: Any, kind: Any, array: Any, offset: Any, target: Any = None
) -> Any:
    """&array[offset] of a flat array."""
    data = context.make_array(kind)(context, builder, array).data
    found = builder.gep(data, [offset])
    return found if target is None else builder.bitcast(found, ir.PointerType(target))


@_emitted
def multiply_tile(
    typingctx: Any,
    rows: Any,
    starts: Any,
    columns: Any,
    start: Any,
    depth: Any,
    bound: Any,
    out: Any,
) -> Any:
    """out[6 x width] = six rows times `width` columns; and where |out| reaches bound, as bits.

    Row r is rows[starts[r] : starts[r] + depth]; columns[start:] is [depth, width]. Of the two
    integers returned, bit r * width + c is that of row r (r - 3 in the second), column c; it is set
    for NaN.
    """
    kind = rows.dtype
    pair = types.UniTuple(types.uint64, 2)
    signature = pair(
        rows, types.UniTuple(types.int64, TILE_ROWS), columns, types.int64, types.int64, kind, out
    )

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, starts, columns, start, depth, bound, out = arguments
        number = context.get_value_type(kind)
        lanes = _BYTES * 8 // kind.bitwidth
        vector, align = ir.VectorType(number, lanes), kind.bitwidth // 8
        integer = ir.IntType(64)
        zero = ir.Constant(vector, None)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)

        def spread(value: Any) -> Any:
            one = builder.insert_element(
                ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
            )
            return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

        fma = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector] * 3),
            f"llvm.fmuladd.v{lanes}f{kind.bitwidth}",
        )
        fabs = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector]), f"llvm.fabs.v{lanes}f{kind.bitwidth}"
        )
        at = [
            _pointer(context, builder, signature.args[0], rows, offset)
            for offset in cgutils.unpack_tuple(builder, starts)
        ]
        base = _pointer(context, builder, signature.args[2], columns, start, vector)

        before = builder.basic_block
        loop = builder.append_basic_block("depth")
        after = builder.append_basic_block("tile")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(integer)
        step.add_incoming(ir.Constant(integer, 0), before)
        sums = [builder.phi(vector) for _ in range(2 * TILE_ROWS)]
        twice = builder.shl(step, ir.Constant(integer, 1))
        both = [
            builder.load(builder.gep(base, [builder.add(twice, ir.Constant(integer, i))]))
            for i in range(2)
        ]
        for load in both:
            load.align = align
        added = []
        for r in range(TILE_ROWS):
            value = spread(builder.load(builder.gep(at[r], [step])))
            added += [builder.call(fma, [value, both[i], sums[2 * r + i]]) for i in range(2)]
        following = builder.add(step, ir.Constant(integer, 1))
        for total, new in zip(sums, added, strict=True):
            total.add_incoming(zero, before)
            total.add_incoming(new, loop)
        step.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
        builder.position_at_end(after)

        target = _pointer(context, builder, signature.args[6], out, ir.Constant(integer, 0), vector)
        limit = spread(bound)
        words = []
        for half in range(2):
            word = ir.Constant(integer, 0)
            for i in range(TILE_ROWS):
                total = added[half * TILE_ROWS + i]
                where = builder.gep(target, [ir.Constant(integer, half * TILE_ROWS + i)])
                builder.store(total, where).align = align
                reached = builder.fcmp_unordered(">=", builder.call(fabs, [total]), limit)
                bits = builder.zext(builder.bitcast(reached, ir.IntType(lanes)), integer)
                word = builder.or_(word, builder.shl(bits, ir.Constant(integer, i * lanes)))
            words.append(word)
        return context.make_tuple(builder, signature.return_type, words)

    return signature, build


@_emitted
def lowest_bit(typingctx: Any, word: Any) -> Any:
    """Index of the lowest bit that is set; the word is not 0."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


@_emitted
def fetch_rows(typingctx: Any, rows: Any, starts: Any, depth: Any) -> Any:
    """Ask for the six rows of `multiply_tile`, so that they are in the cache when they are
    needed."""
    kind = rows.dtype
    signature = types.void(rows, types.UniTuple(types.int64, TILE_ROWS), types.int64)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, starts, depth = arguments
        integer, number = ir.IntType(64), ir.IntType(32)
        at = [
            _pointer(context, builder, signature.args[0], rows, offset)
            for offset in cgutils.unpack_tuple(builder, starts)
        ]
        step = ir.Constant(integer, 64 * 8 // kind.bitwidth)
        ask = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), *[number] * 3]),
            "llvm.prefetch.p0",
        )
        with cgutils.for_range_slice(builder, ir.Constant(integer, 0), depth, step) as (i, _):
            for row in at:
                where = builder.bitcast(builder.gep(row, [i]), ir.PointerType(ir.IntType(8)))
                builder.call(ask, [where, *(ir.Constant(number, code) for code in (0, 2, 1))])
        return context.get_dummy_value()

    return signature, build
