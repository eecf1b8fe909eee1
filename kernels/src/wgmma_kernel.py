"""The device side of `wgmma`: one program for each tile of rows, all of K, no warps apart.

Each thread copies just those 16 bytes of a plane that it decodes itself, so weights need no barrier; activations, which
all share, cost one for each step.  The first stages of weights are asked for before anything else, and the escapes'
products are summed while they are on their way: 64 escapes at a time are 64 columns of a matrix that is zero elsewhere,
multiplied by the columns of x that they need.

An asynchronous MMA with A in registers reads them after it was issued, while the compiler takes them as free.  So it is
waited for before the next stage is decoded (`stream_kernel`); the copies, the barrier and the other warp group fill the
time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .gluon_words import decode_words, operand, words_layout

# Triton 3.6 and later ones have different names, and orders of arguments.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_NEW = gl.constexpr(hasattr(async_copy, "async_load"))
_copy = async_copy.async_copy_global_to_shared
_load = getattr(async_copy, "async_load", _copy)


@gluon.jit
def _to_shared(destination, pointers, mask):
    if _NEW:
        _load(destination, pointers, mask=mask)
    else:
        _copy(destination, pointers, mask=mask)


@gluon.jit
def _ask_for_planes(
    destination, planes_ptr, tile, step, strips, units, first: gl.constexpr, PLANES: gl.constexpr,
    STRIPS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """A stage's planes from number ``first``, in one copy: between two to one buffer the compiler puts a barrier."""
    COPY: gl.constexpr = words_layout(STRIPS, UNITS * PLANES * 16 * STRIPS)
    row = gl.arange(0, UNITS * PLANES * 16 * STRIPS, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))
    strip = tile * STRIPS + row // 16 % STRIPS
    unit = step * UNITS + row // (16 * STRIPS * PLANES)
    plane = first + row // (16 * STRIPS) % PLANES
    at = (strip.to(gl.int64) * units + unit) * 1536 + plane * 512 + row % 16 * 32
    # What isn't there is zero.
    mask = ((strip < strips) & (unit < units))[:, None] & (word >= 0)[None, :]
    _to_shared(destination, planes_ptr + at[:, None] + word[None, :], mask)


