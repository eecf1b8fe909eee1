"""What the launcher of `tile_rows` compiles."""

from compile_tiles import POINTERS

from unweight.kernels import tile_rows


def cases():
    kernel = tile_rows._tile_rows_kernel
    constants = {"UNITS": tile_rows._UNITS, "BLOCK": tile_rows._BLOCK, "ASM": True}
    for index in ("*i64", "*i32"):
        known = POINTERS | {"out_ptr": "*i16", "index_ptr": index}
        signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
        yield kernel, signature, constants, {"num_warps": tile_rows._NUM_WARPS}
