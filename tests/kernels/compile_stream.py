"""`stream` in every configuration of its search space, for Hopper."""

from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.stream import COPYING_REGISTERS, REGISTERS, REGISTERS_AT_START, layouts, search_space
from unweight.kernels.stream_kernel import stream_kernel

HOPPER = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, gluon=True, triton="3.6.0", cuda="13.0")
TYPES = {
    "y_ptr": "*bf16", "bias_ptr": "*bf16", "tables_ptr": "*i32", "start_ptr": "*i32", "at_ptr": "*i32",
    "value_ptr": "*i16", "partial_ptr": "*fp32", "flag_ptr": "*i32",
}  # fmt: skip


def configurations():
    found = {}
    for op, m in (("linear", 1), ("linear", 16), ("linear", 64), ("linear", 512), ("swiglu", 16), ("swiglu", 64)):
        for config in search_space(Problem(op, "palette", m, 14336, 4096), HOPPER):
            # The groups only change the order of tiles.
            key = (config.block_m, config.units, config.stages, config.overlap, config.pdl, op)
            found.setdefault(key, (config, op))
    return [*found.values()]


def case(config, op="linear"):
    x, weights, records = layouts()
    constants = {
        "BLOCK_M": config.block_m, "UNITS": config.units, "STAGES": config.stages, "GROUP": config.group,
        "BIAS": op == "linear", "SWIGLU": op == "swiglu", "PDL": bool(config.pdl), "OVERLAP": bool(config.overlap),
        "REGISTERS": REGISTERS, "COPYING_REGISTERS": COPYING_REGISTERS,
    }  # fmt: skip
    types = TYPES | {
        "x_d": f"tensordesc<bf16[{config.block_m}, 64],{x}>",
        "nibbles_d": f"tensordesc<i32[1, {config.units}, 16, 32],{weights}>",
        "low_d": f"tensordesc<i32[1, {config.units}, 32, 32],{weights}>",
        "records_d": f"tensordesc<i32[8, 4],{records}>",
    }
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in stream_kernel.arg_names}
    return stream_kernel, signature, constants, {
        "num_warps": 4, "maxnreg": REGISTERS_AT_START, "launch_pdl": bool(config.pdl),
    }  # fmt: skip


def cases():
    for config, op in configurations():
        yield case(config, op)


# What Hopper's instructions need.
CAPABILITIES = (90,)
