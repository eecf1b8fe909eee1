"""The device side of `mma`: a ring of stages in shared memory, decoded in registers and multiplied.

Work
    A program owns ``ROWS`` rows of W and all of K.  A *stage* is ``UNITS`` units of 64 columns, of the weights and of
    x.  ``PARTS`` groups of warps multiply different units of a stage; their sums are added at the end.

Stages
    They are copied asynchronously, ``STAGES - 1`` ahead.  A thread reads just the words that it copied itself, while x
    is read by all.  Even and odd stages have memory of their own, because Triton puts a barrier between a copy to and
    a load from the same memory, whatever the places.  So there is one barrier for a stage: it says that all threads'
    copies have come, and that all have read the stage before.

Escapes
    They are multiplied before the first stage, while that is on its way: 64 entries of the list for a part are one
    more unit, of the values, each in its row, and of their columns of x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .gluon_words import _two, decode_words

# Triton 3.6 and later ones have different names.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


# Layouts


@gluon.constexpr_function
def words_layout(turns, words, strips, parts):
    """Of flat words [turn, part, strip, w g t j]: a thread has what it multiplies, 16 bytes at a time."""
    sizes = {"word": words, "strip": strips, "part": parts, "turn": turns}
    bits = {}
    place = 1
    for name, size in sizes.items():
        bits[name] = [[place << i] for i in range(size.bit_length() - 1)]
        place *= size
    registers = bits["word"][:2] + bits["strip"] + bits["turn"]
    return gl.DistributedLinearLayout(registers, bits["word"][2:7], bits["word"][7:] + bits["part"], [], [place])


@gluon.constexpr_function
def axis_layout(layout, axis):
    """Of a vector along one of the three axes of tensors of a layout."""
    first, second = [other for other in (2, 1, 0) if other != axis]
    return gl.SliceLayout(second, gl.SliceLayout(first, layout))


@gluon.jit
def _along(LAYOUT: gl.constexpr, AXIS: gl.constexpr, SIZE: gl.constexpr):
    """0 to ``SIZE`` along one of the three axes of tensors of a layout."""
    index = gl.arange(0, SIZE, layout=axis_layout(LAYOUT, AXIS))
    if AXIS == 0:
        return index[:, None, None]
    elif AXIS == 1:
        return index[None, :, None]
    else:
        return index[None, None, :]


# Stages


@gluon.jit
def _ring(SLOTS: gl.constexpr, PLANE: gl.constexpr, UNITS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Memory of every other stage: nibbles, low bytes, x."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    return (
        gl.allocate_shared_memory(gl.int32, [SLOTS, PLANE], FLAT),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 2 * PLANE], FLAT),
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, UNITS, BLOCK_M, 64], SWIZZLED),
    )


@gluon.jit
def _griddepcontrol(WHAT: gl.constexpr):
    gl.inline_asm_elementwise(
        "griddepcontrol." + WHAT + "; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _places(
    planes_ptr, to_next, PLANES: gl.constexpr, TURNS: gl.constexpr, WORDS: gl.constexpr, STRIPS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Where words [turn, plane, part, strip, word] of the first stage are, and each one's unit."""
    LAYOUT: gl.constexpr = words_layout(TURNS * PLANES, WORDS, STRIPS, PARTS)
    at = gl.arange(0, TURNS * PLANES * PARTS * STRIPS * WORDS, layout=LAYOUT)
    part = at // (WORDS * STRIPS) % PARTS
    plane = at // (WORDS * STRIPS * PARTS) % PLANES
    unit = at // (WORDS * STRIPS * PARTS * PLANES) * PARTS + part
    pointers = planes_ptr + unit * 1536 + plane * 512 + at % WORDS
    if STRIPS == 2:
        pointers += at // WORDS % 2 * to_next
    return pointers, unit


