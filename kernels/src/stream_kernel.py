"""The device side of `stream`: a producer that copies, consumers that decode and multiply.

Work
    A *step* is ``UNITS`` units of K, a *tile* of the output ``STRIPS`` strips of N by ``BLOCK_M`` rows of x, ``steps``
    steps.  Program p of P does an equal share of the first ``split_tiles`` tiles' steps (stream-K) and then whole tiles
    p, p + P, ... of the others.  Of a tile that several programs share, the one with its first step is the owner: the
    others, whose first share it is, leave fp32 sums in ``partial`` and raise a flag; the owner adds them in the order
    of their programs, takes the flags down and finishes.  A program waits only for programs with larger numbers, and
    only for what those do first of all, so it never waits for one that waits.

Roles
    One warp asks the copy engine for stages; each of ``STRIPS`` warp groups decodes its strip's units to registers,
    multiplies by x from shared memory, and gives the stage back.

A race to know
    An asynchronous MMA with A in registers reads them after it was issued, while the compiler takes them as free.  So a
    group decodes all units of a stage, issues all MMAs, and waits for them before it decodes again; other groups' MMAs
    run meanwhile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_words import decode_words, operand, put_escapes, record_entry, words_layout

# Strips of a tile, each with a warp group.
STRIPS = gl.constexpr(2)
# Triton 3.6 and later ones have different names.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def flat_layout(columns):
    """Of 64 by ``columns`` sums: what `_flat` makes of a tensor core instruction's."""
    registers = [[1]] + [[256 << i] for i in range((columns // 4).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[2], [4], [8], [16], [32]], [[64], [128]], [], [64 * columns])


@gluon.jit
def _wait_for_previous_kernel(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_next_kernel_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _share(program, programs, split_steps):
    """Where a program's share of the split tiles begins; at most one tile for each program, so 32 bits are enough."""
    return program * split_steps // programs


@gluon.jit
def _segment(done, share, begin, split_tiles, steps):
    """Tile, first and last step of the segment that follows ``done`` steps of this program's work."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    in_split = done < share
    at = gl.where(in_split, begin + done, 0)
    whole = (done - share) // steps
    tile = gl.where(in_split, at // steps, split_tiles + program + whole * programs)
    first = gl.where(in_split, at % steps, 0)
    last = gl.where(in_split, gl.minimum(steps, first + share - done), steps)
    return tile, first, last


@gluon.jit
def _place(tile, tiles_n, tiles_m, GROUP: gl.constexpr):
    """A tile's numbers along N and M: ``GROUP`` along N share rows of x in the cache."""
    width = GROUP * tiles_m
    first = tile // width * GROUP
    size = gl.minimum(tiles_n - first, GROUP)
    return first + tile % width % size, tile % width // size


@gluon.jit
def _strip(tile_n, strips, c: gl.constexpr, SWIGLU: gl.constexpr):
    if SWIGLU:
        return tile_n + c * (strips // 2)
    else:
        return tile_n * STRIPS + c


@gluon.jit
def _produce(
    copying, work,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SWIGLU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_d, nibbles_d, low_d, records_d, nibbles, low, records, stages_x, full, empty = copying
    total, share, begin, split_tiles, steps, tiles_n, tiles_m, strips, units = work
    COPIES: gl.constexpr = 2 if SWIGLU else 1
    BYTES: gl.constexpr = UNITS * (STRIPS * 6144 + COPIES * 128 + BLOCK_M * 128)
    done = total * 0
    stage = total * 0
    while done < total:
        tile, first, last = _segment(done, share, begin, split_tiles, steps)
        tile_n, tile_m = _place(tile, tiles_n, tiles_m, GROUP)
        for step in range(first, last):
            s = stage % STAGES
            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, BYTES)
            for c in gl.static_range(STRIPS):
                strip = _strip(tile_n, strips, c, SWIGLU)
                _copy(nibbles_d, [strip, step * UNITS, 0, 0], bar, nibbles.index(s * STRIPS + c))
                _copy(low_d, [strip, step * UNITS, 16, 0], bar, low.index(s * STRIPS + c))
            # Of eight strips at a time: less than 128 bytes can't be copied to any place.
            for copy in gl.static_range(COPIES):
                strip = _strip(tile_n, strips, copy, SWIGLU)
                for u in gl.static_range(UNITS):
                    _copy(
                        records_d, [strip, (step * UNITS + u) * 4], bar, records.index((s * COPIES + copy) * UNITS + u)
                    )
            if stage == 0:
                # Weights don't depend on the kernel before this one, activations do.
                _wait_for_previous_kernel(PDL)
                _let_next_kernel_start(PDL)
            for u in gl.static_range(UNITS):
                _copy(x_d, [tile_m * BLOCK_M, (step * UNITS + u) * 64], bar, stages_x.index(s * UNITS + u))
            stage += 1
        done += last - first


@gluon.jit
def _halves(acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The left and right halves of a matrix, register by register."""
    return gl.split(acc.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]))


@gluon.jit
def _flat(acc, COLUMNS: gl.constexpr):
    """Sums [64, COLUMNS] in an order in which neighbouring threads have neighbouring pairs: without moving any."""
    return gl.convert_layout(
        acc.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 1, 0, 2, 4, 5]).reshape([64 * COLUMNS]),
        flat_layout(COLUMNS), assert_trivial=True,
    )  # fmt: skip


@gluon.jit
def _leave(partial_ptr, acc, COLUMNS: gl.constexpr, AT: gl.constexpr):
    """Write fp32 sums for the tile's owner."""
    if COLUMNS > 32:
        left, right = _halves(acc, 64, COLUMNS)
        _leave(partial_ptr, left, COLUMNS // 2, AT)
        _leave(partial_ptr, right, COLUMNS // 2, AT + COLUMNS // 2)
    else:
        at = gl.arange(0, 64 * COLUMNS, layout=flat_layout(COLUMNS))
        gl.store(partial_ptr + AT * 64 + at, _flat(acc, COLUMNS))


@gluon.jit
def _collect(acc, partial_ptr, other, others, stride, COLUMNS: gl.constexpr, AT: gl.constexpr, OUT: gl.constexpr):
    """Sums of at most 64 columns in a layout that is good to write from, with what the others left."""
    flat = _flat(acc, COLUMNS)
    at = gl.arange(0, 64 * COLUMNS, layout=flat_layout(COLUMNS))
    for o in range(other, others):
        flat += gl.load(partial_ptr + o * stride + AT * 64 + at)
    sums = flat.reshape([COLUMNS // 8, 2, 4, 8, 4, 2]).permute([2, 1, 3, 0, 4, 5]).reshape([64, COLUMNS])
    return gl.convert_layout(sums, OUT)


@gluon.jit
def _finish(
    y_ptr, bias_ptr, acc, partial_ptr, other, others, stride, row0, column0, M, N,
    COLUMNS: gl.constexpr, AT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Write a tile's rows of W from ``row0`` and of x from ``column0`` to y."""
    if COLUMNS > 32:
        left, right = _halves(acc, 64, COLUMNS)
        _finish(y_ptr, bias_ptr, left, partial_ptr, other, others, stride, row0, column0, M, N, COLUMNS // 2, AT, BIAS)
        _finish(
            y_ptr, bias_ptr, right, partial_ptr, other, others, stride, row0, column0, M, N, COLUMNS // 2,
            AT + COLUMNS // 2, BIAS,
        )  # fmt: skip
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        out = _collect(acc, partial_ptr, other, others, stride, COLUMNS, AT, OUT)
        n = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        m = column0 + AT + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
        if BIAS:
            out += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        y = y_ptr + m[None, :].to(gl.int64) * N + n[:, None]
        gl.store(y, out.to(gl.bfloat16), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit
def _finish_swiglu(
    y_ptr, acc, partial_ptr, other, others, stride, row0, column0, M, N, exchange, swapped, turn,
    c: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The group of the up strip gives its sums to that of the gate strip, which writes."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = _collect(acc, partial_ptr, other, others, stride, BLOCK_M, 0, OUT)
    if c == 1:
        mbarrier.wait(swapped.index(1), (turn & 1) ^ 1)
        exchange.store(out)
        mbarrier.arrive(swapped.index(0), count=1)
    else:
        mbarrier.wait(swapped.index(0), turn & 1)
        up = exchange.load(OUT)
        mbarrier.arrive(swapped.index(1), count=1)
        out = out / (1.0 + gl.exp(-out)) * up
        n = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        m = column0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
        y = y_ptr + m[None, :].to(gl.int64) * N + n[:, None]
        gl.store(y, out.to(gl.bfloat16), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit
def _unit(nibbles, low, number: gl.constexpr, table0, table1, UNITS: gl.constexpr, WORDS: gl.constexpr):
    """The words of a stage's unit, from its planes in shared memory."""
    low = low.reshape([UNITS * 32, 32])
    return decode_words(
        nibbles.reshape([UNITS * 16, 32]).slice(16 * number, 16).load(WORDS),
        low.slice(32 * number, 16).load(WORDS), low.slice(32 * number + 16, 16).load(WORDS), table0, table1,
    )  # fmt: skip


@gluon.jit
def _entries(record):
    """The four entries of a record in shared memory; each thread has all."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    return record.load(EACH).reshape([4])


@gluon.jit
def _put(w0, w1, w2, w3, entries, owner, WORDS: gl.constexpr):
    """The words with a record's escapes."""
    # A thread's four words of a plane lie together, and so do its copies of the four entries.
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]], [[4, 0, 0], [8, 0, 0]], [],
        [16, 8, 4],
    )  # fmt: skip
    entries = gl.convert_layout(entries, gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    wide = gl.full([16, 8, 4], 0, gl.int32, layout=WIDE) + entries[None, None, :]
    return put_escapes(w0, w1, w2, w3, gl.convert_layout(wide.reshape([16, 32]), WORDS, assert_trivial=True), owner)


@gluon.jit
def _put_listed(w0, w1, w2, w3, entries, unit, lists, owner, WORDS: gl.constexpr):
    """The words with the escapes that didn't fit in the record, of which there are none if it doesn't say so."""
    start_ptr, at_ptr, value_ptr = lists
    if gl.min(entries, axis=0) < -1:
        first = (gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS)) & 3)[None, :] == 0
        for e in range(gl.load(start_ptr + unit) + 3, gl.load(start_ptr + unit + 1)):
            entry = record_entry(gl.load(at_ptr + e), gl.load(value_ptr + e).to(gl.int32))
            w0, w1, w2, w3 = put_escapes(w0, w1, w2, w3, gl.where(first, owner * 0 + entry, -1), owner)
    return w0, w1, w2, w3


@gluon.jit
def _stage(
    slot, phase, stages, full, tables, lists, unit, owner, c: gl.constexpr,
    UNITS: gl.constexpr, SWIGLU: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """A stage's weights as operands, one for each unit, when they have arrived."""
    COPIES: gl.constexpr = 2 if SWIGLU else 1
    COPY: gl.constexpr = c if SWIGLU else 0
    ROW: gl.constexpr = 0 if SWIGLU else c
    all_nibbles, all_low, all_records = stages
    table0, table1 = tables
    mbarrier.wait(full.index(slot), phase)
    nibbles = all_nibbles.index(slot * STRIPS + c)
    low = all_low.index(slot * STRIPS + c)
    record = (slot * COPIES + COPY) * UNITS
    # Both units at once, so that one's instructions fill the time in which the other's wait.
    v0, v1, v2, v3 = _unit(nibbles, low, 0, table0, table1, UNITS, WORDS)
    w0, w1, w2, w3 = _unit(nibbles, low, UNITS - 1, table0, table1, UNITS, WORDS)
    entries0 = _entries(all_records.index(record).slice(ROW, 1))
    entries1 = entries0
    v0, v1, v2, v3 = _put(v0, v1, v2, v3, entries0, owner, WORDS)
    if UNITS == 2:
        entries1 = _entries(all_records.index(record + 1).slice(ROW, 1))
        w0, w1, w2, w3 = _put(w0, w1, w2, w3, entries1, owner, WORDS)
    if gl.minimum(gl.min(entries0, axis=0), gl.min(entries1, axis=0)) < -1:
        v0, v1, v2, v3 = _put_listed(v0, v1, v2, v3, entries0, unit, lists, owner, WORDS)
        if UNITS == 2:
            w0, w1, w2, w3 = _put_listed(w0, w1, w2, w3, entries1, unit + 1, lists, owner, WORDS)
    a = operand(v0, v1, v2, v3, A)
    if UNITS == 2:
        return a, operand(w0, w1, w2, w3, A)
    else:
        return a, a


@gluon.jit
def _multiply(a, b, acc, slot, stages_x, UNITS: gl.constexpr):
    """Issue a stage's products; the operands' registers are in use until they are waited for."""
    x = slot * UNITS
    acc = warpgroup_mma(a, stages_x.index(x).permute([1, 0]), acc, is_async=True)
    if UNITS == 2:
        acc = warpgroup_mma(b, stages_x.index(x + 1).permute([1, 0]), acc, is_async=True)
    return acc


@gluon.jit
def _wait(acc, a, b, UNITS: gl.constexpr):
    if UNITS == 2:
        return warpgroup_mma_wait(0, deps=[acc, a, b])
    else:
        acc, a = warpgroup_mma_wait(0, deps=[acc, a])
        return acc, a, a


@gluon.jit
def _consume(
    sums, work,
    c: gl.constexpr, BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, BIAS: gl.constexpr, SWIGLU: gl.constexpr, PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    (
        y_ptr, bias_ptr, tables_ptr, start_ptr, at_ptr, value_ptr, partial_ptr, flag_ptr, nibbles, low, records,
        stages_x, exchange, full, empty, swapped, M, N,
    ) = sums  # fmt: skip
    total, share, begin, split_tiles, steps, tiles_n, tiles_m, strips, units = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = words_layout(1, 16)
    # Of a thread's four words of a plane, which lie together.
    owner = (
        gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS))[:, None] * 8
        + gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))[None, :] // 4
    )
    stages = (nibbles, low, records)
    lists = (start_ptr, at_ptr, value_ptr)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = total * 0
    slot = total * 0
    phase = total * 0
    turns = total * 0
    _wait_for_previous_kernel(PDL)
    while done < total:
        tile, first, last = _segment(done, share, begin, split_tiles, steps)
        tile_n, tile_m = _place(tile, tiles_n, tiles_m, GROUP)
        strip = _strip(tile_n, strips, c, SWIGLU)
        # Beyond the last strip there are zeros, and nothing is written.
        here = gl.minimum(strip, strips - 1)
        table0 = gl.full([16, 32], 0, gl.int32, layout=WORDS) + gl.load(tables_ptr + here * 2)
        table1 = gl.full([16, 32], 0, gl.int32, layout=WORDS) + gl.load(tables_ptr + here * 2 + 1)
        tables = (table0, table1)
        acc = gl.zeros([64, BLOCK_M], gl.float32, layout=ACC)
        unit = here * units
        if OVERLAP:
            # The next stage is decoded while this one is multiplied.
            a, b = _stage(
                slot, phase, stages, full, tables, lists, unit + first * UNITS, owner,
                c, UNITS, SWIGLU, WORDS, A,
            )  # fmt: skip
            for step in range(first, last - 1):
                running = _multiply(a, b, acc, slot, stages_x, UNITS)
                used = slot
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                next_a, next_b = _stage(
                    slot, phase, stages, full, tables, lists, unit + (step + 1) * UNITS, owner,
                    c, UNITS, SWIGLU, WORDS, A,
                )  # fmt: skip
                acc, a, b = _wait(running, a, b, UNITS)
                mbarrier.arrive(empty.index(used), count=1)
                a = next_a
                b = next_b
            acc, a, b = _wait(_multiply(a, b, acc, slot, stages_x, UNITS), a, b, UNITS)
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        else:
            for step in range(first, last):
                a, b = _stage(
                    slot, phase, stages, full, tables, lists, unit + step * UNITS, owner,
                    c, UNITS, SWIGLU, WORDS, A,
                )  # fmt: skip
                acc, a, b = _wait(_multiply(a, b, acc, slot, stages_x, UNITS), a, b, UNITS)
                mbarrier.arrive(empty.index(slot), count=1)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
        if first > 0:
            _leave(partial_ptr + (program * STRIPS + c).to(gl.int64) * (64 * BLOCK_M), acc, BLOCK_M, 0)
            _barrier()
            gl.atomic_xchg(flag_ptr + program * STRIPS + c, 1, sem="release", scope="gpu")
        else:
            others = program + 1
            if last < steps:
                while others < programs and _share(others, programs, split_tiles * steps) < (tile + 1) * steps:
                    while gl.atomic_add(flag_ptr + others * STRIPS + c, 0, sem="acquire", scope="gpu") == 0:
                        pass
                    gl.store(flag_ptr + others * STRIPS + c, 0)
                    others += 1
                _barrier()
            left = partial_ptr + c * (64 * BLOCK_M)
            stride = STRIPS * 64 * BLOCK_M
            if SWIGLU:
                _finish_swiglu(
                    y_ptr, acc, left, program + 1, others, stride, tile_n * 64, tile_m * BLOCK_M, M, N // 2, exchange,
                    swapped, turns, c, BLOCK_M,
                )  # fmt: skip
                turns += 1
            else:
                _finish(
                    y_ptr, bias_ptr, acc, left, program + 1, others, stride, strip * 64, tile_m * BLOCK_M, M, N,
                    BLOCK_M, 0, BIAS,
                )  # fmt: skip
        done += last - first


@gluon.jit(do_not_specialize=["M", "N", "strips", "units", "steps", "tiles_n", "tiles_m", "split_tiles"])
def stream_kernel(
    y_ptr, x_d, nibbles_d, low_d, records_d, bias_ptr, tables_ptr, start_ptr, at_ptr, value_ptr, partial_ptr, flag_ptr,
    M, N, strips, units, steps, tiles_n, tiles_m, split_tiles,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    BIAS: gl.constexpr, SWIGLU: gl.constexpr, PDL: gl.constexpr,
    OVERLAP: gl.constexpr, REGISTERS: gl.constexpr, COPYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    COPIES: gl.constexpr = 2 if SWIGLU else 1
    nibbles = gl.allocate_shared_memory(gl.int32, [STAGES * STRIPS, 1, UNITS, 16, 32], nibbles_d.layout)
    low = gl.allocate_shared_memory(gl.int32, [STAGES * STRIPS, 1, UNITS, 32, 32], low_d.layout)
    records = gl.allocate_shared_memory(gl.int32, [STAGES * COPIES * UNITS, 8, 4], records_d.layout)
    stages_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNITS, BLOCK_M, 64], x_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    swapped = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    EXCHANGE_M: gl.constexpr = BLOCK_M if SWIGLU else 4
    exchange = gl.allocate_shared_memory(
        gl.float32, [64, EXCHANGE_M], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=STRIPS)
    mbarrier.init(swapped.index(0), count=1)
    mbarrier.init(swapped.index(1), count=1)
    fence_async_shared()
    _barrier()

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = _share(program, programs, split_tiles * steps)
    share = _share(program + 1, programs, split_tiles * steps) - begin
    others = tiles_n * tiles_m - split_tiles
    total = share + gl.maximum(0, gl.cdiv(others - program, programs)) * steps

    work = (total, share, begin, split_tiles, steps, tiles_n, tiles_m, strips, units)
    copying = (x_d, nibbles_d, low_d, records_d, nibbles, low, records, stages_x, full, empty)
    sums = (
        y_ptr, bias_ptr, tables_ptr, start_ptr, at_ptr, value_ptr, partial_ptr, flag_ptr, nibbles, low, records,
        stages_x, exchange, full, empty, swapped, M, N,
    )  # fmt: skip
    # Constants stay constants only in a tuple that is written where it's used.
    gl.warp_specialize(
        [
            (_consume, (sums, work, 0, BLOCK_M, UNITS, STAGES, GROUP, BIAS, SWIGLU, PDL, OVERLAP)),
            (_consume, (sums, work, 1, BLOCK_M, UNITS, STAGES, GROUP, BIAS, SWIGLU, PDL, OVERLAP)),
            (_produce, (copying, work, BLOCK_M, UNITS, STAGES, GROUP, SWIGLU, PDL)),
        ],
        [4, 1], [REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
