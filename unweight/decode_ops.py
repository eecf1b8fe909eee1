"""Operations on one token of each row, each in one launch or two.

    norm(x, weight, eps, kind)         a root mean square norm
    add_norm(x, addend, ...)           the same of a sum, which is kept
    rotate_and_store(q, k, v, ...)     queries rotated; keys rotated and put into the cache, values put into it
    attend(q, keys, values, ...)       attention over the slots of the cache that are filled

Contract
    How many slots are filled is read on the device, so a captured launch is right for every token, and reads no slot
    that doesn't count.  Sums have a fixed order: runs are equal bit for bit.
"""

from __future__ import annotations

import functools
import math

import torch
import triton

from . import decode_kernel as kernels

LOG2E = math.log2(math.e)
BLOCK = 64
# Head sizes that the attention kernel takes.
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_SPLITS = 64
OPTIONS = {"enable_fp_fusion": True}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int) -> torch.Tensor:
    """The normalised x [..., K], as ``decode_kernel`` defines the kinds."""
    return _norm(x, None, weight, eps, kind)[1]


def add_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + addend`` [..., K], rounded, and that normalised."""
    return _norm(x, addend, weight, eps, kind)


def _norm(
    x: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    out = torch.empty_like(x)
    adds = addend is not None
    total = torch.empty_like(x) if adds else x
    k = x.shape[-1]
    block = triton.next_power_of_2(k)
    warps = min(16, max(1, block // 512))
    kernels.norm_kernel[(x.numel() // k,)](
        out, total, x, x if addend is None else addend.contiguous(), weight, k, eps, ADD=adds, NORM=kind, BLOCK=block,
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return total, out


def rotate_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, position: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor, float, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rotated queries [B, H, D] of q [B, H D]; keys and values go to slot ``position`` of the cache.

    Args:
        q, k, v: [B, heads * D] each with unit stride along the heads; views of one tensor will do.
        cos, sin: [B, D].
        keys, values: of the same shape [B, KV, L, D], contiguous.
        position: int64 [1].
        norms: weights [D] of the norms of queries and keys before they are rotated, their epsilon and kind.
    """
    batch, kv_heads, _, dim = keys.shape
    q_heads = q.shape[-1] // dim
    out = torch.empty(batch, q_heads, dim, dtype=q.dtype, device=q.device)
    q_weight, k_weight, eps, kind = norms or (q, q, 0.0, kernels.NO_NORM)
    kernels.rotate_store_kernel[(batch, q_heads + 2 * kv_heads)](
        out, keys, values, q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, q_weight, k_weight, position,
        keys.stride(0), keys.stride(1), q_heads, kv_heads, eps, NORM=kind, D=dim, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def splits_for(pairs: int, length: int, device: torch.device) -> int:
    """Parts into which the slots are split, so that there is work for every multiprocessor: a power of two."""
    wanted = min(triton.cdiv(2 * _multiprocessors(device), pairs), triton.cdiv(length, BLOCK), MAX_SPLITS)
    return int(triton.next_power_of_2(wanted))


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, position: torch.Tensor,
    scaling: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Attention of the tokens in slot ``position``: [B, H, D].

    Args:
        q: [B, H, D], contiguous.
        keys, values: [B, KV, L, D] with contiguous slots; H is a multiple of KV, D one of `HEAD_DIMS`.
        starts: int32 [B], each row's first slot that counts.
        position: int64 [1].
        window: slots that a token sees, its own included; 0 for all.
    """
    batch, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    splits = splits_for(batch * kv_heads, length, q.device)
    sums = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, batch * heads * splits, dtype=torch.float32, device=q.device)
    kernels.attend_kernel[(batch * kv_heads, splits)](
        sums, stats[0], stats[1], q, keys, values, starts, position, scaling * LOG2E, keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=dim,
        BLOCK=BLOCK, WINDOW=window, num_warps=4, num_stages=2, **OPTIONS,
    )  # fmt: skip
    out = torch.empty_like(q)
    warps = max(1, min(8, splits * dim // 1024))
    kernels.combine_kernel[(batch * heads,)](
        out, sums, stats[0], stats[1], SPLITS=splits, D=dim, num_warps=warps, **OPTIONS
    )  # fmt: skip
    return out
