"""Rotary embedding.

1. The gradient's formula is that of finite differences (fp64), half-split and interleaved, partial, with positions.
2. The kernel gives the formula's result for any strides, in place and not; backward undoes forward.
3. Angles follow tokens: packed and left-padded sequences; a position beyond the table is NaN and reads nothing else.
4. It gives what transformers gives, and its error is at most 1.1 times that (GPU).
"""

import pytest
import torch
from training_functions import (
    CUDA,
    DEVICE,
    DTYPES,
    GPU_ONLY,
    assert_close,
    assert_no_worse,
    gradients,
    kernels,
    leaf,
    random,
    strided,
)  # fmt: skip

from unweight.errors import UnsupportedTensorError
from unweight.finetune import references
from unweight.finetune.rope import rope

gpu = pytest.mark.skipif(not CUDA, reason=GPU_ONLY)


def angles(*shape, dtype=torch.float32, seed=9):
    phase = random(*shape, dtype=torch.float64, seed=seed) * 3
    return phase.cos().to(dtype), phase.sin().to(dtype)


CASES = {
    "half-split": (2, 3, 4, 2, 8, 4, False),
    "partial": (1, 5, 3, 1, 10, 3, False),
    "interleaved": (2, 3, 1, 1, 6, 3, True),
    "interleaved-partial": (1, 2, 5, 5, 7, 2, True),
}


@pytest.mark.parametrize("positions", [False, True], ids=["angles", "table"])
@pytest.mark.parametrize("case", CASES)
def test_formula(case, positions):
    b, s, heads, heads_k, d, half, interleaved = CASES[case]
    q = random(b, s, heads, d, dtype=torch.float64, device="cpu").requires_grad_()
    k = random(b, s, heads_k, d, dtype=torch.float64, seed=1, device="cpu").requires_grad_()
    cos, sin = (t.cpu() for t in angles(*((7, half) if positions else (b, s, half)), dtype=torch.float64))
    at = torch.tensor([[(3 * i + j) % 7 for i in range(s)] for j in range(b)]) if positions else None
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin, at, interleaved=interleaved), (q, k))
    assert torch.autograd.gradcheck(lambda q: rope(q, None, cos, sin, at, interleaved=interleaved), (q,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, dtype):
    b, s, heads, heads_k, d, half, interleaved = CASES[case]
    # Heads before tokens, as attention has them.
    q = leaf(strided(random(b, heads, s, d, dtype=dtype)))
    k = leaf(strided(random(b, heads_k, s, d, dtype=dtype, seed=1)))
    cos, sin = angles(1, s, half)
    grads = random(b, s, heads, d, dtype=dtype, seed=2), strided(random(b, s, heads_k, d, dtype=dtype, seed=3))
    with kernels():
        turned, found = gradients(
            lambda q, k: rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved), (q, k), *grads
        )
    for out, x in zip(turned, (q, k), strict=True):
        assert_close(out, references.rotate(x.transpose(1, 2).double(), cos.double(), sin.double(), interleaved), 2)
    for out, g in zip(found, grads, strict=True):
        exact = references.rotate(g.double(), cos.double(), -sin.double(), interleaved)
        assert_close(out.transpose(1, 2), exact, 2)


@pytest.mark.parametrize("case", CASES)
def test_in_place(case):
    b, s, heads, heads_k, d, half, interleaved = CASES[case]
    memory = random(b, s, (heads + heads_k) * d)
    q, k = memory.clone().split([heads * d, heads_k * d], dim=-1)
    q, k = q.unflatten(-1, (heads, d)), k.unflatten(-1, (heads_k, d))
    cos, sin = angles(b, s, half)
    expected = [references.rotate(x.double(), cos.double(), sin.double(), interleaved) for x in (q, k)]
    with kernels():
        out = rope(q, k, cos, sin, interleaved=interleaved, inplace=True)
    assert out[0].data_ptr() == q.data_ptr()
    for a, e in zip((q, k), expected, strict=True):
        assert_close(a, e, 2)


def test_in_place_with_gradients():
    q, k = leaf(random(1, 2, 2, 4)), leaf(random(1, 2, 1, 4, seed=1))
    cos, sin = angles(1, 2, 2)
    grads = random(1, 2, 2, 4, seed=2), random(1, 2, 1, 4, seed=3)
    with kernels():
        _, found = gradients(lambda q, k: rope(q * 1, k * 1, cos, sin, inplace=True), (q, k), *grads)
        for _ in range(2):  # nothing is overwritten that a second pass would need
            _, again = gradients(lambda q, k: rope(q, k, cos, sin), (q, k), *grads)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    with pytest.raises(ValueError, match="in place"):
        rope(q, k, cos, sin, inplace=True)
    with pytest.raises(ValueError, match="in place"):
        rope((q * 1).view(1, 2, 2, 4), None, cos, sin, inplace=True)


