"""What tests of the training functions share: inputs, poison, gradients, and how exact a result must be."""

import contextlib
from unittest import mock

import torch

from unweight.finetune import cross_entropy, dropout, gated_mlp, layer_norm, placement, rms_norm, rope

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU_ONLY = "the Triton interpreter has no BF16 arithmetic"
# What kernels are run with: the interpreter is slow, and has no BF16.
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
MODULES = (cross_entropy, dropout, gated_mlp, layer_norm, rms_norm, rope)


@contextlib.contextmanager
def kernels():
    """Run the kernels, on the GPU or interpreted, whatever the device; memory that nobody writes is NaN."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)
        for module in MODULES:
            if not CUDA:
                runs = lambda x: x.dtype in placement.KERNEL_DTYPES and x.numel() > 0  # noqa: E731
                stack.enter_context(mock.patch.object(module, "fused", runs))
            if not CUDA and hasattr(module, "on_device"):
                stack.enter_context(mock.patch.object(module, "on_device", contextlib.nullcontext))
        yield


def random(*shape, dtype=torch.float32, seed=0, scale=1.0, device=DEVICE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(device, dtype)


def leaf(x):
    return x.detach().clone().requires_grad_()


def strided(x):
    """The same numbers with rows further apart, and not from a multiple of 16 bytes on."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 7), torch.nan, dtype=x.dtype, device=x.device)
    part = wide[..., 3 : 3 + x.shape[-1]]
    part.copy_(x)
    return part


def assert_close(actual, exact, terms, size=None):
    """``actual`` is ``exact`` up to an fp32 sum of ``terms`` numbers, and one rounding to its dtype.

    A sum of n numbers of at most ``size`` together is off by at most n 2^-24 of it, to first order; 16 more steps are
    for the functions around it (exp, rsqrt and the like are good to some units of 2^-24).  A rounding is off by half a
    unit.
    """
    exact = exact.double()
    size = exact.abs().max() if size is None else size
    unit = torch.finfo(actual.dtype).eps / 2
    bound = (terms + 16) * 2.0**-23 * size + unit * exact.abs() + torch.finfo(actual.dtype).tiny * 2.0**-8
    error = (actual.double() - exact).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times the bound"


def assert_no_worse(actual, exact, peer, factor=1.1):
    """The root mean square of the error is at most ``factor`` times that of a peer, or of a rounding alone."""
    exact = exact.double()
    info = torch.finfo(actual.dtype)
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(info.tiny)))) * info.eps
    floor = (ulp / 12**0.5).square().mean().sqrt()
    error, reference = ((y.double() - exact).square().mean().sqrt() for y in (actual, peer))
    limit = factor * torch.maximum(reference, floor)
    assert error <= limit, f"{error:.3g}; the peer {reference:.3g}, a rounding {floor:.3g}"


def gradients(function, inputs, *grads):
    """Outputs and gradients of ``function`` by all ``inputs`` that need one."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [y.detach() for y in outputs], found
