"""Code lengths, canonical codes and tables.

1. Code lengths are optimal under the limit: no other complete code is shorter, and a loose limit gives Huffman's code.
2. They keep the limit and fill the code space; one symbol takes no bits; a zero count still has a code.
3. Canonical codes are prefix-free, in the order of the specification, and in both tables the kernels find them.
4. The palette has the 16 most frequent exponents; a tie goes to the smaller one.
"""

import heapq
import itertools
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unweight.codec import huffman

FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
counts_of_any_size = st.lists(st.integers(0, 1 << 40), min_size=2, max_size=16)


def cost(counts, lengths):
    return sum(max(1, c) * n for c, n in zip(counts, lengths, strict=True))


def kraft(lengths, limit=huffman.MAX_CODE_LENGTH):
    return sum(1 << (limit - n) for n in lengths) / (1 << limit)


@lru_cache
def complete_codes(symbols, limit):
    """All multisets of lengths in 1..limit that fill the code space, each with the shortest length first."""

    def extend(depth, nodes, left):
        for leaves in range(min(nodes, left) + 1):
            inner, rest = nodes - leaves, left - leaves
            if inner == rest == 0:
                yield (depth,) * leaves
            elif inner and depth < limit and 2 * inner <= rest:
                yield from ((depth,) * leaves + deeper for deeper in extend(depth + 1, 2 * inner, rest))

    return list(extend(1, 2, symbols))


def shortest_cost(counts, limit):
    """The most frequent symbols get the shortest codes; so only the multiset of lengths has to be tried."""
    falling = sorted(counts, reverse=True)
    return min(cost(falling, lengths) for lengths in complete_codes(len(counts), limit))


def huffman_cost(counts):
    """The cost of Huffman's own code: the sum of all merged weights."""
    heap = [max(1, c) for c in counts]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=7), st.integers(3, 6))
def test_lengths_are_as_short_as_any_complete_code(counts, limit):
    assert cost(counts, huffman.code_lengths(counts, limit)) == shortest_cost(counts, limit)


@given(counts_of_any_size)
def test_loose_limit_gives_the_cost_of_huffman(counts):
    assert cost(counts, huffman.code_lengths(counts, limit=15)) == huffman_cost(counts)


@given(counts_of_any_size)
def test_lengths_fill_the_code_space_within_the_limit(counts):
    lengths = huffman.code_lengths(counts)

    assert all(1 <= n <= huffman.MAX_CODE_LENGTH for n in lengths)
    assert kraft(lengths) == 1
    assert huffman.is_complete(lengths)


@given(counts_of_any_size)
def test_frequent_symbols_never_have_longer_codes(counts):
    pairs = sorted(zip(counts, huffman.code_lengths(counts), strict=True))

    assert all(a[1] >= b[1] for a, b in itertools.pairwise(pairs) if max(1, a[0]) < b[0])


@pytest.mark.parametrize("limit", range(4, 13))
@pytest.mark.parametrize("reverse", [False, True], ids=["rising", "falling"])
def test_fibonacci_counts_reach_the_limit_and_keep_it(limit, reverse):
    """Without a limit these 16 counts need 15 bits: the worst case for a palette."""
    counts = FIBONACCI[::-1] if reverse else FIBONACCI
    assert max(huffman.code_lengths(counts, 15)) == 15

    lengths = huffman.code_lengths(counts, limit)

    assert max(lengths) == limit
    assert kraft(lengths, limit) == 1
    assert cost(counts, lengths) == shortest_cost(counts, limit)


@pytest.mark.parametrize("count", [0, 1, 1 << 40])
def test_one_symbol_takes_no_bits(count):
    assert huffman.code_lengths([count]) == [0]
    assert huffman.canonical_codes([0]) == [0]


@pytest.mark.parametrize("counts", [[0, 0], [0, 5], [0, 0, 1, 1], [0] * 16, [1 << 40] + [0] * 15], ids=str)
def test_zero_counts_have_the_codes_of_ones(counts):
    lengths = huffman.code_lengths(counts)

    assert min(lengths) >= 1
    assert kraft(lengths) == 1
    assert lengths == huffman.code_lengths([max(1, c) for c in counts])