def test_packed_and_padded_sequences_have_their_own_positions():
    cos, sin = angles(6, 2)
    x = random(1, 6, 1, 4)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]], device=DEVICE)
    with kernels():
        together = rope(x, None, cos, sin, packed)
        apart = [rope(x[:, i : i + 3], None, cos, sin, packed[:, :3]) for i in (0, 3)]
        padded = rope(x, None, cos, sin, torch.tensor([[1, 1, 0, 1, 2, 3]], device=DEVICE, dtype=torch.int32))
    assert torch.equal(together, torch.cat(apart, 1))
    assert_close(
        padded[:, 2:], references.rotate(x[:, 2:].double(), cos[None, :4].double(), sin[None, :4].double(), False), 2
    )


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernel"])
def test_positions_beyond_the_table_are_nan(fused):
    import contextlib

    cos, sin = angles(4, 2)
    x = random(1, 3, 1, 4)
    with kernels() if fused else contextlib.nullcontext():
        out = rope(x, None, cos, sin, torch.tensor([[3, 4, -1]], device=DEVICE))
    assert out[0, 0].isfinite().all()
    assert out[0, 1:].isnan().all()


def test_gradient_of_one_output_only():
    q, k = leaf(random(1, 2, 2, 4)), leaf(random(1, 2, 1, 4, seed=1))
    cos, sin = angles(1, 2, 2)
    with kernels():
        rope(q, k, cos, sin)[1].sum().backward()
    assert q.grad is None
    assert_close(k.grad, references.rotate(torch.ones_like(k).double(), cos.double(), -sin.double(), False), 2)


def test_nothing_is_kept_but_the_angles():
    q, k = leaf(random(1, 2, 2, 4)), leaf(random(1, 2, 1, 4, seed=1))
    cos, sin = angles(1, 2, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t), kernels():
        rope(q, k, cos, sin)
    assert kept == [cos.data_ptr(), sin.data_ptr()]


def test_like_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = random(2, 4, 3, 8), random(2, 2, 3, 8, seed=1)
    cos, sin = angles(2, 3, 4)
    expected = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    ours = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for a, e in zip(ours, expected, strict=True):
        assert_close(a.transpose(1, 2), e, 2)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.ones(2, 3, 4)}, ValueError, "B, S, H, D"),
        ({"k": torch.ones(1, 4, 1, 4)}, ValueError, "the same B, S and D"),
        ({"k": torch.ones(1, 2, 1, 4, dtype=torch.float64)}, UnsupportedTensorError, "one dtype"),
        ({"cos": torch.ones(1, 2, 3), "sin": torch.ones(1, 2, 3)}, ValueError, "R at most 4"),
        ({"cos": torch.ones(1, 3, 2), "sin": torch.ones(1, 3, 2)}, ValueError, "cos and sin"),
        ({"positions": torch.ones(1, 2)}, UnsupportedTensorError, "positions"),
        ({"positions": torch.ones(1, 3, dtype=torch.int64)}, ValueError, "positions"),
    ],
)
def test_refused(change, error, text):
    arguments = {
        "q": torch.ones(1, 2, 1, 4),
        "k": None,
        "cos": torch.ones(1, 2, 2),
        "sin": torch.ones(1, 2, 2),
    } | change
    with pytest.raises(error, match=text):
        rope(**arguments)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_as_exact_as_transformers(d, dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = leaf(random(2, 32, 512, d, dtype=dtype)), leaf(random(2, 8, 512, d, dtype=dtype, seed=1))
    cos, sin = angles(2, 512, d // 2, dtype=dtype)
    grads = random(2, 32, 512, d, dtype=dtype, seed=2), random(2, 8, 512, d, dtype=dtype, seed=3)
    ours = gradients(
        lambda q, k: [x.transpose(1, 2) for x in rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)], (q, k), *grads
    )
    peer = gradients(
        lambda q, k: apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)), (q, k), *grads
    )
    exact = [references.rotate(x.transpose(1, 2).double(), cos.double(), sign * sin.double(), False).transpose(1, 2)
             for x, sign in ((q, 1), (k, 1), (grads[0], -1), (grads[1], -1))]  # fmt: skip
    for a, e, p in zip((*ours[0], *ours[1]), exact, (*peer[0], *peer[1]), strict=True):
        assert_no_worse(a, e, p)
