"""`wgmma` in every configuration of its search space, for Hopper."""

from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.wgmma import search_space
from unweight.kernels.wgmma_kernel import wgmma_kernel

HOPPER = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, gluon=True, triton="3.6.0", cuda="13.0")
TYPES = {
    "y_ptr": "*bf16", "x_ptr": "*bf16", "planes_ptr": "*i32", "bias_ptr": "*bf16", "tables_ptr": "*i32",
    "start_ptr": "*i32", "at_ptr": "*i32", "value_ptr": "*i16", "turned_ptr": "*bf16",
}  # fmt: skip
# What Hopper's instructions need.
CAPABILITIES = (90,)


def case(config):
    constants = {
        "BLOCK_M": config.block_m, "UNITS": config.units, "STAGES": config.stages, "BIAS": bool(config.pdl),
        "PDL": bool(config.pdl),
    }  # fmt: skip
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in wgmma_kernel.arg_names}
    options = {"num_warps": 4, "launch_pdl": bool(config.pdl)}
    return wgmma_kernel, signature, constants, options, ("x_ptr", "planes_ptr", "turned_ptr")


def cases():
    for m in (16, 32, 64):
        for config in search_space(Problem("linear", "palette", m, 14336, 4096), HOPPER):
            yield case(config)