@gluon.jit
def _ask_for_weights(
    nibbles, low, planes_ptr, tile, step, strips, units,
    STRIPS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _ask_for_planes(nibbles.index(step % STAGES), planes_ptr, tile, step, strips, units, 0, 1, STRIPS, UNITS)
    _ask_for_planes(low.index(step % STAGES), planes_ptr, tile, step, strips, units, 1, 2, STRIPS, UNITS)


@gluon.jit
def _ask_for_activations(
    stages, x_ptr, step, M, K, stride,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, UNITS * BLOCK_M, layout=gl.SliceLayout(1, ROWS))
    m = row % BLOCK_M
    k = (step * UNITS + row // BLOCK_M)[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))[None, :]
    _to_shared(stages.index(step % STAGES), x_ptr + m[:, None].to(gl.int64) * stride + k, (m < M)[:, None] & (k < K))


@gluon.jit
def _decode(
    nibbles, low, slot, unit: gl.constexpr, table0, table1, STRIPS: gl.constexpr, WORDS: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = 16 * STRIPS
    low = low.index(slot)
    return decode_words(
        nibbles.index(slot).slice(unit * ROWS, ROWS).load(WORDS), low.slice(2 * unit * ROWS, ROWS).load(WORDS),
        low.slice((2 * unit + 1) * ROWS, ROWS).load(WORDS), table0, table1,
    )  # fmt: skip


@gluon.jit
def _column_of(at_ptr, e, end, ESCAPES: gl.constexpr):
    """The column of x that each of 64 escapes needs."""
    e += gl.arange(0, 64, layout=gl.SliceLayout(0, ESCAPES))
    return gl.load(at_ptr + e, mask=e < end, other=0) >> 6


@gluon.jit
def _gather(x_ptr, column, e, end, M, stride, BLOCK_M: gl.constexpr, ESCAPES: gl.constexpr):
    """Columns of x, [BLOCK_M, 64]."""
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ESCAPES))
    e += gl.arange(0, 64, layout=gl.SliceLayout(0, ESCAPES))
    return gl.load(
        x_ptr + m[:, None].to(gl.int64) * stride + column[None, :],
        mask=(m < M)[:, None] & (e < end)[None, :],
        other=0.0,
    )


@gluon.jit
def _sparse(at_ptr, value_ptr, e, next_strip, end, STRIPS: gl.constexpr, A: gl.constexpr):
    """Of 64 escapes a matrix [64 STRIPS, 64], with each in its row."""
    e += gl.arange(0, 64, layout=gl.SliceLayout(0, A))
    row = (gl.load(at_ptr + e, mask=e < end, other=0) & 63) + gl.where(e >= next_strip, 64, 0)
    value = gl.load(value_ptr + e, mask=e < end, other=0)
    rows = gl.arange(0, 64 * STRIPS, layout=gl.SliceLayout(1, A))
    return gl.where(rows[:, None] == row[None, :], value[None, :], 0).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit(do_not_specialize=["M", "N", "strips", "units"])
def wgmma_kernel(
    y_ptr, x_ptr, planes_ptr, bias_ptr, tables_ptr, start_ptr, at_ptr, value_ptr, M, N, eighth_k, eighth_stride,
    strips, units,
    BLOCK_M: gl.constexpr, STRIPS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = words_layout(STRIPS, 16 * STRIPS)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    # Lanes along x's rows: those of one column lie far apart whatever the order, and loads of one escape are equal.
    ESCAPES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    nibbles = gl.allocate_shared_memory(gl.int32, [STAGES, UNITS * 16 * STRIPS, 32], PLAIN)
    low = gl.allocate_shared_memory(gl.int32, [STAGES, UNITS * 32 * STRIPS, 32], PLAIN)
    stages = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, UNITS * BLOCK_M, 64],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    # So that the compiler knows them for multiples of 8, and copies 16 bytes at a time.
    K = eighth_k * 8
    stride = eighth_stride * 8
    tile = gl.program_id(0)
    steps = (units + UNITS - 1) // UNITS
    for s in gl.static_range(STAGES - 2):
        _ask_for_weights(nibbles, low, planes_ptr, tile, s, strips, units, STRIPS, UNITS, STAGES)
    # Weights, and lists of escapes, don't depend on the kernel before this one.
    first = tile * STRIPS
    begin = gl.load(start_ptr + first * units)
    next_strip = gl.load(start_ptr + gl.minimum(first + 1, strips) * units)
    end = gl.load(start_ptr + gl.minimum(first + STRIPS, strips) * units)
    here = gl.minimum(first + gl.arange(0, 16 * STRIPS, layout=gl.SliceLayout(1, WORDS)) // 16, strips - 1)
    none = gl.full([16 * STRIPS, 32], 0, gl.int32, layout=WORDS)
    table0 = none + gl.load(tables_ptr + here * 2)[:, None]
    table1 = none + gl.load(tables_ptr + here * 2 + 1)[:, None]
    columns0 = _column_of(at_ptr, begin, end, ESCAPES)
    columns1 = _column_of(at_ptr, begin + 64, end, ESCAPES)
    columns2 = _column_of(at_ptr, begin + 128, end, ESCAPES)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    for s in gl.static_range(STAGES - 2):
        _ask_for_activations(stages, x_ptr, s, M, K, stride, BLOCK_M, UNITS, STAGES, ROWS)
        async_copy.commit_group()
    gathered0 = _gather(x_ptr, columns0, begin, end, M, stride, BLOCK_M, ESCAPES)
    gathered1 = _gather(x_ptr, columns1, begin + 64, end, M, stride, BLOCK_M, ESCAPES)
    gathered2 = _gather(x_ptr, columns2, begin + 128, end, M, stride, BLOCK_M, ESCAPES)
    # The last two stages are still free: for as many chunks as they have units.
    spare0 = stages.index(STAGES - 2)
    spare1 = stages.index(STAGES - 1)
    spare0.slice(0, BLOCK_M).store(gathered0)
    spare1.slice(0, BLOCK_M).store(gathered1)
    if UNITS == 2:
        spare1.slice(BLOCK_M, BLOCK_M).store(gathered2)
    fence_async_shared()
    _barrier()
    acc = gl.zeros([64 * STRIPS, BLOCK_M], gl.float32, layout=ACC)
    a = _sparse(at_ptr, value_ptr, begin, next_strip, end, STRIPS, A)
    acc = warpgroup_mma(a, spare0.slice(0, BLOCK_M).permute([1, 0]), acc, is_async=True)
    acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    if begin + 64 < end:
        a = _sparse(at_ptr, value_ptr, begin + 64, next_strip, end, STRIPS, A)
        acc = warpgroup_mma(a, spare1.slice(0, BLOCK_M).permute([1, 0]), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    if UNITS == 2:
        if begin + 128 < end:
            a = _sparse(at_ptr, value_ptr, begin + 128, next_strip, end, STRIPS, A)
            acc = warpgroup_mma(a, spare1.slice(BLOCK_M, BLOCK_M).permute([1, 0]), acc, is_async=True)
            acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    for more in range(begin + 64 * (UNITS + 1), end, 64):
        _barrier()
        column = _column_of(at_ptr, more, end, ESCAPES)
        spare0.slice(0, BLOCK_M).store(_gather(x_ptr, column, more, end, M, stride, BLOCK_M, ESCAPES))
        fence_async_shared()
        _barrier()
        a = _sparse(at_ptr, value_ptr, more, next_strip, end, STRIPS, A)
        acc = warpgroup_mma(a, spare0.slice(0, BLOCK_M).permute([1, 0]), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, deps=[acc, a])

    running = warpgroup_mma_init(acc)
    a = gl.zeros([64 * STRIPS, 64], gl.bfloat16, layout=A)
    b = gl.zeros([64 * STRIPS, 64], gl.bfloat16, layout=A)
    for step in range(steps):
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        _barrier()
        acc, a, b = warpgroup_mma_wait(0, deps=[running, a, b])
        slot = step % STAGES
        v0, v1, v2, v3 = _decode(nibbles, low, slot, 0, table0, table1, STRIPS, WORDS)
        w0, w1, w2, w3 = _decode(nibbles, low, slot, UNITS - 1, table0, table1, STRIPS, WORDS)
        a = operand(v0, v1, v2, v3, A, STRIPS)
        b = operand(w0, w1, w2, w3, A, STRIPS)
        ahead = step + STAGES - 2
        # Beyond the last step everything is masked, and nothing is copied.
        _ask_for_weights(nibbles, low, planes_ptr, tile, ahead, strips, units, STRIPS, UNITS, STAGES)
        _ask_for_activations(stages, x_ptr, ahead, M, K, stride, BLOCK_M, UNITS, STAGES, ROWS)
        async_copy.commit_group()
        x = stages.index(slot)
        running = warpgroup_mma(a, x.slice(0, BLOCK_M).permute([1, 0]), acc, is_async=True)
        if UNITS == 2:
            running = warpgroup_mma(b, x.slice(BLOCK_M, BLOCK_M).permute([1, 0]), running, is_async=True)
    acc, a, b = warpgroup_mma_wait(0, deps=[running, a, b])
    async_copy.wait_group(0)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    out = gl.convert_layout(acc, OUT)
    n = first * 64 + gl.arange(0, 64 * STRIPS, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        out += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    y = y_ptr + m[None, :].to(gl.int64) * N + n[:, None]
    gl.store(y, out.to(gl.bfloat16), mask=(m < M)[None, :] & (n < N)[:, None])
