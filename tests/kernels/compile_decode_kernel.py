"""What the launchers of `decode_ops` compile for BF16 models, with heads of 64, 128 and 256."""

from unweight import decode_kernel as kernels
from unweight import decode_ops

BF16, F32, I32, I64 = "*bf16", "*fp32", "i32", "*i64"
TYPES = {
    "sum_ptr": BF16, "addend_ptr": BF16,
    "out_ptr": BF16, "x_ptr": BF16, "weight_ptr": BF16, "K": I32, "eps": "fp32", "q_out_ptr": BF16, "keys_ptr": BF16,
    "values_ptr": BF16, "q_ptr": BF16, "k_ptr": BF16, "v_ptr": BF16, "q_row": I32, "k_row": I32, "v_row": I32,
    "cos_ptr": BF16, "sin_ptr": BF16, "q_weight_ptr": BF16, "k_weight_ptr": BF16, "position_ptr": I64,
    "cache_row": I32, "cache_head": I32, "q_heads": I32, "kv_heads": I32, "sums_ptr": F32, "peaks_ptr": F32,
    "totals_ptr": F32, "starts_ptr": "*i32", "scale": "fp32", "key_row": I32, "key_head": I32, "value_row": I32,
    "value_head": I32,
}  # fmt: skip


def _case(kernel, constants, options):
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    return kernel, signature, constants, options, aligned


def cases():
    for kind in (kernels.ROUND_THEN_SCALE, kernels.SCALE_BY_ONE_PLUS):
        for adds in (False, True):
            yield _case(kernels.norm_kernel, {"ADD": adds, "NORM": kind, "BLOCK": 4096}, {"num_warps": 8})
        yield _case(kernels.rotate_store_kernel, {"NORM": kind, "D": 256}, {"num_warps": 1})
    yield _case(kernels.rotate_store_kernel, {"NORM": kernels.NO_NORM, "D": 128}, {"num_warps": 1})
    for dim, window in ((64, 0), (256, 512), (128, 0)):
        constants = {"GROUP": 4, "ROWS": 16, "D": dim, "BLOCK": decode_ops.BLOCK, "WINDOW": window}
        yield _case(kernels.attend_kernel, constants, {"num_warps": 4, "num_stages": 2})
        for splits in (1, decode_ops.MAX_SPLITS):
            yield _case(kernels.combine_kernel, {"SPLITS": splits, "D": dim}, {"num_warps": 8 if splits > 1 else 1})
