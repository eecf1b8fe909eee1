"""`wgmma` in every configuration of its search space, for Hopper."""

from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.wgmma import search_space
from unweight.kernels.wgmma_kernel import wgmma_kernel

HOPPER = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, gluon=True, triton="3.6.0", cuda="13.0")
TYPES = {
    "y_ptr": "*bf16", "x_ptr": "*bf16", "planes_ptr": "*i32", "bias_ptr": "*bf16", "tables_ptr": "*i32",
    "start_ptr": "*i32", "at_ptr": "*i32", "value_ptr": "*i16",
}  # fmt: skip
# What Hopper's instructions need.
CAPABILITIES = (90,)


def cases():
    for m in (1, 16, 64):
        for config in search_space(Problem("linear", "palette", m, 14336, 4096), HOPPER):
            constants = {
                "BLOCK_M": config.block_m, "STRIPS": config.strips, "UNITS": config.units, "STAGES": config.stages,
                "BIAS": bool(config.pdl), "PDL": bool(config.pdl), "num_warps": 4 * config.strips,
            }  # fmt: skip
            signature = {
                name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in wgmma_kernel.arg_names
            }
            aligned = ("x_ptr", "planes_ptr")
            yield (
                wgmma_kernel,
                signature,
                constants,
                {"num_warps": 4 * config.strips, "launch_pdl": bool(config.pdl)},
                aligned,
            )
