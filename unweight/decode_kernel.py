"""Device functions for one token of each row: normalisation, rotation, attention.

They are as exact as the modules whose place they take: fp32 inside, and rounded where those round.  Numbers have any
floating-point dtype, so that the Triton interpreter, which has no BF16 arithmetic, runs them in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a root mean square norm applies its weight.
NO_NORM = 0
ROUND_THEN_SCALE = 1  # weight * round(x / rms)
SCALE_BY_ONE_PLUS = 2  # round(x / rms * (1 + weight))


@triton.jit
def _normalised(x, square_mean, weight, eps, NORM: tl.constexpr, dtype: tl.constexpr):
    """fp32, rounded to ``dtype`` in the places of the module."""
    x = x * tl.rsqrt(square_mean + eps)
    if NORM == 1:
        x = x.to(dtype).to(tl.float32) * weight
    else:
        x = x * (1.0 + weight)
    return x.to(dtype).to(tl.float32)


@triton.jit
def norm_kernel(
    out_ptr, sum_ptr, x_ptr, addend_ptr, weight_ptr, K, eps, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row; with ADD, of the sum of two, which is stored too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    stored = tl.load(x_ptr + row * K + column, mask=inside, other=0.0)
    if ADD:
        addend = tl.load(addend_ptr + row * K + column, mask=inside, other=0.0)
        stored = (stored.to(tl.float32) + addend.to(tl.float32)).to(stored.dtype)
        tl.store(sum_ptr + row * K + column, stored, mask=inside)
    x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = _normalised(x, tl.sum(x * x, 0) / K, weight, eps, NORM, stored.dtype)
    tl.store(out_ptr + row * K + column, y.to(stored.dtype), mask=inside)


@triton.jit
def _rotated(a, b, cos, sin, dtype: tl.constexpr):
    """``a cos + b sin``, rounded as three operations of torch round it."""
    first = (a * cos).to(dtype).to(tl.float32)
    second = (b * sin).to(dtype).to(tl.float32)
    return (first + second).to(dtype)


@triton.jit
def rotate_store_kernel(
    q_out_ptr, keys_ptr, values_ptr, q_ptr, k_ptr, v_ptr, q_row, k_row, v_row, cos_ptr, sin_ptr, q_weight_ptr,
    k_weight_ptr, position_ptr, cache_row, cache_head, q_heads, kv_heads, eps,
    NORM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query is normalised and rotated, a key too and stored, a value is stored."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, D // 2)
    slot = tl.load(position_ptr)
    if head < q_heads:
        in_ptr = q_ptr + row * q_row + head * D
        out_ptr = q_out_ptr + (row * q_heads + head) * D
        weight_ptr = q_weight_ptr
    elif head < q_heads + kv_heads:
        kv = head - q_heads
        in_ptr = k_ptr + row * k_row + kv * D
        out_ptr = keys_ptr + row * cache_row + kv.to(tl.int64) * cache_head + slot * D
        weight_ptr = k_weight_ptr
    else:
        kv = head - q_heads - kv_heads
        in_ptr = v_ptr + row * v_row + kv * D
        out_ptr = values_ptr + row * cache_row + kv.to(tl.int64) * cache_head + slot * D
        weight_ptr = k_weight_ptr
    stored_low = tl.load(in_ptr + i)
    stored_high = tl.load(in_ptr + D // 2 + i)
    if head < q_heads + kv_heads:
        low, high = stored_low.to(tl.float32), stored_high.to(tl.float32)
        if NORM:
            mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D
            low_weight = tl.load(weight_ptr + i).to(tl.float32)
            high_weight = tl.load(weight_ptr + D // 2 + i).to(tl.float32)
            low = _normalised(low, mean, low_weight, eps, NORM, stored_low.dtype)
            high = _normalised(high, mean, high_weight, eps, NORM, stored_low.dtype)
        at = row * D + i
        cos_low, cos_high = tl.load(cos_ptr + at).to(tl.float32), tl.load(cos_ptr + at + D // 2).to(tl.float32)
        sin_low, sin_high = tl.load(sin_ptr + at).to(tl.float32), tl.load(sin_ptr + at + D // 2).to(tl.float32)
        tl.store(out_ptr + i, _rotated(low, -high, cos_low, sin_low, stored_low.dtype))
        tl.store(out_ptr + D // 2 + i, _rotated(high, low, cos_high, sin_high, stored_low.dtype))
    else:
        tl.store(out_ptr + i, stored_low)
        tl.store(out_ptr + D // 2 + i, stored_high)


@triton.jit
def attend_kernel(
    sums_ptr, peaks_ptr, totals_ptr, q_ptr, keys_ptr, values_ptr, starts_ptr, position_ptr, scale, key_row, key_head,
    value_row, value_head, kv_heads, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """A part of the slots, for the queries that share a head of keys: sums not yet divided, their peaks and totals."""
    pair = tl.program_id(0)
    split, splits = tl.program_id(1), tl.num_programs(1)
    row = (pair // kv_heads).to(tl.int64)
    head = pair % kv_heads
    stop = tl.load(position_ptr).to(tl.int32) + 1
    start = tl.load(starts_ptr + row).to(tl.int32)
    if WINDOW:
        start = tl.maximum(start, stop - WINDOW)
    blocks = tl.cdiv(stop, BLOCK) - start // BLOCK
    share = tl.cdiv(blocks, splits)
    first = start // BLOCK + split * share
    last = tl.minimum(first + share, tl.cdiv(stop, BLOCK))
    g, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    queries = pair.to(tl.int64) * GROUP + g
    q = tl.load(q_ptr + queries[:, None] * D + d[None, :], mask=g[:, None] < GROUP, other=0.0)
    keys_ptr += row * key_row + head.to(tl.int64) * key_head
    values_ptr += row * value_row + head.to(tl.int64) * value_head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    # Every block has a slot that counts, so no peak stays infinite.
    for block in range(first, last):
        slot = block * BLOCK + n
        counts = (slot >= start) & (slot < stop)
        at = slot.to(tl.int64)[:, None] * D + d[None, :]
        k = tl.load(keys_ptr + at, mask=counts[:, None], other=0.0)
        v = tl.load(values_ptr + at, mask=counts[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(counts[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(peak - higher)
        total = total * kept + tl.sum(weight, 1)
        sums = sums * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = higher
    real = g < GROUP
    part = queries * splits + split
    tl.store(sums_ptr + part[:, None] * D + d[None, :], sums, mask=real[:, None])
    tl.store(peaks_ptr + part, peak, mask=real)
    tl.store(totals_ptr + part, total, mask=real)


@triton.jit
def combine_kernel(out_ptr, sums_ptr, peaks_ptr, totals_ptr, SPLITS: tl.constexpr, D: tl.constexpr):
    """One query: the parts' sums on a common scale, divided by their common total."""
    query = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    peaks = tl.load(peaks_ptr + query * SPLITS + s)
    scale = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(tl.load(totals_ptr + query * SPLITS + s) * scale, 0)
    sums = tl.load(sums_ptr + (query * SPLITS + s)[:, None] * D + d[None, :])
    out = tl.sum(sums * scale[:, None], 0) / total
    tl.store(out_ptr + query * D + d, out.to(out_ptr.dtype.element_ty))
