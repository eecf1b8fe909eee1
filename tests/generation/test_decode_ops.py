"""Operations on one token of each row, against the torch operations whose place they take."""

import pytest
import torch

from unweight import decode_kernel, decode_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def torch_norm(x, weight, eps, kind):
    wide = x.double()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return wide * (weight if kind == decode_kernel.ROUND_THEN_SCALE else 1 + weight)


@pytest.mark.parametrize("kind", [decode_kernel.ROUND_THEN_SCALE, decode_kernel.SCALE_BY_ONE_PLUS])
@pytest.mark.parametrize("k", [48, 256])
def test_norm(kind, k):
    torch.manual_seed(k)
    x, weight = torch.randn(3, 1, k, device=DEVICE), torch.randn(k, device=DEVICE)
    found = decode_ops.norm(x, weight, 1e-5, kind)
    # A handful of fp32 roundings and a sum of k squares: k + 8 units of 2^-24 at most, relative.
    want = torch_norm(x, weight.double(), 1e-5, kind)
    torch.testing.assert_close(found.double(), want, rtol=(k + 8) * 2**-24, atol=0)


def test_norm_of_a_sum():
    torch.manual_seed(2)
    x, addend, weight = torch.randn(3, 2, 1, 80, device=DEVICE)[..., :72], torch.randn(2, 1, 72, device=DEVICE), None
    x, weight = x[0], x[1, 0, 0]
    total, found = decode_ops.add_norm(x, addend, weight, 1e-5, decode_kernel.ROUND_THEN_SCALE)
    assert torch.equal(total, x + addend)
    assert torch.equal(found, decode_ops.norm(x + addend, weight, 1e-5, decode_kernel.ROUND_THEN_SCALE))


@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_store_puts_one_slot_into_the_cache(normed):
    torch.manual_seed(1)
    batch, heads, kv, dim, length, slot = 2, 4, 2, 16, 8, 5
    qkv = torch.randn(batch, (heads + 2 * kv) * dim, device=DEVICE)
    q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], -1)
    cos, sin = torch.randn(2, batch, dim, device=DEVICE)
    keys, values = torch.full((2, batch, kv, length, dim), float("nan"), device=DEVICE)
    norms = None
    q_heads, k_heads = q.view(batch, heads, dim), k.view(batch, kv, dim)
    if normed:
        norms = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE), 1e-6, decode_kernel.ROUND_THEN_SCALE)
        q_heads = torch_norm(q_heads, norms[0], 1e-6, norms[3]).float()
        k_heads = torch_norm(k_heads, norms[1], 1e-6, norms[3]).float()
    position = torch.tensor([slot], device=DEVICE)
    found = decode_ops.rotate_and_store(q, k, v, cos, sin, keys, values, position, norms)

    def rotated(x):
        return x * cos[:, None] + rotate_half(x) * sin[:, None]

    torch.testing.assert_close(found, rotated(q_heads), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(keys[:, :, slot], rotated(k_heads), rtol=1e-5, atol=1e-6)
    assert torch.equal(values[:, :, slot], v.view(batch, kv, dim))
    others = [i for i in range(length) if i != slot]
    assert keys[:, :, others].isnan().all()
    assert values[:, :, others].isnan().all()


@pytest.mark.parametrize("window", [0, 3, 70])
@pytest.mark.parametrize("slot", [0, 6, 63, 64, 199])
def test_attention_reads_the_slots_that_count(slot, window):
    torch.manual_seed(slot)
    batch, heads, kv, dim, length = 3, 6, 2, 16, 256
    q = torch.randn(batch, heads, dim, device=DEVICE)
    keys, values = torch.randn(2, batch, kv, length, dim, device=DEVICE)
    starts = torch.tensor([0, min(slot, 5), slot], dtype=torch.int32, device=DEVICE)
    for row, start in enumerate(starts.tolist()):
        # What doesn't count must not be read: it may be anything.
        for states in (keys, values):
            states[row, :, :start] = float("nan")
            states[row, :, slot + 1 :] = float("nan")
    found = decode_ops.attend(q, keys, values, starts, torch.tensor([slot], device=DEVICE), dim**-0.5, window)
    for row, start in enumerate(starts.tolist()):
        first = max(start, slot + 1 - window) if window else start
        k = keys[row, :, first : slot + 1].double().repeat_interleave(heads // kv, 0)
        v = values[row, :, first : slot + 1].double().repeat_interleave(heads // kv, 0)
        weight = (torch.einsum("hd,hnd->hn", q[row].double(), k) * dim**-0.5).softmax(-1)
        # Scores of up to 20 have absolute errors of 20 * 2^-22, weights that relative one; sums are of order 1.
        torch.testing.assert_close(found[row].double(), torch.einsum("hn,hnd->hd", weight, v), rtol=0, atol=2e-5)