@gluon.jit
def _tables(tables_ptr, strip, next_strip, WORDS: gl.constexpr, STRIPS: gl.constexpr, PARTS: gl.constexpr):
    """The two words of the table for each word of weights.

    Their address seems to depend on the thread.  Otherwise they would be kept in a register that all threads share,
    and be copied from there for each byte permutation.
    """
    at = gl.arange(0, PARTS * STRIPS * WORDS, layout=words_layout(1, WORDS, STRIPS, PARTS)) // 4
    table = 2 * gl.where(at // (WORDS // 4) % STRIPS == 0, strip, next_strip)
    tables_ptr = tables_ptr.to(gl.pointer_type(gl.int32)) + gl.minimum(table, table + at)
    return gl.load(tables_ptr), gl.load(tables_ptr + 1)


@gluon.jit
def _copy_weights(ring, slot, weights, step, UNITS: gl.constexpr, EVEN: gl.constexpr):
    """Ask for a stage's words; zeros beyond the last unit."""
    nibbles, low, _ = ring
    nibbles_ptr, nibbles_unit, low_ptr, low_unit, units = weights
    nibbles_ptr += step * (UNITS * 1536)
    low_ptr += step * (UNITS * 1536)
    if EVEN:
        _copy(nibbles.index(slot), nibbles_ptr)
        _copy(low.index(slot), low_ptr)
    else:
        _copy(nibbles.index(slot), nibbles_ptr, mask=step * UNITS + nibbles_unit < units)
        _copy(low.index(slot), low_ptr, mask=step * UNITS + low_unit < units)


@gluon.jit
def _copy_x(ring, slot, x, step, UNITS: gl.constexpr, EVEN: gl.constexpr, VECTOR: gl.constexpr):
    """Ask for a stage's columns of x; zeros beyond the last row and column."""
    nibbles, low, stages = ring
    x_ptr, column, inside, K = x
    first = step * (UNITS * 64)
    if not EVEN:
        inside = inside & (first + column < K)
    if VECTOR:
        _copy(stages.index(slot), x_ptr + first, mask=inside)
    else:
        stages.index(slot).store(gl.load(x_ptr + first, mask=inside, other=0.0))


@gluon.jit
def _operand(w0, w1, w2, w3, WORDS: gl.constexpr, STRIPS: gl.constexpr, PARTS: gl.constexpr, A: gl.constexpr):
    """The four words of `decode_words` as BF16 [PARTS, rows, 64] in layout ``A``."""
    a0, a1 = _two(w0)
    b0, b1 = _two(w1)
    c0, c1 = _two(w2)
    d0, d1 = _two(w3)
    half0 = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    half1 = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    # part, strip, w, g, t, j, p, h, half  ->  part, strip, w, half, g, j, h, t, p
    unit = gl.join(half0, half1).reshape([PARTS, STRIPS, WORDS // 128, 8, 4, 4, 2, 2, 2])
    unit = unit.permute([0, 1, 2, 8, 3, 5, 7, 4, 6])
    return gl.convert_layout(unit.reshape([PARTS, STRIPS * WORDS // 8, 64]), A, assert_trivial=True)


@gluon.jit
def _multiply(
    ring, slot, acc, tables,
    WORDS: gl.constexpr, STRIPS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, A: gl.constexpr,
    B: gl.constexpr,
):  # fmt: skip
    """Add a stage's products."""
    nibbles, low, stages = ring
    table0, table1 = tables
    LAYOUT: gl.constexpr = words_layout(1, WORDS, STRIPS, PARTS)
    SIZE: gl.constexpr = PARTS * STRIPS * WORDS
    for turn in gl.static_range(UNITS // PARTS):
        w0, w1, w2, w3 = decode_words(
            nibbles.index(slot).slice(turn * SIZE, SIZE).load(LAYOUT),
            low.index(slot).slice(turn * 2 * SIZE, SIZE).load(LAYOUT),
            low.index(slot).slice((turn * 2 + 1) * SIZE, SIZE).load(LAYOUT),
            table0, table1,
        )  # fmt: skip
        a = _operand(w0, w1, w2, w3, WORDS, STRIPS, PARTS, A)
        acc = mma_v2(a, stages.index(slot).slice(turn * PARTS, PARTS).permute([0, 2, 1]).load(B), acc)
    return acc


@gluon.jit
def _step(
    here, other, step, steps, acc, tables, weights, x,
    WORDS: gl.constexpr, STRIPS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    EVEN: gl.constexpr, VECTOR: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Multiply a stage when it has come, and ask for the one that follows the last one asked for."""
    async_copy.wait_group(STAGES - 2)
    _barrier()
    ahead = step + (STAGES - 1)
    if ahead < steps:
        slot = ahead // 2 % (STAGES // 2)
        _copy_weights(other, slot, weights, ahead, UNITS, EVEN)
        _copy_x(other, slot, x, ahead, UNITS, EVEN, VECTOR)
    async_copy.commit_group()
    return _multiply(here, step // 2 % (STAGES // 2), acc, tables, WORDS, STRIPS, PARTS, UNITS, A, B)


# Escapes


@gluon.jit
def _and(values, value):
    """One more in a tuple: Triton has no lists."""
    return values + (value,)  # noqa: RUF005


@gluon.jit
def _entries(lists, entry, last, TURNS: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr):
    """Places and values of the entries that a chunk takes, 64 for a turn and part; -1 and 0 beyond the last."""
    at_ptr, bits_ptr = lists
    entry += _along(GATHER, 0, PARTS) * 64 + _along(GATHER, 2, 64)
    places = ()
    values = ()
    for turn in gl.static_range(TURNS):
        here = entry + turn * (PARTS * 64)
        places = _and(places, gl.load(at_ptr + here, mask=here < last, other=-1))
        values = _and(values, gl.load(bits_ptr + here, mask=here < last, other=0))
    return places, values


@gluon.jit
def _row(place, entry, first_of_next, half, ROWS: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr):
    """An entry's row among the program's; -1 if it isn't there."""
    row = place & 63
    if ROWS == 32:
        row = gl.where(row // 32 == half, row % 32, -1)
    if ROWS == 128:
        entry += _along(GATHER, 0, PARTS) * 64 + _along(GATHER, 2, 64)
        row += gl.where(entry < first_of_next, 0, 64)
    return gl.where(place < 0, -1, row)


@gluon.jit
def _add_escapes(
    acc, stage, placed, lists, entries, x, bounds, half,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, TURNS: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr,
    A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Add the products of a list, by way of a stage of x and of rows and values in ``placed``.

    ``entries`` are the first chunk's: a chunk's are loaded before the one in front is multiplied.
    """
    first, first_of_next, last = bounds
    x_ptr, stride_x, M = x
    m = _along(GATHER, 1, BLOCK_M)
    row_of_x = x_ptr + m.to(gl.int64) * stride_x
    SIZE: gl.constexpr = 64 * PARTS
    for chunk in range(first, last, SIZE * TURNS):
        places, values = entries
        # All loads first: they take longest.
        columns = ()
        for turn in gl.static_range(TURNS):
            row = _row(places[turn], chunk + turn * SIZE, first_of_next, half, ROWS, PARTS, GATHER)
            columns = _and(columns, gl.load(row_of_x + (places[turn] >> 6), mask=(row >= 0) & (m < M), other=0.0))
        entries = _entries(lists, chunk + SIZE * TURNS, last, TURNS, PARTS, GATHER)
        for turn in gl.static_range(TURNS):
            row = _row(places[turn], chunk + turn * SIZE, first_of_next, half, ROWS, PARTS, GATHER)
            placed.index(turn).store((row << 16) | (values[turn].to(gl.int32) & 0xFFFF))
            stage.slice(turn * PARTS, PARTS).store(columns[turn])
        for turn in gl.static_range(TURNS):
            if chunk + turn * SIZE < last:
                a = _in_rows(placed.index(turn).load(A), ROWS, A)
                acc = mma_v2(a, stage.slice(turn * PARTS, PARTS).permute([0, 2, 1]).load(B), acc)
    return acc


@gluon.jit
def _in_rows(word, ROWS: gl.constexpr, A: gl.constexpr):
    """Values [part, row, entry], each in its row."""
    bits = gl.where(word >> 16 == _along(A, 1, ROWS), word, 0)
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


# Kernel


@gluon.jit
def _store(
    out_ptr, bias_ptr, sums, row, M, N,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Round and write the sums of rows of W from ``row`` on."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    out = gl.convert_layout(sums, OUT)
    n = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        out += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    pointers = out_ptr + m[None, :].to(gl.int64) * N + n[:, None]
    gl.store(pointers, out.to(gl.bfloat16), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit(do_not_specialize=["M", "K", "strips", "stride_x"])
def mma_kernel(
    out_ptr, x_ptr, planes_ptr, tables_ptr, start_ptr, at_ptr, bits_ptr, bias_ptr,
    M, N, K, strips, stride_x,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    EVEN: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STRIPS: gl.constexpr = 2 if ROWS == 128 else 1
    WARPS: gl.constexpr = ROWS // (16 * STRIPS)
    WORDS: gl.constexpr = 128 * WARPS
    TURNS: gl.constexpr = UNITS // PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[PARTS, WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PLANE: gl.constexpr = UNITS * STRIPS * WORDS
    SLOTS: gl.constexpr = STAGES // 2
    rings = (
        _ring(SLOTS, PLANE, UNITS, BLOCK_M),
        _ring(SLOTS, PLANE, UNITS, BLOCK_M),
    )
    GATHER: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 1, 32], [PARTS, WARPS, 1], [2, 1, 0])
    # Turns whose columns of x are held in registers on their way.
    CHUNK: gl.constexpr = min(TURNS, max(64 // BLOCK_M, 1))
    placed = gl.allocate_shared_memory(gl.int32, [CHUNK, PARTS, 1, 64], gl.SwizzledSharedLayout(2, 1, 1, [2, 1, 0]))
    if VECTOR:
        # So that the compiler knows that 16 bytes may be copied.
        K = K * 8
        stride_x = stride_x * 8
    units = (K + 63) // 64
    steps = (units + UNITS - 1) // UNITS
    strip = gl.program_id(0) * STRIPS
    half = 0
    if ROWS == 32:
        half = strip % 2
        strip = strip // 2
    # Beyond the last strip it is computed again, and not stored.
    next_strip = gl.minimum(strip + STRIPS - 1, strips - 1)

    start_ptr += strip.to(gl.int64) * units
    first = gl.load(start_ptr)
    first_of_next = gl.load(start_ptr + units)
    last = gl.load(start_ptr + (next_strip + 1 - strip).to(gl.int64) * units)

    to_next = (next_strip - strip).to(gl.int64) * units * 1536
    planes_ptr = planes_ptr.to(gl.pointer_type(gl.int32)) + strip.to(gl.int64) * units * 1536 + half * WORDS
    nibbles_ptr, nibbles_unit = _places(planes_ptr, to_next, 1, TURNS, WORDS, STRIPS, PARTS)
    low_ptr, low_unit = _places(planes_ptr + 512, to_next, 2, TURNS, WORDS, STRIPS, PARTS)
    weights = (nibbles_ptr, nibbles_unit, low_ptr, low_unit, units)
    WARPS_M: gl.constexpr = min(BLOCK_M // 4, WARPS * PARTS)
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [WARPS * PARTS // WARPS_M, WARPS_M, 1], [2, 1, 0])
    m = _along(LX, 1, BLOCK_M)
    column = _along(LX, 0, UNITS) * 64 + _along(LX, 2, 64)
    x = (x_ptr + m.to(gl.int64) * stride_x + column, column, m < M, K)
    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            _copy_weights(rings[stage % 2], stage // 2, weights, stage, UNITS, EVEN)
            if not PDL:
                _copy_x(rings[stage % 2], stage // 2, x, stage, UNITS, EVEN, VECTOR)
        async_copy.commit_group()
    tables = _tables(tables_ptr, strip, next_strip, WORDS, STRIPS, PARTS)
    entries = _entries((at_ptr, bits_ptr), first, last, CHUNK, PARTS, GATHER)
    if PDL:
        # Weights don't depend on the kernel before this one, activations do.
        _griddepcontrol("wait")
        _griddepcontrol("launch_dependents")
        for stage in gl.static_range(STAGES - 1):
            if stage < steps:
                _copy_x(rings[stage % 2], stage // 2, x, stage, UNITS, EVEN, VECTOR)
        async_copy.commit_group()

    acc = gl.zeros([PARTS, ROWS, BLOCK_M], gl.float32, layout=MMA)
    acc = _add_escapes(
        acc, rings[1][2].index(SLOTS - 1), placed, (at_ptr, bits_ptr), entries, (x_ptr, stride_x, M),
        (first, first_of_next, last), half, ROWS, BLOCK_M, CHUNK, PARTS, GATHER, A, B,
    )  # fmt: skip
    if PDL:
        # Weights of all these stages were asked for before x.
        async_copy.wait_group(0)
    for pair in range((steps + 1) // 2):
        acc = _step(
            rings[0], rings[1], 2 * pair, steps, acc, tables, weights, x,
            WORDS, STRIPS, PARTS, UNITS, STAGES, EVEN, VECTOR, A, B,
        )  # fmt: skip
        if 2 * pair + 1 < steps:
            acc = _step(
                rings[1], rings[0], 2 * pair + 1, steps, acc, tables, weights, x,
                WORDS, STRIPS, PARTS, UNITS, STAGES, EVEN, VECTOR, A, B,
            )  # fmt: skip

    _store(
        out_ptr, bias_ptr, gl.sum(acc, axis=0), strip * 64 + half * 32, M, N, ROWS, BLOCK_M, WARPS * PARTS, BIAS
    )  # fmt: skip
