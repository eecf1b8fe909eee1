"""The device side of `mma`: a ring of stages in shared memory, decoded in registers and multiplied.

Work
    A program owns up to ``ROWS`` rows of W, in groups of 16 from any group on, and all of K.  A *stage* is ``UNITS``
    units of 64 columns, of the weights and of x.  ``PARTS`` groups of warps multiply different units of a stage; their
    sums are added at the end.

Stages
    They are copied asynchronously, ``STAGES - 1`` ahead.  A thread reads just the words that it copied itself, while x
    is read by all.  Even and odd stages have memory of their own, because Triton puts a barrier between a copy to and
    a load from the same memory, whatever the places.  So there is one barrier for a stage: it says that all threads'
    copies have come, and that all have read the stage before.

Escapes
    Some entries of the list for a part are so many more columns, of a matrix that is zero but for the values, each in
    its row, times their columns of x.  A list is far away, behind all the weights that have been asked for, so it is
    asked for at first and looked at after some stages.  Then chunks of it come in the shadow of pairs of stages: one is
    multiplied while the next one's columns are on their way, until the list is at its end; the other stages know
    nothing of it.  What is left when the stages end follows without a shadow.

    What a column costs are not bytes but places: rows of x lie apart, so each number is a request of its own, and with
    many rows they hold up all other loads.  ``TURNED`` reads columns as rows of the transpose (`turned`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .gluon_words import decode_words, two

# Triton 3.6 and later ones have different names.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# So many units are multiplied before the list of escapes is looked at: as long as memory needs to bring it.
BEFORE = gl.constexpr(12)


# Layouts


@gluon.constexpr_function
def words_layout(turns, words, parts):
    """Of flat words [turn, part, w g t j]: a thread has what it multiplies, 16 bytes at a time."""
    sizes = {"word": words, "part": parts, "turn": turns}
    bits = {}
    place = 1
    for name, size in sizes.items():
        bits[name] = [[place << i] for i in range(size.bit_length() - 1)]
        place *= size
    registers = bits["word"][:2] + bits["turn"]
    return gl.DistributedLinearLayout(registers, bits["word"][2:7], bits["word"][7:] + bits["part"], [], [place])


@gluon.constexpr_function
def gather_layout(turned, block_m, entries, parts, warps):
    """Of columns of x for escapes: [part, entry, m] from the transpose, 8 numbers for a thread, or [part, m, entry]."""
    if turned:
        lanes = block_m // 8
        return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [parts, warps, 1], [2, 1, 0])
    lanes = entries // 2
    return gl.BlockedLayout([1, 1, 2], [1, 32 // lanes, lanes], [parts, warps, 1], [2, 1, 0])


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
    planes_ptr, group, count, units,
    PLANES: gl.constexpr, TURNS: gl.constexpr, WORDS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Where words [turn, plane, part, word] of the first stage are, each one's unit, and whether it is there."""
    LAYOUT: gl.constexpr = words_layout(TURNS * PLANES, WORDS, PARTS)
    at = gl.arange(0, TURNS * PLANES * PARTS * WORDS, layout=LAYOUT)
    part = at // WORDS % PARTS
    plane = at // (WORDS * PARTS) % PLANES
    unit = at // (WORDS * PARTS * PLANES) * PARTS + part
    mine = at // 128 % (WORDS // 128)
    # Groups from the fifth of a strip on are in the next one.
    place = group % 4 + mine
    pointers = planes_ptr + (group // 4).to(gl.int64) * units * 1536
    pointers += place // 4 * (units * 1536 - 512)
    return pointers + unit * 1536 + plane * 512 + place * 128 + at % 128, unit, mine < count


@gluon.jit
def _tables(tables_ptr, group, strips, WORDS: gl.constexpr, PARTS: gl.constexpr):
    """The two words of the table for each word of weights.

    Their address seems to depend on the thread.  Otherwise they would be kept in a register that all threads share,
    and be copied from there for each byte permutation.
    """
    at = gl.arange(0, PARTS * WORDS, layout=words_layout(1, WORDS, PARTS))
    table = 2 * gl.minimum((group + at // 128 % (WORDS // 128)) // 4, strips - 1)
    tables_ptr = tables_ptr.to(gl.pointer_type(gl.int32)) + gl.minimum(table, table + at)
    return gl.load(tables_ptr), gl.load(tables_ptr + 1)


@gluon.jit
def _copy_weights(ring, slot, weights, step, UNITS: gl.constexpr, EVEN: gl.constexpr):
    """Ask for a stage's words; zeros beyond the last unit."""
    nibbles, low, _ = ring
    nibbles_ptr, nibbles_unit, nibbles_inside, low_ptr, low_unit, low_inside, units = weights
    nibbles_ptr += step * (UNITS * 1536)
    low_ptr += step * (UNITS * 1536)
    if not EVEN:
        nibbles_inside = nibbles_inside & (step * UNITS + nibbles_unit < units)
        low_inside = low_inside & (step * UNITS + low_unit < units)
    _copy(nibbles.index(slot), nibbles_ptr, mask=nibbles_inside)
    _copy(low.index(slot), low_ptr, mask=low_inside)


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
def _operand(w0, w1, w2, w3, WORDS: gl.constexpr, PARTS: gl.constexpr, A: gl.constexpr):
    """The four words of `decode_words` as BF16 [PARTS, rows, 64] in layout ``A``."""
    a0, a1 = two(w0)
    b0, b1 = two(w1)
    c0, c1 = two(w2)
    d0, d1 = two(w3)
    half0 = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    half1 = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    # part, w, g, t, j, p, h, half  ->  part, w, half, g, j, h, t, p
    unit = gl.join(half0, half1).reshape([PARTS, WORDS // 128, 8, 4, 4, 2, 2, 2])
    unit = unit.permute([0, 1, 7, 2, 4, 6, 3, 5])
    return gl.convert_layout(unit.reshape([PARTS, WORDS // 8, 64]), A, assert_trivial=True)


@gluon.jit
def _multiply(
    ring, slot, acc, tables,
    WORDS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Add a stage's products."""
    nibbles, low, stages = ring
    table0, table1 = tables
    LAYOUT: gl.constexpr = words_layout(1, WORDS, PARTS)
    SIZE: gl.constexpr = PARTS * WORDS
    for turn in gl.static_range(UNITS // PARTS):
        w0, w1, w2, w3 = decode_words(
            nibbles.index(slot).slice(turn * SIZE, SIZE).load(LAYOUT),
            low.index(slot).slice(turn * 2 * SIZE, SIZE).load(LAYOUT),
            low.index(slot).slice((turn * 2 + 1) * SIZE, SIZE).load(LAYOUT),
            table0, table1,
        )  # fmt: skip
        a = _operand(w0, w1, w2, w3, WORDS, PARTS, A)
        acc = mma_v2(a, stages.index(slot).slice(turn * PARTS, PARTS).permute([0, 2, 1]).load(B), acc)
    return acc


@gluon.jit
def _ahead(
    ring, step, steps, weights, x,
    UNITS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Wait for a stage, and ask for the one that follows the last one asked for, to memory of the stage before."""
    async_copy.wait_group(STAGES - 2)
    _barrier()
    ahead = step + (STAGES - 1)
    if ahead < steps:
        slot = ahead // 2 % (STAGES // 2)
        _copy_weights(ring, slot, weights, ahead, UNITS, EVEN)
        _copy_x(ring, slot, x, ahead, UNITS, EVEN, VECTOR)
    async_copy.commit_group()


@gluon.jit
def _pair(
    pair, acc, rings, steps, tables, weights, x,
    WORDS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    VECTOR: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Multiply two stages."""
    even, odd = rings
    _ahead(odd, 2 * pair, steps, weights, x, UNITS, STAGES, EVEN, VECTOR)
    acc = _multiply(even, pair % (STAGES // 2), acc, tables, WORDS, PARTS, UNITS, A, B)
    _ahead(even, 2 * pair + 1, steps, weights, x, UNITS, STAGES, EVEN, VECTOR)
    return _multiply(odd, pair % (STAGES // 2), acc, tables, WORDS, PARTS, UNITS, A, B)


# Escapes


@gluon.jit
def _ask_for_entries(lists, chunk, PARTS: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, GATHER: gl.constexpr):
    """Places and values of ``COUNT`` entries for each part.  Nothing is done with them here: that would wait."""
    at_ptr, bits_ptr, first_of_next, last, above, rows = lists
    entry = chunk + _along(GATHER, 0, PARTS) * COUNT + _along(GATHER, AXIS, COUNT)
    at = gl.load(at_ptr + entry, mask=entry < last, other=-1)
    return at, gl.load(bits_ptr + entry, mask=entry < last, other=0)


@gluon.jit
def _look(
    lists, chunk, at, value, PARTS: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """Columns, and words of a row among the program's and a value.

    Beyond the list, and in rows of other programs, they are -1 and 0.
    """
    at_ptr, bits_ptr, first_of_next, last, above, rows = lists
    entry = chunk + _along(GATHER, 0, PARTS) * COUNT + _along(GATHER, AXIS, COUNT)
    row = (at & 63) + gl.where(entry < first_of_next, 0, 64) - above
    mine = (at >= 0) & (row >= 0) & (row < rows)
    return gl.where(mine, at >> 6, -1), gl.where(mine, (row << 16) | (value.to(gl.int32) & 0xFFFF), 0)


@gluon.jit
def _gather(x, column, BLOCK_M: gl.constexpr, TURNED: gl.constexpr, GATHER: gl.constexpr):
    """Columns of x: [part, entry, m] from the transpose, or [part, m, entry]."""
    x_ptr, turned_ptr, stride_x, M = x
    m = _along(GATHER, 2 if TURNED else 1, BLOCK_M)
    there = (column >= 0) & (m < M)
    if TURNED:
        return gl.load(turned_ptr + column * BLOCK_M + m, mask=there, other=0.0)
    else:
        return gl.load(x_ptr + m.to(gl.int64) * stride_x + column, mask=there, other=0.0)


@gluon.jit
def _put(gathered, placed, columns, words, TURNED: gl.constexpr):
    gathered.store(columns)
    if TURNED:
        placed.permute([0, 2, 1]).store(words)
    else:
        placed.store(words)


@gluon.jit
def _add_escapes(
    acc, gathered, placed, ROWS: gl.constexpr, TURNED: gl.constexpr, A: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Add the products of the chunk in shared memory."""
    word = placed.load(A)
    bits = gl.where(word >> 16 == _along(A, 1, ROWS), word, 0)
    a = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    if TURNED:
        return mma_v2(a, gathered.load(B), acc)
    else:
        return mma_v2(a, gathered.permute([0, 2, 1]).load(B), acc)


# Kernel


@gluon.jit
def _store(
    out_ptr, bias_ptr, sums, row, rows, M, N,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Round and write the sums of ``rows`` rows of W from ``row`` on."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    out = gl.convert_layout(sums, OUT)
    mine = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    n = row + mine
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        out += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    pointers = out_ptr + m[None, :].to(gl.int64) * N + n[:, None]
    gl.store(pointers, out.to(gl.bfloat16), mask=(m < M)[None, :] & ((n < N) & (mine < rows))[:, None])


@gluon.jit(do_not_specialize=["M", "K", "strips", "stride_x", "groups", "longer"])
def mma_kernel(
    out_ptr, x_ptr, planes_ptr, tables_ptr, start_ptr, at_ptr, bits_ptr, bias_ptr, turned_ptr,
    M, N, K, strips, stride_x, groups, longer,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    TURNED: gl.constexpr, ESCAPES: gl.constexpr, EVEN: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = ROWS // 16
    WORDS: gl.constexpr = 128 * WARPS
    TURNS: gl.constexpr = UNITS // PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[PARTS, WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PLANE: gl.constexpr = UNITS * WORDS
    SLOTS: gl.constexpr = STAGES // 2
    even = _ring(SLOTS, PLANE, UNITS, BLOCK_M)
    odd = _ring(SLOTS, PLANE, UNITS, BLOCK_M)
    rings = (even, odd)
    AXIS: gl.constexpr = 1 if TURNED else 2
    GATHER: gl.constexpr = gather_layout(TURNED, BLOCK_M, ESCAPES, PARTS, WARPS)
    if TURNED:
        gathered = gl.allocate_shared_memory(
            gl.bfloat16, [PARTS, ESCAPES, BLOCK_M],
            gl.SwizzledSharedLayout(8, 64 // BLOCK_M, BLOCK_M // 8, [2, 1, 0]),
        )  # fmt: skip
    else:
        gathered = gl.allocate_shared_memory(
            gl.bfloat16, [PARTS, BLOCK_M, ESCAPES],
            gl.SwizzledSharedLayout(8, max(1, 64 // ESCAPES), ESCAPES // 8, [2, 1, 0]),
        )  # fmt: skip
    placed = gl.allocate_shared_memory(gl.int32, [PARTS, 1, ESCAPES], gl.SwizzledSharedLayout(2, 1, 1, [2, 1, 0]))
    if VECTOR:
        # So that the compiler knows that 16 bytes may be copied.
        K = K * 8
        stride_x = stride_x * 8
    units = (K + 63) // 64
    steps = (units + UNITS - 1) // UNITS
    program = gl.program_id(0)
    group = program * groups + gl.minimum(program, longer)
    count = groups + gl.where(program < longer, 1, 0)

    strip = group // 4
    start_ptr += strip.to(gl.int64) * units
    first = gl.load(start_ptr)
    first_of_next = gl.load(start_ptr + units)
    last = gl.load(start_ptr + ((group + count - 1) // 4 + 1 - strip).to(gl.int64) * units)

    planes_ptr = planes_ptr.to(gl.pointer_type(gl.int32))
    nibbles_ptr, nibbles_unit, nibbles_inside = _places(planes_ptr, group, count, units, 1, TURNS, WORDS, PARTS)
    low_ptr, low_unit, low_inside = _places(planes_ptr + 512, group, count, units, 2, TURNS, WORDS, PARTS)
    weights = (nibbles_ptr, nibbles_unit, nibbles_inside, low_ptr, low_unit, low_inside, units)
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
    tables = _tables(tables_ptr, group, strips, WORDS, PARTS)
    lists = (at_ptr, bits_ptr, first_of_next, last, group % 4 * 16, count * 16)
    at, value = _ask_for_entries(lists, first, PARTS, ESCAPES, AXIS, GATHER)
    if PDL:
        # Weights don't depend on the kernel before this one, activations do.
        _griddepcontrol("wait")
        _griddepcontrol("launch_dependents")
        for stage in gl.static_range(STAGES - 1):
            if stage < steps:
                _copy_x(rings[stage % 2], stage // 2, x, stage, UNITS, EVEN, VECTOR)
        async_copy.commit_group()

    if PDL:
        # Weights of all these stages were asked for before x.
        async_copy.wait_group(0)
    acc = gl.zeros([PARTS, ROWS, BLOCK_M], gl.float32, layout=MMA)
    CHUNK: gl.constexpr = PARTS * ESCAPES
    pairs = steps // 2
    before = gl.minimum(pairs, (BEFORE + 2 * UNITS - 1) // (2 * UNITS))
    beside = gl.minimum(pairs, before + (last - first + CHUNK - 1) // CHUNK)
    for pair in range(before):
        acc = _pair(
            pair, acc, rings, steps, tables, weights, x, WORDS, PARTS, UNITS, STAGES, EVEN, VECTOR, A, B
        )  # fmt: skip
    numbers = (x_ptr, turned_ptr, stride_x, M)
    column, words = _look(lists, first, at, value, PARTS, ESCAPES, AXIS, GATHER)
    columns = _gather(numbers, column, BLOCK_M, TURNED, GATHER)
    at, value = _ask_for_entries(lists, first + CHUNK, PARTS, ESCAPES, AXIS, GATHER)
    chunk = first
    for pair in range(before, beside):
        _ahead(odd, 2 * pair, steps, weights, x, UNITS, STAGES, EVEN, VECTOR)
        acc = _multiply(even, pair % SLOTS, acc, tables, WORDS, PARTS, UNITS, A, B)
        _put(gathered, placed, columns, words, TURNED)
        chunk += CHUNK
        column, words = _look(lists, chunk, at, value, PARTS, ESCAPES, AXIS, GATHER)
        columns = _gather(numbers, column, BLOCK_M, TURNED, GATHER)
        at, value = _ask_for_entries(lists, chunk + CHUNK, PARTS, ESCAPES, AXIS, GATHER)
        _ahead(even, 2 * pair + 1, steps, weights, x, UNITS, STAGES, EVEN, VECTOR)
        acc = _add_escapes(acc, gathered, placed, ROWS, TURNED, A, B)
        acc = _multiply(odd, pair % SLOTS, acc, tables, WORDS, PARTS, UNITS, A, B)
    for pair in range(beside, pairs):
        acc = _pair(
            pair, acc, rings, steps, tables, weights, x, WORDS, PARTS, UNITS, STAGES, EVEN, VECTOR, A, B
        )  # fmt: skip
    if steps % 2 == 1:
        _ahead(odd, steps - 1, steps, weights, x, UNITS, STAGES, EVEN, VECTOR)
        acc = _multiply(even, steps // 2 % SLOTS, acc, tables, WORDS, PARTS, UNITS, A, B)
    while chunk < last:
        _barrier()
        _put(gathered, placed, columns, words, TURNED)
        _barrier()
        acc = _add_escapes(acc, gathered, placed, ROWS, TURNED, A, B)
        chunk += CHUNK
        column, words = _look(lists, chunk, at, value, PARTS, ESCAPES, AXIS, GATHER)
        columns = _gather(numbers, column, BLOCK_M, TURNED, GATHER)
        at, value = _ask_for_entries(lists, chunk + CHUNK, PARTS, ESCAPES, AXIS, GATHER)

    _store(
        out_ptr, bias_ptr, gl.sum(acc, axis=0), group * 16, count * 16, M, N, ROWS, BLOCK_M, WARPS * PARTS, BIAS
    )  # fmt: skip
