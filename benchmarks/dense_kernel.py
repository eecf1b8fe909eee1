"""The device side of `dense` on Hopper: the stream kernel (`unweight.kernels.stream_kernel`) with nothing to decode.

The division of the work, the ring of stages, the end of a tile and the early start are the stream kernel's own
functions.  Weights are BF16 tiles in shared memory, so both operands of a product are there, and a stage is given back
when the products of the next one have been issued.
"""

# Device functions: Triton gives their arguments types.
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from unweight.kernels.stream_kernel import (
    STRIPS,
    _barrier,
    _copy,
    _finish,
    _leave,
    _let_next_kernel_start,
    _place,
    _segment,
    _share,
    _wait_for_previous_kernel,
)


@gluon.jit
def _produce(
    copying, work,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_d, w_d, stages_x, stages_w, full, empty = copying
    total, share, begin, split_tiles, steps, tiles_n, tiles_m = work
    BYTES: gl.constexpr = UNITS * (STRIPS * 8192 + BLOCK_M * 128)
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
            for u in gl.static_range(UNITS):
                for c in gl.static_range(STRIPS):
                    at = [(tile_n * STRIPS + c) * 64, (step * UNITS + u) * 64]
                    _copy(w_d, at, bar, stages_w.index((s * UNITS + u) * STRIPS + c))
            if stage == 0:
                _wait_for_previous_kernel(PDL)
                _let_next_kernel_start(PDL)
            for u in gl.static_range(UNITS):
                _copy(x_d, [tile_m * BLOCK_M, (step * UNITS + u) * 64], bar, stages_x.index(s * UNITS + u))
            stage += 1
        done += last - first


@gluon.jit
def _multiply(acc, stages_x, stages_w, slot, c: gl.constexpr, UNITS: gl.constexpr):
    """Issue a stage's products, and wait for those before them."""
    for u in gl.static_range(UNITS):
        x = stages_x.index(slot * UNITS + u).permute([1, 0])
        acc = warpgroup_mma(stages_w.index((slot * UNITS + u) * STRIPS + c), x, acc, is_async=True)
    return warpgroup_mma_wait(UNITS, deps=[acc])


@gluon.jit
def _consume(
    sums, work,
    c: gl.constexpr, BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    y_ptr, partial_ptr, flag_ptr, stages_x, stages_w, full, empty, M, N = sums
    total, share, begin, split_tiles, steps, tiles_n, tiles_m = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = total * 0
    slot = total * 0
    phase = total * 0
    _wait_for_previous_kernel(PDL)
    while done < total:
        tile, first, last = _segment(done, share, begin, split_tiles, steps)
        tile_n, tile_m = _place(tile, tiles_n, tiles_m, GROUP)
        acc = gl.zeros([64, BLOCK_M], gl.float32, layout=ACC)
        mbarrier.wait(full.index(slot), phase)
        acc = _multiply(acc, stages_x, stages_w, slot, c, UNITS)
        for _ in range(first + 1, last):
            used = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            mbarrier.wait(full.index(slot), phase)
            acc = _multiply(acc, stages_x, stages_w, slot, c, UNITS)
            mbarrier.arrive(empty.index(used), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
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
            _finish(
                y_ptr, y_ptr, acc, partial_ptr + c * (64 * BLOCK_M), program + 1, others, STRIPS * 64 * BLOCK_M,
                (tile_n * STRIPS + c) * 64, tile_m * BLOCK_M, M, N, BLOCK_M, 0, False,
            )  # fmt: skip
        done += last - first


@gluon.jit(do_not_specialize=["M", "N", "steps", "tiles_n", "tiles_m", "split_tiles"])
def dense_stream_kernel(
    y_ptr, x_d, w_d, partial_ptr, flag_ptr, M, N, steps, tiles_n, tiles_m, split_tiles,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
    REGISTERS: gl.constexpr, COPYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    stages_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNITS, BLOCK_M, 64], x_d.layout)
    stages_w = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNITS * STRIPS, 64, 64], w_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=STRIPS)
    fence_async_shared()
    _barrier()

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = _share(program, programs, split_tiles * steps)
    share = _share(program + 1, programs, split_tiles * steps) - begin
    others = tiles_n * tiles_m - split_tiles
    total = share + gl.maximum(0, gl.cdiv(others - program, programs)) * steps

    work = (total, share, begin, split_tiles, steps, tiles_n, tiles_m)
    copying = (x_d, w_d, stages_x, stages_w, full, empty)
    sums = (y_ptr, partial_ptr, flag_ptr, stages_x, stages_w, full, empty, M, N)
    gl.warp_specialize(
        [
            (_consume, (sums, work, 0, BLOCK_M, UNITS, STAGES, GROUP, PDL)),
            (_consume, (sums, work, 1, BLOCK_M, UNITS, STAGES, GROUP, PDL)),
            (_produce, (copying, work, BLOCK_M, UNITS, STAGES, GROUP, PDL)),
        ],
        [4, 1], [REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
