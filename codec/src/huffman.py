"""Length-limited canonical Huffman codes for exponents, and the tables that the kernels use.

Package-merge: L. Larmore and D. Hirschberg, "A fast algorithm for optimal length-limited Huffman codes",
Journal of the ACM 37 (1990), 464-473.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_CODE_LENGTH = 12
PALETTE_SIZE = 16


def code_lengths(counts: Sequence[int], limit: int = MAX_CODE_LENGTH) -> list[int]:
    """Optimal code lengths of at most ``limit`` bits; one symbol alone gets length 0.

    Zero counts are taken as one, so that every symbol has a code.

    Raises:
        ValueError: no symbols, or more than 2^limit.
    """
    n = len(counts)
    if not 1 <= n <= 1 << limit:
        raise ValueError(f"{n} symbols don't have codes of at most {limit} bits")
    if n == 1:
        return [0]
    # A package is its weight and the symbols in it; ties keep the order of the symbols, so the result is unique.
    leaves = sorted((max(1, int(c)), i) for i, c in enumerate(counts))
    packages: list[tuple[int, list[int]]] = [(c, [i]) for c, i in leaves]
    row = packages
    for _ in range(limit - 1):
        merged = [(row[i][0] + row[i + 1][0], row[i][1] + row[i + 1][1]) for i in range(0, len(row) - 1, 2)]
        row = sorted(packages + merged, key=lambda p: p[0])
    lengths = [0] * n
    for _, symbols in row[: 2 * n - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def canonical_codes(lengths: Sequence[int]) -> list[int]:
    """The codes for ``lengths``: in order of (length, symbol), each the one before plus one, shifted to its length."""
    codes = [0] * len(lengths)
    code = previous = 0
    for symbol in sorted(range(len(lengths)), key=lambda s: (lengths[s], s)):
        code <<= lengths[symbol] - previous
        previous = lengths[symbol]
        codes[symbol] = code
        code += 1
    return codes


def is_complete(lengths: Sequence[int]) -> bool:
    """Whether lengths of 1..12 bits fill the code space exactly (Kraft's sum is one)."""
    return sum(1 << (MAX_CODE_LENGTH - length) for length in lengths) == 1 << MAX_CODE_LENGTH


def choose_palette(counts: npt.NDArray[np.int64]) -> list[int]:
    """The exponents with the highest counts, at most 16, in increasing order; a tie goes to the smaller exponent."""
    order = np.argsort(-counts, kind="stable")
    return sorted(int(e) for e in order[:PALETTE_SIZE] if counts[e] > 0)


def encode_table(palette: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.uint16]:
    """``code << 4 | length`` for each of the 256 exponents, 0xFFFF outside the palette."""
    table = np.full(256, 0xFFFF, np.uint16)
    for exponent, code, length in zip(palette, canonical_codes(lengths), lengths, strict=True):
        table[exponent] = code << 4 | length
    return table


def decode_tables(
    palette: Sequence[int], lengths: Sequence[int]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Tables indexed by the next 12 bits: for pairs of codes, and for single codes.

    Entries: bits 0..7 length, 8..15 first exponent, 16..23 second exponent.  A pair of more than 12 bits has an entry
    with only bit 31 set.
    """
    singles = np.zeros(1 << MAX_CODE_LENGTH, np.uint32)
    for exponent, code, length in zip(palette, canonical_codes(lengths), lengths, strict=True):
        first = code << (MAX_CODE_LENGTH - length)
        singles[first : first + (1 << (MAX_CODE_LENGTH - length))] = exponent << 8 | length
    window = np.arange(1 << MAX_CODE_LENGTH, dtype=np.uint32)
    first_length = singles & 0xFF
    second = singles[(window << first_length) & ((1 << MAX_CODE_LENGTH) - 1)]
    total = first_length + (second & 0xFF)
    pairs = np.where(
        total <= MAX_CODE_LENGTH, total | (singles & 0xFF00) | ((second & 0xFF00) << 8), np.uint32(1 << 31)
    ).astype(np.uint32)
    return pairs, singles
