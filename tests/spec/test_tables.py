"""The tables of the text agree with themselves, with each other, and with the code beside them.

1. The fields of every layout table lie back to back from offset 0, and have the size of their type.
2. The parameters of an encoding add up to what conformance.md gives, and so do its sections.
3. The header table is what the vectors' encoder writes.
4. Dtypes, name patterns, encodings and hard limits are those of the reference decoder.
"""

import re
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec"
TYPE_SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}


def text_of(page):
    return (SPEC / "1.0" / page).read_text(encoding="utf-8")


def tables(page):
    """The tables of a page: for each a list of rows, each a dict from column title to cell."""
    found, rows = [], []
    for line in [*text_of(page).splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            titles, _, *body = rows
            found.append([dict(zip(titles, row, strict=False)) for row in body])
            rows = []
    return found


def layout_tables(page):
    return [table for table in tables(page) if "Offset" in table[0] and "Size" in table[0]]


def section_tables(page):
    return [table for table in tables(page) if "Section" in table[0] and "Length" in table[0]]


def names(row):
    return row["Field"].strip("`")


LAYOUTS = [
    pytest.param(table, id=f"{page.split('/')[-1]}-{number}")
    for page in ("payload.md", "encodings/zstd.md", "encodings/palette.md", "encodings/huffman.md")
    for number, table in enumerate(layout_tables(page))
]
ENCODINGS = {row["Name"].strip("`"): row for row in next(t for t in tables("conformance.md") if "Page" in t[0])}


@pytest.mark.parametrize("table", LAYOUTS)
def test_fields_lie_back_to_back(table):
    end = 0
    for row in table:
        assert row["Offset"] == str(end), row
        if not row["Size"].isdecimal():
            break  # from here on offsets depend on the counts
        end += int(row["Size"])


@pytest.mark.parametrize("table", LAYOUTS)
def test_fields_have_the_size_of_their_type(table):
    for row in table:
        match = re.fullmatch(r"(u8|u16|u32|u64)(\[(\d+)\])?", row["Type"])
        if match:
            assert int(row["Size"]) == TYPE_SIZES[match[1]] * int(match[3] or 1), row


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parameters_and_sections_add_up(ref, encoding):
    row = ENCODINGS[encoding]
    page = row["Page"].strip("`")
    layouts, sections = layout_tables(page), section_tables(page)

    size = sum(int(field["Size"]) for field in layouts[0]) if layouts else 0
    assert size == int(row["Parameters (bytes)"])
    assert len(sections) == 1
    assert len(sections[0]) == int(row["Sections"])
    assert ref.ENCODINGS[encoding].parameters_size == size
    assert ref.ENCODINGS[encoding].section_count == len(sections[0])


def test_header_is_what_the_vectors_have(plain_encoder):
    header, entry = layout_tables("payload.md")
    fixed = {names(row): (int(row["Offset"]), int(row["Size"])) for row in header if row["Size"].isdecimal()}
    assert fixed == plain_encoder.FIELDS
    assert {names(row): (int(row["Offset"]), int(row["Size"])) for row in entry} == plain_encoder.SECTION_FIELDS


def test_dtypes_are_those_of_the_decoder(ref):
    text = re.search(r"^### 4\.5 Dtypes\n(.*?)^### ", text_of("payload.md"), re.M | re.S)[1]
    pairs = re.findall(r"`(\w+)` \| (\d+)", text)
    assert len(pairs) == len(dict(pairs))
    assert {name: int(bits) for name, bits in pairs} == ref.DTYPE_BITS


def test_encodings_are_those_of_the_decoder(ref):
    assert ENCODINGS.keys() == ref.ENCODINGS.keys()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param("payload.md", "FEATURE_NAME", id="feature"),
        pytest.param("format.md", "FEATURE_NAME", id="feature-in-the-bundle"),
        pytest.param("format.md", "ENCODING_NAME", id="encoding"),
    ],
)
def test_name_patterns_are_those_of_the_decoder(ref, page, text):
    assert f"`{getattr(ref, text).pattern}`" in text_of(page)


@pytest.mark.parametrize(
    ("page", "phrase", "name"),
    [
        pytest.param("payload.md", "multiple of 128, at most {}", "MAX_HEADER_SIZE", id="header"),
        pytest.param("payload.md", "`rank` is at most {},", "MAX_RANK", id="rank"),
        pytest.param(
            "format.md", "a safetensors header is at most {:,} bytes", "MAX_SAFETENSORS_HEADER", id="json-header"
        ),
    ],
)
def test_limits_are_those_of_the_decoder(ref, page, phrase, name):
    assert phrase.format(getattr(ref, name)) in text_of(page)
