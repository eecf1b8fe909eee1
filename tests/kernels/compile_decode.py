"""`huffman` and `palette` to BF16."""

import itertools

from unweight.kernels import huffman, palette

POINTERS = {
    "out_ptr": "*i16", "codes_ptr": "*i32", "block_words_ptr": "*i32", "lane_base_ptr": "*i16", "lane_delta_ptr": "*u8",
    "sign_mantissa_ptr": "*u8", "raw_rank_ptr": "*i32", "raw_rows_ptr": "*u8", "raw_exponents_ptr": "*u8",
    "table_ptr": "*u8", "palette_ptr": "*i32", "slots_ptr": "*u8", "raw_at_ptr": "*i64", "n": "i64",
}  # fmt: skip


def case(kernel, constants, warps, **types):
    types = POINTERS | types
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    return kernel, signature, constants, {"num_warps": warps}


def cases():
    usual = itertools.product((64, 128, 256, 512), (True, False), (10,))
    for steps, even, bits in [*usual, (256, True, 0), (256, True, 12)]:
        yield case(huffman._huffman_decode_kernel, {"STEPS": steps, "EVEN": even, "BITS": bits, "ASM": True}, 1)
    yield case(palette._palette_decode_kernel, {"BLOCK": 2048}, 8, table_ptr="*i32")
    yield case(palette._raw_rows_kernel, {}, 1)
