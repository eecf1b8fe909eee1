"""What the launchers of the training functions compile, for tests/kernels/compile_all.py."""

import itertools

from unweight.finetune import cross_entropy, dropout, gated_mlp, layer_norm, placement, references, rms_norm, rope

WIDTHS = (128, 4096)
FLOATS = ("bf16", "fp16", "fp32")
# Everything else that isn't a pointer is i32.
SCALARS = {
    "eps": "fp32", "offset": "fp32", "p": "fp32", "scale": "fp32", "softcap": "fp32", "smoothing": "fp32",
    "z_loss": "fp32",
}  # fmt: skip
WIDE = {"rstd_ptr", "mean_ptr", "dweight_ptr", "dbias_ptr", "lse_ptr", "loss_ptr", "factor_ptr"}
INTEGERS = {"labels_ptr", "positions_ptr"}


def signature(kernel, constants, dtype):
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = "*i64" if name in INTEGERS else "*fp32" if name in WIDE else f"*{dtype}"
        else:
            types[name] = SCALARS.get(name, "i32")
    return types


def configurations():
    for n, dtype in itertools.product(WIDTHS, FLOATS):
        rows, block, warps = placement.row_block(n)
        size = {"ROWS": rows, "BLOCK": block}
        for flag in (False, True):
            yield rms_norm._rms_norm_kernel, size | {"ADD": flag, "KNOWN": False, "ROUND": not flag}, warps, dtype
            yield rms_norm._rms_norm_backward_kernel, size | {"EXTRA": flag, "DWEIGHT": flag}, warps, dtype
            yield layer_norm._layer_norm_kernel, size | {"WEIGHT": flag, "BIAS": flag}, warps, dtype
            yield layer_norm._layer_norm_backward_kernel, size | {"WEIGHT": True, "PARAMETERS": flag}, warps, dtype
        yield rms_norm._rms_norm_kernel, size | {"ADD": False, "KNOWN": True, "ROUND": True}, warps, dtype
    for (half, tail), interleaved, positions in itertools.product(((64, 0), (48, 32)), (False, True), (False, True)):
        constants = {
            "HEADS_Q": 32, "HEADS_K": 8, "HALF": half, "TAIL": tail, "BLOCK_Q": 32, "BLOCK_K": 8, "BLOCK": 64,
            "BLOCK_TAIL": max(tail, 1), "cos_p": 1, "sin_p": 1, "INTERLEAVED": interleaved,
            "POSITIONS": positions, "BACKWARD": positions,
        }  # fmt: skip
        yield rope._rope_kernel, constants, 4, FLOATS[positions]
    for activation, dtype in itertools.product(references.ACTIVATIONS, FLOATS):
        constants = {"BLOCK": gated_mlp._BLOCK, "ACTIVATION": activation}
        yield gated_mlp._gated_kernel, constants, 4, dtype
        yield gated_mlp._gated_backward_kernel, constants | {"AGAIN": dtype == "bf16"}, 4, dtype
    for softcap, (loss, gradient), dtype in itertools.product(
        (False, True), ((True, False), (False, True), (True, True)), FLOATS
    ):
        constants = {
            "BLOCK": cross_entropy._BLOCK, "SOFTCAP": softcap, "LOSS": loss, "GRADIENT": gradient,
            "FACTOR": gradient and not loss,
        }  # fmt: skip
        yield cross_entropy._cross_entropy_kernel, constants, 8, dtype
    for dtype in FLOATS:
        yield dropout._dropout_kernel, {"BLOCK": dropout._BLOCK}, 4, dtype


def cases():
    for kernel, constants, warps, dtype in configurations():
        aligned = [
            name for name in kernel.arg_names
            if name not in constants and (name.endswith(("_ptr", "_b", "_s", "_h")) or name.startswith("stride") or
                                          name in ("N", "F", "V"))
        ]  # fmt: skip
        options = {"num_warps": warps, "enable_fp_fusion": True}
        yield kernel, signature(kernel, constants, dtype), constants, options, aligned
