"""`turned` for every number of rows."""

from unweight.kernels.turned import turn_kernel


def cases(capability=90):
    for block_m in (16, 32, 64):
        for pdl in (False, True) if capability >= 90 else (False,):
            signature = {
                "out_ptr": "*bf16", "x_ptr": "*bf16", "M": "i32", "K": "i32", "stride": "i32",
                "BLOCK_M": "constexpr", "PDL": "constexpr",
            }  # fmt: skip
            yield (
                turn_kernel,
                signature,
                {"BLOCK_M": block_m, "PDL": pdl},
                {"num_warps": 4, "launch_pdl": pdl},
                ("out_ptr",),
            )
