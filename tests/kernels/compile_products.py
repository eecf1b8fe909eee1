"""What the launchers of `gemv`, `dot` and `planes` compile: the configurations that are searched for usual shapes."""

from unweight.kernels import dot, gemv, planes
from unweight.kernels.problems import DeviceInfo, Problem

DEVICES = {
    80: DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, True, "", ""),
    90: DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "", ""),
    100: DeviceInfo("NVIDIA B200", (10, 0), 148, 232448, True, "", ""),
}
TYPES = {
    "out_ptr": "*bf16", "x_ptr": "*bf16", "dy_ptr": "*bf16", "bias_ptr": "*bf16", "planes_ptr": "*u8",
    "tables_ptr": "*u8", "escape_start_ptr": "*i32", "escape_at_ptr": "*i32", "escape_bits_ptr": "*i16",
    "exponents_ptr": "*u8", "sign_mantissa_ptr": "*u8", "M": "i32", "N": "i32", "K": "i32", "strips": "i32",
    "stride_x": "i32", "stride_dy": "i32",
}  # fmt: skip
SHAPE = (14336, 4096)


def gemv_configurations(device):
    for m, edges in ((1, False), (4, False), (2, True)):
        configs = gemv.search_space(Problem("linear", "palette", m, *SHAPE), device)
        for config in configs if m == 1 else configs[::4]:
            constants = {
                "M": m, "GROUPS": config.groups, "UNITS": config.units, "ESCAPES": gemv.escapes_a_lane(config, m),
                "PAIRS": not edges, "EVEN": not edges, "BIAS": edges, "PDL": bool(config.pdl),
            }  # fmt: skip
            yield gemv._gemv_kernel, constants, {"num_warps": config.num_warps, "num_stages": 1}, config.pdl


def dot_configurations(device):
    for op in ("linear", "swiglu", "transposed"):
        for m, edges in ((1, False), (64, False), (256, False), (1, True)):
            configs = dot.search_space(Problem(op, "palette", m, *SHAPE), device)
            for config in configs[:1] if edges else configs:
                constants = {
                    "BLOCK_M": config.block_m, "UNITS": config.units, "ESCAPES": config.escapes, "EVEN": not edges,
                }  # fmt: skip
                options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
                if op == "transposed":
                    yield dot._dot_transposed_kernel, constants | {"STRIPS": dot.PIECES}, options, 0
                else:
                    constants |= {"STRIPS": config.strips, "BIAS": edges, "SWIGLU": op == "swiglu"}
                    yield dot._dot_linear_kernel, constants, options, 0


def planes_configurations(device):
    for op, kernel in (("linear", planes._planes_linear_kernel), ("transposed", planes._planes_transposed_kernel)):
        for m, edges in ((1, False), (128, False), (1, True)):
            configs = planes.search_space(Problem(op, "huffman", m, *SHAPE), device)
            for config in configs[:1] if edges else configs:
                constants = {
                    "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
                    "WORDS": not edges, "EVEN": not edges,
                }  # fmt: skip
                if op == "linear":
                    constants["BIAS"] = edges
                yield kernel, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}, 0


def cases(capability=90):
    seen = set()
    device = DEVICES[capability]
    for source in (gemv_configurations, dot_configurations, planes_configurations):
        for kernel, constants, options, pdl in source(device):
            key = (kernel.fn.__name__, *sorted(constants.items()), *sorted(options.items()))
            if key in seen:
                continue
            seen.add(key)
            constants = constants | {"ASM": True, "HOPPER": capability == 90}
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            options = options | {"enable_fp_fusion": True, "launch_pdl": bool(pdl)}
            signature = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
            aligned = [
                p.name
                for p in kernel.params
                if not (p.is_constexpr or p.do_not_specialize or p.do_not_specialize_on_alignment)
            ]
            yield kernel, signature, constants, options, aligned
