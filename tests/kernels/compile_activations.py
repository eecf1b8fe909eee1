"""What the launcher of `activations` compiles."""

from unweight.kernels import activations


def cases():
    kernel = activations._silu_mul_kernel
    constants = {"BLOCK": activations._BLOCK, "ASM": True}
    types = {"out_ptr": "*bf16", "gate_up_ptr": "*bf16", "F": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    yield kernel, signature, constants, {"num_warps": 4, "enable_fp_fusion": True}
