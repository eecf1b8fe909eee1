"""The device side of `wgmma`: a warp group for up to 64 rows of W, all of K, no warps apart.

Each thread copies just those 16 bytes of a plane that it decodes itself, so weights need no barrier; activations, which
all share, cost one for each step.

Escapes come in the shadow of some steps, as in `mma_kernel`: a step multiplies a chunk of them, stores the next one's
columns of x, which have come from its transpose, and asks for those of the one after it.

An asynchronous MMA with A in registers reads them after it was issued, while the compiler takes them as free.  So it is
waited for before the next stage is decoded (`stream_kernel`); the copies, the barrier and the other program on the
multiprocessor fill the time.
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
from .mma_kernel import BEFORE

# Triton 3.6 and later ones have different names.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


# Stages


@gluon.jit
def _ask_for_planes(
    destination, weights, step, first: gl.constexpr, PLANES: gl.constexpr, UNITS: gl.constexpr
):  # fmt: skip
    """A stage's planes from number ``first``, in one copy: between two to one buffer the compiler puts a barrier."""
    planes_ptr, group, count, units = weights
    COPY: gl.constexpr = words_layout(1, UNITS * PLANES * 16)
    row = gl.arange(0, UNITS * PLANES * 16, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))
    mine = row // 4 % 4
    # Groups from the fifth of a strip on are in the next one.
    place = group % 4 + mine
    unit = step * UNITS + row // (16 * PLANES)
    at = (
        place // 4 * (units * 1536 - 512)
        + unit * 1536
        + (first + row // 16 % PLANES) * 512
        + place * 128
        + row % 4 * 32
    )
    # What isn't there is zero.
    mask = ((mine < count) & (unit < units))[:, None] & (word >= 0)[None, :]
    planes_ptr += (group // 4).to(gl.int64) * units * 1536
    _copy(destination, planes_ptr + at[:, None] + word[None, :], mask=mask)


@gluon.jit
def _ask_for_weights(nibbles, low, weights, step, UNITS: gl.constexpr, STAGES: gl.constexpr):
    _ask_for_planes(nibbles.index(step % STAGES), weights, step, 0, 1, UNITS)
    _ask_for_planes(low.index(step % STAGES), weights, step, 1, 2, UNITS)


@gluon.jit
def _ask_for_activations(
    stages, x_ptr, step, M, K, stride,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, UNITS * BLOCK_M, layout=gl.SliceLayout(1, ROWS))
    m = row % BLOCK_M
    k = (step * UNITS + row // BLOCK_M)[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))[None, :]
    _copy(stages.index(step % STAGES), x_ptr + m[:, None].to(gl.int64) * stride + k, mask=(m < M)[:, None] & (k < K))


@gluon.jit
def _decode(nibbles, low, slot, unit: gl.constexpr, table0, table1, WORDS: gl.constexpr):
    low = low.index(slot)
    return decode_words(
        nibbles.index(slot).slice(unit * 16, 16).load(WORDS), low.slice(unit * 32, 16).load(WORDS),
        low.slice(unit * 32 + 16, 16).load(WORDS), table0, table1,
    )  # fmt: skip


@gluon.jit
def _step(
    step, state, rings, weights, x, tables,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """Decode a stage when it has come, ask for another one, and begin to multiply."""
    running, a, b = state
    nibbles, low, stages = rings
    x_ptr, M, K, stride = x
    table0, table1 = tables
    async_copy.wait_group(STAGES - 3)
    fence_async_shared()
    _barrier()
    acc, a, b = warpgroup_mma_wait(0, deps=[running, a, b])
    slot = step % STAGES
    v0, v1, v2, v3 = _decode(nibbles, low, slot, 0, table0, table1, WORDS)
    w0, w1, w2, w3 = _decode(nibbles, low, slot, UNITS - 1, table0, table1, WORDS)
    a = operand(v0, v1, v2, v3, A)
    b = operand(w0, w1, w2, w3, A)
    ahead = step + STAGES - 2
    # Beyond the last step everything is masked, and nothing is copied.
    _ask_for_weights(nibbles, low, weights, ahead, UNITS, STAGES)
    _ask_for_activations(stages, x_ptr, ahead, M, K, stride, BLOCK_M, UNITS, STAGES, ROWS)
    async_copy.commit_group()
    columns = stages.index(slot)
    running = warpgroup_mma(a, columns.slice(0, BLOCK_M).permute([1, 0]), acc, is_async=True)
    if UNITS == 2:
        running = warpgroup_mma(b, columns.slice(BLOCK_M, BLOCK_M).permute([1, 0]), running, is_async=True)
    return running, a, b


# Escapes


@gluon.jit
def _ask_for_entries(lists, chunk, ESCAPES: gl.constexpr, GATHER: gl.constexpr):
    """Places and values of some entries.  Nothing is done with them here: that would wait."""
    at_ptr, value_ptr, first_of_next, last, above, rows = lists
    entry = chunk + gl.arange(0, ESCAPES, layout=gl.SliceLayout(1, GATHER))
    at = gl.load(at_ptr + entry, mask=entry < last, other=-1)
    return at, gl.load(value_ptr + entry, mask=entry < last, other=0)


@gluon.jit
def _look(
    lists, chunk, at, value, turned_ptr, ESCAPES: gl.constexpr, BLOCK_M: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """Columns of x from its transpose, [entry, m], and words of a row among the program's and a value.

    Beyond the list, and in rows of other programs, they are zero.
    """
    at_ptr, value_ptr, first_of_next, last, above, rows = lists
    entry = chunk + gl.arange(0, ESCAPES, layout=gl.SliceLayout(1, GATHER))
    row = (at & 63) + gl.where(entry < first_of_next, 0, 64) - above
    mine = (at >= 0) & (row >= 0) & (row < rows)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, GATHER))[None, :]
    column = gl.where(mine, at >> 6, -1)[:, None]
    columns = gl.load(turned_ptr + column * BLOCK_M + m, mask=(column >= 0) & (m >= 0), other=0.0)
    return columns, gl.where(mine, (row << 16) | (value.to(gl.int32) & 0xFFFF), 0)


@gluon.jit
def _put(gathered, placed, number, columns, words):
    gathered.index(number % 3).store(columns)
    placed.index(number % 3).permute([1, 0]).store(words[:, None])


@gluon.jit
def _in_rows(placed, number, A: gl.constexpr):
    """Values [64, entry], each in its row."""
    word = placed.index(number % 3).load(A)
    bits = gl.where(word >> 16 == gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None], word, 0)
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


# Kernel


@gluon.jit(do_not_specialize=["M", "N", "strips", "units", "groups", "longer"])
def wgmma_kernel(
    y_ptr, x_ptr, planes_ptr, bias_ptr, tables_ptr, start_ptr, at_ptr, value_ptr, turned_ptr, M, N,
    eighth_k, eighth_stride, strips, units, groups, longer,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = words_layout(1, 16)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # A column's numbers, 8 for a thread, and then the next one's.
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_M, BLOCK_M // 8], [4, 1], [1, 0])
    ESCAPES: gl.constexpr = max(1024 // BLOCK_M, 32)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    nibbles = gl.allocate_shared_memory(gl.int32, [STAGES, UNITS * 16, 32], PLAIN)
    low = gl.allocate_shared_memory(gl.int32, [STAGES, UNITS * 32, 32], PLAIN)
    stages = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, UNITS * BLOCK_M, 64],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    # Of this step, of the next one, and of the one before, which other warps may still be multiplying.
    gathered = gl.allocate_shared_memory(
        gl.bfloat16, [3, ESCAPES, BLOCK_M],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_M, element_bitwidth=16, rank=2),
    )  # fmt: skip
    placed = gl.allocate_shared_memory(gl.int32, [3, 1, ESCAPES], gl.SwizzledSharedLayout(2, 1, 1, [1, 0]))
    # So that the compiler knows them for multiples of 8, and copies 16 bytes at a time.
    K = eighth_k * 8
    stride = eighth_stride * 8
    program = gl.program_id(0)
    group = program * groups + gl.minimum(program, longer)
    count = groups + gl.where(program < longer, 1, 0)
    steps = (units + UNITS - 1) // UNITS
    weights = (planes_ptr, group, count, units)
    for s in gl.static_range(STAGES - 2):
        _ask_for_weights(nibbles, low, weights, s, UNITS, STAGES)
    # Weights, and lists of escapes, don't depend on the kernel before this one.
    strip = group // 4
    start_ptr += strip.to(gl.int64) * units
    first = gl.load(start_ptr)
    first_of_next = gl.load(start_ptr + units)
    last = gl.load(start_ptr + ((group + count - 1) // 4 + 1 - strip).to(gl.int64) * units)
    here = gl.minimum((group + gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS)) // 4) // 4, strips - 1)
    none = gl.full([16, 32], 0, gl.int32, layout=WORDS)
    table0 = none + gl.load(tables_ptr + here * 2)[:, None]
    table1 = none + gl.load(tables_ptr + here * 2 + 1)[:, None]
    lists = (at_ptr, value_ptr, first_of_next, last, group % 4 * 16, count * 16)
    at, value = _ask_for_entries(lists, first, ESCAPES, GATHER)
    next_at, next_value = _ask_for_entries(lists, first + ESCAPES, ESCAPES, GATHER)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    for s in gl.static_range(STAGES - 2):
        _ask_for_activations(stages, x_ptr, s, M, K, stride, BLOCK_M, UNITS, STAGES, ROWS)
        async_copy.commit_group()
    rings = (nibbles, low, stages)
    x = (x_ptr, M, K, stride)
    tables = (table0, table1)
    before = gl.minimum(steps, BEFORE // UNITS)
    beside = gl.minimum(steps, before + (last - first + ESCAPES - 1) // ESCAPES)
    running = warpgroup_mma_init(gl.zeros([64, BLOCK_M], gl.float32, layout=ACC))
    a = gl.zeros([64, 64], gl.bfloat16, layout=A)
    b = gl.zeros([64, 64], gl.bfloat16, layout=A)
    for step in range(before):
        running, a, b = _step(
            step, (running, a, b), rings, weights, x, tables, BLOCK_M, UNITS, STAGES, WORDS, ROWS, A
        )  # fmt: skip
    columns, words = _look(lists, first, at, value, turned_ptr, ESCAPES, BLOCK_M, GATHER)
    _put(gathered, placed, 0, columns, words)
    columns, words = _look(lists, first + ESCAPES, next_at, next_value, turned_ptr, ESCAPES, BLOCK_M, GATHER)
    at, value = _ask_for_entries(lists, first + 2 * ESCAPES, ESCAPES, GATHER)
    e = gl.zeros([64, ESCAPES], gl.bfloat16, layout=A)
    number = 0
    for step in range(before, beside):
        running, a, b = _step(
            step, (running, a, b), rings, weights, x, tables, BLOCK_M, UNITS, STAGES, WORDS, ROWS, A
        )  # fmt: skip
        e = _in_rows(placed, number, A)
        running = warpgroup_mma(e, gathered.index(number % 3), running, is_async=True)
        number += 1
        _put(gathered, placed, number, columns, words)
        columns, words = _look(
            lists, first + (number + 1) * ESCAPES, at, value, turned_ptr, ESCAPES, BLOCK_M, GATHER
        )  # fmt: skip
        at, value = _ask_for_entries(lists, first + (number + 2) * ESCAPES, ESCAPES, GATHER)
        acc, a, b, e = warpgroup_mma_wait(0, deps=[running, a, b, e])
        running = warpgroup_mma_init(acc)
    for step in range(beside, steps):
        running, a, b = _step(
            step, (running, a, b), rings, weights, x, tables, BLOCK_M, UNITS, STAGES, WORDS, ROWS, A
        )  # fmt: skip
    acc, a, b = warpgroup_mma_wait(0, deps=[running, a, b])
    async_copy.wait_group(0)
    while first + number * ESCAPES < last:
        fence_async_shared()
        _barrier()
        e = _in_rows(placed, number, A)
        acc = warpgroup_mma(e, gathered.index(number % 3), acc, is_async=True)
        acc, e = warpgroup_mma_wait(0, deps=[acc, e])
        number += 1
        _put(gathered, placed, number, columns, words)
        columns, words = _look(
            lists, first + (number + 1) * ESCAPES, at, value, turned_ptr, ESCAPES, BLOCK_M, GATHER
        )  # fmt: skip
        at, value = _ask_for_entries(lists, first + (number + 2) * ESCAPES, ESCAPES, GATHER)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = gl.convert_layout(acc, OUT)
    mine = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    n = group * 16 + mine
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        out += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    y = y_ptr + m[None, :].to(gl.int64) * N + n[:, None]
    gl.store(y, out.to(gl.bfloat16), mask=(m < M)[None, :] & ((n < N) & (mine < count * 16))[:, None])
