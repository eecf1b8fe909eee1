"""What the table shipped for an H200 chooses; all of it is compiled, whatever the options."""

import compile_mma
import compile_stream
import compile_wgmma

from unweight.kernels.problems import Problem
from unweight.kernels.select import make_choice
from unweight.kernels.tables import shipped_table

CAPABILITIES = (90,)
ALL = True
KERNELS = {"mma": compile_mma, "wgmma": compile_wgmma, "stream": compile_stream}


def cases():
    table = shipped_table(compile_mma.DEVICES[90].name)
    for row in table.rows:
        problem = Problem(row.op, row.residency, row.m, row.n, row.k)
        choice = make_choice(
            row.pipeline, row.kernel, row.config, "shipped", row.microseconds, problem, compile_mma.DEVICES[90]
        )
        assert choice is not None, row
        if row.kernel in KERNELS:
            yield KERNELS[row.kernel].case(choice.config)
        else:
            assert row.kernel == "cublas", f"{row.kernel} was never shipped before: compile it here"
