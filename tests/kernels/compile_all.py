"""Compile kernels to machine code for one architecture, without a GPU: python compile_all.py 90 [--all] [compile_stream
...]

A module ``compile_*`` yields kernel, signature, constants and options from ``cases()``, and the names of arguments that
are known for multiples of 16, if the kernel needs that; if it has ``CAPABILITIES``, it
is for those only.  Of a kernel's cases the first and the last are compiled, or all of them with ``--all``, which takes
half an hour, or if the module has ``ALL``.  Prints how many there were for each kernel.
"""

import importlib
import inspect
import sys
import time
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))


def source(kernel, signature, constants, aligned=()):
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def selected(names, capability, everything):
    cases = {}
    for name in names:
        module = importlib.import_module(name)
        if capability not in getattr(module, "CAPABILITIES", (capability,)):
            continue
        takes_capability = "capability" in inspect.signature(module.cases).parameters
        group = " (shipped)" if getattr(module, "ALL", False) else ""
        for case in module.cases(capability) if takes_capability else module.cases():
            cases.setdefault(f"{case[0].__module__}.{case[0].__name__}{group}", {})[str(case[1:])] = case
    for name, found in cases.items():
        found = [*found.values()]
        yield name, found if everything or name.endswith(")") else [found[0], *found[-1:][: len(found) - 1]]


def main():
    here = Path(__file__).parent
    arguments = [a for a in sys.argv[2:] if a != "--all"]
    names = arguments or sorted(p.stem for p in here.glob("compile_*.py") if p.stem != "compile_all")
    capability = int(sys.argv[1])
    for name, cases in selected(names, capability, "--all" in sys.argv):
        begin = time.monotonic()
        for kernel, signature, constants, options, *aligned in cases:
            compiled = triton.compile(
                source(kernel, signature, constants, *aligned),
                target=GPUTarget("cuda", capability, 32),
                options=options,
            )
            assert compiled.asm["cubin"], name
        print(f"{name}: {len(cases)} in {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
