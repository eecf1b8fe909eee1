"""What the launcher of `huffman_encode` compiles."""

from unweight.kernels import huffman_encode
from unweight.kernels import huffman_encode_kernel as kernels

POINTERS = {
    "counts_ptr": "*i64", "jobs_ptr": "*i64", "owners_ptr": "*i32", "tables_ptr": "*i16", "row_flags_ptr": "*u8",
}  # fmt: skip


def cases():
    for kernel, types, constants, warps in (
        (kernels.count_kernel, {}, {"SPAN": huffman_encode.SPAN, "TILE": huffman_encode.COUNT_TILE}, 4),
        (
            kernels.measure_kernel,
            {"words_ptr": "*i32", "raws_ptr": "*i32"},
            {"ROWS": huffman_encode.MEASURE_ROWS},
            4,
        ),
        (kernels.emit_kernel, {"words_ptr": "*i64", "raws_ptr": "*i64", "row_flags_ptr": "*i32"}, {}, 1),
    ):
        known = POINTERS | types
        signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
        yield kernel, signature, constants, {"num_warps": warps}
