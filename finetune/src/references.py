"""The functions in plain torch operations, forward and backward, of any floating-point dtype and on any device.

Contract
    At least fp32 inside, one rounding at the end, as in the kernels.  Every gradient here is a formula, not autograd's:
    ``gradcheck`` compares them with differences in fp64, and the kernels are compared with them.
"""

from __future__ import annotations

import math

import torch

from .placement import wide

# What multiplies ``up`` in a gated MLP.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


# Norms


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``n (offset + weight)`` and ``1 / rms`` for [M, N]: n = x / rms, rounded to x's dtype before if ``round_first``.

    Returns:
        [M, N] of x's dtype, and [M] of at least fp32.
    """
    rstd = torch.rsqrt(wide(x).square().mean(-1) + eps)
    return rms_scale(x, rstd, weight, offset, round_first), rstd


def rms_scale(
    x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, offset: float, round_first: bool
) -> torch.Tensor:
    """`rms_norm` for an ``rstd`` that is known."""
    normed = wide(x) * rstd[:, None]
    if round_first:
        normed = wide(normed.to(x.dtype))
    return (normed * (offset + wide(weight))).to(x.dtype)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dx`` and ``dweight``, both of at least fp32.

    With g = dy (offset + weight):  dx = rstd (g - n mean(g n)),  dweight = the sum of dy n over all rows.
    """
    normed = wide(x) * rstd[:, None]
    g = wide(dy) * (offset + wide(weight))
    dx = rstd[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    return dx, (wide(dy) * normed).sum(0)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``n weight + bias``, the mean and ``1 / deviation`` of each row of [M, N]."""
    mean = wide(x).mean(-1)
    centred = wide(x) - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[:, None]
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return y.to(x.dtype), mean, rstd


def layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dx``, ``dweight`` and ``dbias``.  With g = dy weight:  dx = rstd (g - mean(g) - n mean(g n))."""
    normed = (wide(x) - mean[:, None]) * rstd[:, None]
    g = wide(dy) if weight is None else wide(dy) * wide(weight)
    dx = rstd[:, None] * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
    return dx, (wide(dy) * normed).sum(0), wide(dy).sum(0)


# Rotary embedding


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs of columns turned by an angle; columns beyond the pairs are left as they are.

    Args:
        x: [B, S, H, D].
        cos, sin: [B or 1, S, R / 2] for R <= D rotated columns.
        interleaved: pairs are columns 2 i and 2 i + 1, not i and i + R / 2.
    """
    half = cos.shape[-1]
    c, s = wide(cos)[:, :, None], wide(sin)[:, :, None]
    turned, rest = wide(x[..., : 2 * half]), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    parts = (first * c - second * s, second * c + first * s)
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


# Gated MLP


def activate(gate: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation and its derivative, of at least fp32."""
    e = wide(gate)
    if activation == "silu":
        s = torch.sigmoid(e)
        return e * s, s * (1 + e * (1 - s))
    if activation == "gelu":
        p = 0.5 * torch.special.erfc(-e * math.sqrt(0.5))
        return e * p, p + e * torch.exp(-0.5 * e * e) / math.sqrt(2 * math.pi)
    # 1 + tanh(q) = 2 sigmoid(2 q), which loses nothing where tanh is near -1.
    root = math.sqrt(2 / math.pi)
    s = torch.sigmoid(2 * root * (e + 0.044715 * e**3))
    return e * s, s + e * s * (1 - s) * 2 * root * (1 + 0.134145 * e * e)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) up``."""
    return (activate(gate, activation)[0] * wide(up)).to(gate.dtype)


def gated_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``h = activation(gate) up`` again, ``dgate`` and ``dup``."""
    f, derivative = activate(gate, activation)
    d, u = wide(dh), wide(up)
    return (f * u).to(gate.dtype), (d * u * derivative).to(gate.dtype), (d * f).to(up.dtype)


# Cross-entropy


def logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, softcap: float, scale: float, smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss and log-sum-exp of each row, and the loss's gradient by the logits.

    With z = softcap tanh(scale logits / softcap), or scale logits:
    loss = lse(z) - (1 - smoothing) z_label - smoothing mean(z) + z_loss lse(z)^2, zero where labels are ignored, NaN
    where they are no column.

    Args:
        logits: [M, V].
        labels: integers [M].

    Returns:
        [M], [M] and [M, V], all of at least fp32.
    """
    v = logits.shape[1]
    z = wide(logits) * scale
    slope = torch.full_like(z, scale)
    if softcap:
        t = torch.tanh(z / softcap)
        z, slope = softcap * t, scale * (1 - t * t)
    lse = torch.logsumexp(z, dim=-1)
    valid, inside = labels != ignore_index, (labels >= 0) & (labels < v)
    at = torch.where(inside, labels, 0)[:, None]
    loss = lse - (1 - smoothing) * z.gather(1, at)[:, 0] - smoothing * z.mean(-1) + z_loss * lse * lse
    dz = torch.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - smoothing / v
    dz.scatter_add_(1, at, torch.full_like(lse, smoothing - 1)[:, None])
    loss = torch.where(inside, loss, math.nan)
    dz = torch.where(inside[:, None], dz * slope, math.nan)
    zero = loss.new_zeros(())
    return torch.where(valid, loss, zero), torch.where(valid, lse, zero), torch.where(valid[:, None], dz, zero)


# Dropout


def dropout_mask(shape: tuple[int, ...], p: float, seed: int, device: torch.device) -> torch.Tensor:
    """What is kept, as a function of the seed and the shape alone."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.rand(shape, generator=generator) >= p).to(device)


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """``x / (1 - p)`` where it is kept, else 0; its own gradient, since it is linear."""
    kept = dropout_mask(tuple(x.shape), p, seed, x.device)
    return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def activation_name(name: str) -> str | None:
    """Ours for a name that configurations give an activation, or None."""
    return {
        "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_tanh": "gelu_tanh",
    }.get(name)  # fmt: skip