def test_equal_counts_have_equal_lengths():
    assert huffman.code_lengths([7] * 16) == [4] * 16


@pytest.mark.parametrize(("count", "limit"), [pytest.param(0, 12, id="none"), pytest.param(17, 4, id="17-of-4-bits")])
def test_refuses_what_has_no_code(count, limit):
    with pytest.raises(ValueError, match="symbols"):
        huffman.code_lengths([1] * count, limit)


@given(counts_of_any_size)
def test_canonical_codes_are_prefix_free(counts):
    lengths = huffman.code_lengths(counts)
    texts = [f"{code:0{n}b}" for code, n in zip(huffman.canonical_codes(lengths), lengths, strict=True)]

    assert [len(t) for t in texts] == lengths
    assert not any(b.startswith(a) for a, b in itertools.permutations(texts, 2))
    # Canonical: in the order of (length, slot), codes rise.
    order = sorted(range(len(texts)), key=lambda s: (lengths[s], s))
    assert sorted(texts) == [texts[s] for s in order]


def test_canonical_codes_of_the_specification():
    assert huffman.canonical_codes([2, 1, 3, 3]) == [0b10, 0b0, 0b110, 0b111]


def test_completeness_of_lengths():
    assert huffman.is_complete([1, 2, 3, 3])
    assert not huffman.is_complete([1, 2, 3])
    assert not huffman.is_complete([1, 2, 2, 3])


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([1], id="one"),
        pytest.param([1, 1], id="two"),
        pytest.param([1] * 16, id="all-four-bits"),
        pytest.param(FIBONACCI, id="up-to-twelve-bits"),
        pytest.param([9, 0, 3, 700, 22, 1], id="mixed"),
    ],
)
def test_tables_agree_with_the_codes_in_every_window(counts):
    """Codes are looked up as text, bit by bit, in all 4,096 windows of twelve bits."""
    palette = [7 * i + 3 for i in range(len(counts))]
    lengths = huffman.code_lengths(counts)
    codes = zip(huffman.canonical_codes(lengths), lengths, strict=True)
    slots = {f"{code:0{n}b}" if n else "": slot for slot, (code, n) in enumerate(codes)}

    def first(text):
        """Exponent and length of the code at the start of ``text``; None when it doesn't end in it."""
        return next(((palette[slots[text[:n]]], n) for n in range(len(text) + 1) if text[:n] in slots), None)

    pairs, singles = huffman.decode_tables(palette, lengths)

    assert pairs.size == singles.size == 1 << 12
    for window in range(1 << 12):
        text = f"{window:012b}"
        exponent, length = first(text)
        assert singles[window] == exponent << 8 | length
        second = first(text[length:])
        expected = 1 << 31 if second is None else second[0] << 16 | exponent << 8 | length + second[1]
        assert pairs[window] == expected, f"{window:#x}"


def test_encode_table_has_the_code_of_each_exponent():
    table = huffman.encode_table([5, 100, 101, 255], [2, 1, 3, 3])

    assert {int(e): int(table[e]) for e in np.flatnonzero(table != 0xFFFF)} == {
        5: 0b10 << 4 | 2, 100: 0b0 << 4 | 1, 101: 0b110 << 4 | 3, 255: 0b111 << 4 | 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "palette"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({200: 1}, [200], id="one"),
        pytest.param({255: 9, 0: 9, 3: 1}, [0, 3, 255], id="in-increasing-order"),
        pytest.param(dict.fromkeys(range(100, 120), 4), list(range(100, 116)), id="ties-go-to-the-smaller"),
        pytest.param(dict.fromkeys(range(256), 1) | {255: 2}, [*range(15), 255], id="the-most-frequent-first"),
        pytest.param({e: e + 1 for e in range(40)}, list(range(24, 40)), id="sixteen-at-most"),
    ],
)
def test_palette_has_the_most_frequent_exponents(counts, palette):
    table = np.zeros(256, np.int64)
    for exponent, count in counts.items():
        table[exponent] = count

    assert huffman.choose_palette(table) == palette
