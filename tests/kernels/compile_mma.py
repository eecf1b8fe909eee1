"""`mma` in every configuration of its search space, for usual shapes."""

from unweight.kernels.mma import escapes, num_warps, search_space
from unweight.kernels.mma_kernel import mma_kernel
from unweight.kernels.problems import DeviceInfo, Problem

DEVICES = {
    80: DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, True, "3.6.0", "12.8"),
    90: DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8"),
    100: DeviceInfo("NVIDIA B200", (10, 0), 148, 232448, True, "3.6.0", "12.8"),
}
TYPES = {
    "out_ptr": "*bf16", "x_ptr": "*bf16", "planes_ptr": "*u8", "tables_ptr": "*u8", "start_ptr": "*i32",
    "at_ptr": "*i32", "turned_ptr": "*bf16", "bits_ptr": "*i16", "bias_ptr": "*bf16",
}  # fmt: skip


def configurations(device):
    """Configurations, each once, and whether K and x are as no copy wants them."""
    found = {}
    for m in (16, 1, 32, 64):
        for n in (14336, 1024):
            for config in search_space(Problem("linear", "palette", m, n, 4096), device):
                found.setdefault((config, False))
    # The last case: nothing is even.
    return [*found, (search_space(Problem("linear", "palette", 16, 14336, 4096), device)[-1], True)]


def case(config, ragged=False):
    constants = {
        "BLOCK_M": config.block_m, "ROWS": config.rows, "PARTS": config.parts, "UNITS": config.units,
        "STAGES": config.stages, "TURNED": bool(config.turned), "ESCAPES": escapes(config), "EVEN": not ragged,
        "VECTOR": not ragged, "BIAS": ragged or bool(config.pdl), "PDL": bool(config.pdl),
    }  # fmt: skip
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in mma_kernel.arg_names}
    options = {"num_warps": num_warps(config), "launch_pdl": bool(config.pdl)}
    aligned = ("out_ptr", "planes_ptr") if ragged else ("out_ptr", "planes_ptr", "x_ptr", "N")
    return mma_kernel, signature, constants, options, aligned


def cases(capability=90):
    for config, ragged in configurations(DEVICES[capability]):
        yield case(config, ragged)
