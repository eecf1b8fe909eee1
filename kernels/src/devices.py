"""What a device can do, asked once.

device_info(device)  -> DeviceInfo
"""

from __future__ import annotations

import functools
from importlib import import_module

import torch
import triton
from triton.runtime import driver

from unweight.errors import DeviceError

from .problems import DeviceInfo

NO_GPU = DeviceInfo("cpu", (0, 0), 0, 0, False, triton.__version__, "")


def device_info(device: torch.device) -> DeviceInfo:
    """What choices may depend on, for a GPU or for the CPU.

    Raises:
        DeviceError: the device is of a kind that the kernels don't run on.
    """
    if device.type == "cpu":
        return NO_GPU
    if device.type != "cuda" or torch.version.cuda is None:
        kind = "cuda by ROCm" if device.type == "cuda" else device.type
        raise DeviceError(
            f"compressed weights can't be used on {device} ({kind}): the kernels are for NVIDIA GPUs; "
            "use dense weights there (unweight.decompress)"
        )
    return _gpu_info(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < (8, 0):
        raise DeviceError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; products of BF16 need 8.0 or "
            "later: use dense weights in another dtype there"
        )
    return DeviceInfo(
        name=properties.name,
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        shared_memory=driver.active.utils.get_device_properties(index)["max_shared_mem"],
        gluon=has_gluon(),
        triton=triton.__version__,
        cuda=str(torch.version.cuda),
    )


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the parts of Gluon, an experimental language, that `stream`, `wgmma` and `mma` use."""
    try:
        for name in ("stream_kernel", "wgmma_kernel", "mma_kernel"):
            import_module(f".{name}", __package__)
    except (ImportError, AttributeError, TypeError):
        return False
    return True
