"""Gluon device functions: words of a palette tile to the A operand of a tensor core instruction, in registers.

The layout of a unit (`tiles`) is chosen so that nothing moves between threads: what `words_layout` gives a thread is
what the operand's layout wants from it.  `operand` says so with ``assert_trivial``, so a Triton for which it weren't
true would refuse to compile instead of going through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .words import ASSEMBLY, CONSTRAINTS


@gluon.constexpr_function
def words_layout(strips, rows):
    """Of int32 [rows, 32], the words of one or more planes of a tile's units: a thread's are those that it
    multiplies."""
    registers = [[0, 1], [0, 2]] + [[16 * strips << i, 0] for i in range((rows // (16 * strips)).bit_length() - 1)]
    warps = [[4, 0], [8, 0]] + ([[16, 0]] if strips == 2 else [])
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 32])


@gluon.jit
def decode_words(nibbles, low0, low1, table0, table1):
    """`words.decode_words` for Gluon."""
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [nibbles, low0, low1, table0, table1],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def two(word):
    """A word's patterns as BF16, the lower one first."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )


@gluon.jit
def operand(w0, w1, w2, w3, A: gl.constexpr, STRIPS: gl.constexpr = 1):
    """The four words of `decode_words`, each int32 [16 STRIPS, 32], as BF16 [64 STRIPS, 64] in layout ``A``."""
    a0, a1 = two(w0)
    b0, b1 = two(w1)
    c0, c1 = two(w2)
    d0, d1 = two(w3)
    half0 = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    half1 = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    # Strip and w, the upper bits of g, its lowest bit, t, j, p, h, half  ->  w, half, g, j, h, t, p
    unit = gl.join(half0, half1).reshape([4 * STRIPS, 4, 2, 4, 4, 2, 2, 2]).permute([0, 7, 1, 2, 4, 6, 3, 5])
    return gl.convert_layout(unit.reshape([64 * STRIPS, 64]), A, assert_trivial=True)


def _patch_assembly() -> str:
    """Each thread looks whether one of four escapes is its own; one that finds it picks one of its 16 words."""
    lines = ["shr.u32 r, $32, 21;", "setp.eq.u32 p, r, $36;"]
    for escape in ("$33", "$34", "$35"):
        lines += [f"shr.u32 r, {escape}, 21;", "setp.eq.or.u32 p, r, $36, p;"]
    lines += ["@!p bra NONE;"]
    for number, escape in enumerate(("$32", "$33", "$34", "$35")):
        lines += [f"shr.u32 r, {escape}, 21;", "setp.ne.u32 p, r, $36;", f"@p bra NOT{number};"]
        lines += [f"shr.u32 r, {escape}, 12;", "and.b32 r, r, 16;", f"and.b32 v, {escape}, 0xFFFF;", "shl.b32 v, v, r;"]
        lines += [f"bfe.u32 r, {escape}, 17, 4;"]
        for i in range(16):
            lines += [f"setp.eq.u32 p, r, {i};", f"@p or.b32 ${i}, ${i}, v;"]
        lines += [f"NOT{number}:"]
    return "\n".join(["{", ".reg .pred p;", ".reg .b32 r, v;", *lines, "NONE:", "}"])


_PATCH = gl.constexpr(_patch_assembly())
# The words are changed in place.
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + [str(i) for i in range(16)] + ["r"] * 8))


@gluon.jit
def put_escapes(w0, w1, w2, w3, escapes, owner):
    """The four words with four escapes' patterns, whose places in the tiles are zero.

    ``escapes`` int32 [16, 8, 4] has, for each thread, the four entries of a record (`tiles`); ``owner`` int32 [16, 32]
    is the number of the thread that holds a word.
    """
    return gl.inline_asm_elementwise(
        _PATCH, _CONSTRAINTS, [w0, w1, w2, w3, escapes, owner],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def record_entry(at, value):
    """An escape of the lists as an entry of a record."""
    row, column = at & 63, (at >> 6) & 63
    thread = (row >> 4) * 32 + (row & 7) * 4 + ((column >> 1) & 3)
    word = ((row >> 3) & 1) * 8 + ((column >> 3) & 1) * 4 + (column >> 4)
    return (thread << 21) | (word << 17) | ((column & 1) << 16) | (value & 0xFFFF)
