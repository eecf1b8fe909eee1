"""What the launchers of `benchmarks/dense.py` compile, for Hopper: `python ../kernels/compile_all.py 90 compile_dense`,
with both folders of benchmarks on the path.
"""

import dense
from dense_kernel import dense_stream_kernel

from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.stream import COPYING_REGISTERS, REGISTERS, REGISTERS_AT_START

HOPPER = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, gluon=True, triton="3.6.0", cuda="13.0")
# The first and the last are compiled by the tests.
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256, 1024, 16)


def cases():
    for m in BATCHES:
        for rival in dense.rivals(Problem("linear", "palette", m, 14336, 4096), HOPPER):
            yield gemv_case(m, rival.config) if rival.kernel == "gemv" else stream_case(rival.config)


def gemv_case(m, config):
    constants = {
        "M": m, "ROWS": config.rows, "WORDS": config.words, "EVEN": 4096 % (2 * config.words) == 0,
        "PDL": bool(config.pdl), "ASM": True,
    }  # fmt: skip
    types = {"out_ptr": "*bf16", "x_ptr": "*bf16", "w_ptr": "*bf16"}
    options = {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": True}
    return *_case(dense._dense_gemv_kernel, types, constants, options, config), ("x_ptr", "w_ptr", "K", "stride_x")


def stream_case(config):
    constants = {
        "BLOCK_M": config.block_m, "UNITS": config.units, "STAGES": config.stages, "GROUP": config.group,
        "PDL": bool(config.pdl), "REGISTERS": REGISTERS, "COPYING_REGISTERS": COPYING_REGISTERS,
    }  # fmt: skip
    layout = dense.operand_layout()
    types = {
        "y_ptr": "*bf16", "partial_ptr": "*fp32", "flag_ptr": "*i32",
        "x_d": f"tensordesc<bf16[{config.block_m}, 64],{layout}>", "w_d": f"tensordesc<bf16[64, 64],{layout}>",
    }  # fmt: skip
    return _case(dense_stream_kernel, types, constants, {"num_warps": 4, "maxnreg": REGISTERS_AT_START}, config)


def _case(kernel, types, constants, options, config):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    return kernel, signature, constants, options | {"launch_pdl": bool(config.pdl)}


# What Hopper's instructions need.
CAPABILITIES = (90,)
