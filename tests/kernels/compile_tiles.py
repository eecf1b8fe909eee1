"""What the launchers of `tile_decode`, `tile_encode` and `transcode` compile."""

from unweight.kernels import lanes, tile_decode, tile_encode, transcode

POINTERS = {
    "planes_ptr": "*i32", "tables_ptr": "*i32", "escape_start_ptr": "*i32", "escape_at_ptr": "*i32",
    "escape_bits_ptr": "*i16", "counts_ptr": "*i32", "escapes_ptr": "*i32", "offsets_ptr": "*i64", "jobs_ptr": "*i64",
    "block_words_ptr": "*i32", "lane_base_ptr": "*i16", "lane_delta_ptr": "*u8", "sign_mantissa_ptr": "*u8",
    "raw_rank_ptr": "*i32", "raw_rows_ptr": "*u8", "raw_exponents_ptr": "*u8", "raw_bytes_ptr": "*u8",
    "table_ptr": "*u8", "palette_ptr": "*i32", "n": "i64", "columns": "i32", "N": "i32", "K": "i32", "units": "i32",
    "jobs": "i32", "count": "i32",
}  # fmt: skip


def configurations():
    for even in (True, False):
        constants = {
            "EVEN": even, "UNITS": tile_decode._UNITS, "BLOCK": 32 * tile_decode._NUM_WARPS, "ASM": True,
            "FEW": not even,
        }  # fmt: skip
        yield tile_decode._tile_decode_kernel, {"out_ptr": "*i16"}, constants, tile_decode._NUM_WARPS

    codes = {"codes_ptr": "*u8", "tables_ptr": "*u8"}
    for counts in ("*i32", "*i64"):
        yield tile_encode._choose_tables_kernel, codes | {"counts_ptr": counts}, {}, 1
    for aligned in (True, False):
        yield tile_encode._count_uppers_kernel, {}, {"ALIGNED": aligned}, 4
        yield tile_encode._write_escapes_kernel, codes, {"ALIGNED": aligned}, 4
        yield tile_encode._encode_units_kernel, codes, {"ALIGNED": aligned, "PLANES": True}, 4
    yield tile_encode._encode_units_kernel, codes, {"ALIGNED": True, "PLANES": False}, 4

    words = {"out_ptr": "*u8", "codes_ptr": "*i32"}
    usual = [(True, 128, 10), (False, 256, 10)]
    for mode, shapes in (
        (lanes.IN_ORDER, [*usual, (True, 64, 0), (False, 512, 12)]),
        (lanes.TILE_QUADS, usual),
        (lanes.TILE_ROWS, usual),
        (lanes.TILE_BYTES, usual),
    ):
        for even, steps, bits in shapes:
            constants = {"STEPS": steps, "EVEN": even, "BITS": bits, "ASM": True, "MODE": mode.value}
            yield transcode._huffman_bytes_kernel, words, constants, 1
    for aligned in (True, False):
        constants = {"UNITS": transcode._UNITS, "ALIGNED": aligned}
        yield transcode._bytes_to_planes_kernel, {"planes_ptr": "*u8"}, constants, transcode._NUM_WARPS


def cases():
    for kernel, types, constants, warps in configurations():
        known = POINTERS | types
        signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
        yield kernel, signature, constants, {"num_warps": warps}
