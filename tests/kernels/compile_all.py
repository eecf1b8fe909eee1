"""Compile every kernel to machine code for one architecture, without a GPU: python compile_all.py 90"""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unweight.kernels import huffman, palette

POINTERS = {
    "out_ptr": "*i16", "codes_ptr": "*i32", "block_words_ptr": "*i32", "lane_base_ptr": "*i16", "lane_delta_ptr": "*u8",
    "sign_mantissa_ptr": "*u8", "raw_rank_ptr": "*i32", "raw_rows_ptr": "*u8", "raw_exponents_ptr": "*u8",
    "table_ptr": "*u8", "palette_ptr": "*i32", "slots_ptr": "*u8", "raw_at_ptr": "*i64", "n": "i64",
}  # fmt: skip


def cases():
    usual = itertools.product((64, 128, 256, 512), (True, False), (10,))
    for steps, even, bits in [*usual, (256, True, 0), (256, True, 12)]:
        yield huffman._huffman_decode_kernel, {"STEPS": steps, "EVEN": even, "BITS": bits, "ASM": True}, {}, 1
    yield palette._palette_decode_kernel, {"BLOCK": 2048}, {"table_ptr": "*i32"}, 8
    yield palette._raw_rows_kernel, {}, {}, 1


def main():
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    count = 0
    for kernel, constants, overrides, warps in cases():
        types = POINTERS | overrides
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs=constants), target=target, options={"num_warps": warps}
        )
        assert compiled.asm["cubin"]
        count += 1
    print(count)


if __name__ == "__main__":
    main()
