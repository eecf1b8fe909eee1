"""Which kernel is chosen.

1. Legality follows from the residency, the operation and the device, and every refusal has a reason.
2. Batches belong to powers of two; near ones may serve each other, far ones don't.
3. Sources in order: override, user's cache, shipped table, default with one warning for each matrix.
4. What a kernel refuses for the actual problem is never chosen, and neither is what is stale, foreign or malformed.
5. The shipped tables are of use: their rows fit the kernels that they are shipped with.
6. Nothing is imported that isn't needed.
"""

import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from unweight.kernels import select, tables
from unweight.kernels.cache import Entry, Measurement
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.select import Choice, Kernel, UntunedWarning, cache_key, select_config
from unweight.kernels.tables import Row, Table

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8")
A100 = DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, True, "3.6.0", "12.8")
T4 = DeviceInfo("Tesla T4", (7, 5), 40, 65536, False, "3.2.0", "12.4")
CPU = DeviceInfo("cpu", (0, 0), 0, 0, False, "3.6.0", "")
NO_TABLE = Table("", (0, 0), "", "", ())
PROBLEM = Problem("linear", "palette", 16, 4096, 4096)


@dataclass(frozen=True)
class Config:
    rows: int = 64
    stages: int = 2


def fake(largest: int, first: Config = Config(), ops: tuple[str, ...] = ("linear", "swiglu", "transposed")) -> Kernel:
    """A kernel for up to ``largest`` rows of activations."""

    def config_error(config, problem, device):
        if problem.op not in ops:
            return f"no {problem.op}"
        if problem.m > largest:
            return f"{problem.m} rows are more than {largest}"
        return "too many stages" if config.stages > 8 else None

    def search_space(problem, device):
        return [c for c in (first, Config(128, 3)) if config_error(c, problem, device) is None]

    return Kernel(Config, config_error, search_space)


KERNELS = {
    "stream": fake(1 << 20, Config(64, 7)),
    "wgmma": fake(64, Config(16, 3)),
    "mma": fake(1 << 20, Config(64, 5), ("linear",)),
    "gemv": fake(4, Config(8, 1), ("linear",)),
    "dot": fake(1 << 20, Config(64, 3)),
    "planes": fake(1 << 20, Config(64, 4), ("linear", "transposed")),
}
registry = KERNELS.__getitem__


def choose(problem=PROBLEM, device=H200, *, cache=None, shipped=NO_TABLE, override=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return select_config(problem, device, override=override, cache=cache, shipped=shipped, registry=registry)


def measured(kernel, config, us, outcome="ok", pipeline="direct_palette"):
    return Measurement(pipeline, kernel, None if config is None else asdict(config), us, outcome)


def cache_of(*items, device=H200):
    """A cache with one candidate for each (problem, kernel, config)."""
    return {
        cache_key(problem, device, registry): Entry((measured(kernel, config, 10.0),), 0)
        for problem, kernel, config in items
    }


def row(m, kernel="mma", config=Config(64, 5), n=4096, k=4096, pipeline="direct_palette"):
    return Row("linear", "palette", n, k, m, pipeline, kernel, config and asdict(config), 12.0, 30.0)


def table_of(*rows, device=H200):
    return Table(device.name, device.capability, "3.6.0", "12.8", rows)


# 1. Legality


@pytest.mark.parametrize(
    ("device", "op", "residency", "expected"),
    [
        (H200, "linear", "palette", "direct_palette stream wgmma mma gemv dot, full_decode cublas"),
        (H200, "swiglu", "palette", "direct_palette stream wgmma mma gemv dot, full_decode cublas"),
        (H200, "transposed", "palette", "direct_palette dot, full_decode cublas"),
        (
            H200, "linear", "huffman",
            "palette_transcode stream wgmma mma gemv dot, exponent_decode planes, full_decode cublas",
        ),
        (H200, "transposed", "huffman", "palette_transcode dot, exponent_decode planes, full_decode cublas"),
        (A100, "linear", "palette", "direct_palette mma gemv dot, full_decode cublas"),
        (replace(H200, gluon=False), "linear", "palette", "direct_palette gemv dot, full_decode cublas"),
        (replace(H200, capability=(10, 0)), "linear", "palette", "direct_palette mma gemv dot, full_decode cublas"),
        (T4, "linear", "palette", "full_decode cublas"),
        (CPU, "linear", "palette", "full_decode cublas"),
        (CPU, "linear", "huffman", "full_decode cublas"),
    ],
)  # fmt: skip
def test_legal(device, op, residency, expected):
    pairs = {
        (pipeline, kernel)
        for pipeline, *kernels in (part.split() for part in expected.split(", ")) for kernel in kernels
    }  # fmt: skip
    assert set(select.legal(Problem(op, residency, 1, 4096, 4096), device)) == pairs


@pytest.mark.parametrize(
    ("name", "problem", "device", "reason"),
    [
        ("stream", PROBLEM, A100, "Hopper"),
        ("stream", PROBLEM, replace(H200, gluon=False), "Gluon, which Triton 3.6.0"),
        ("stream", replace(PROBLEM, k=4092), H200, "multiple of 8, not 4092"),
        ("mma", replace(PROBLEM, op="transposed"), H200, "no transposed product"),
        ("dot", PROBLEM, T4, "8.0 or later, not 7.5"),
        ("dot", PROBLEM, CPU, "needs a GPU"),
    ],
)
def test_refusals_have_reasons(name, problem, device, reason):
    assert reason in select.kernel_error(name, problem, device)


def test_candidates_begin_with_the_safe_one_of_each_kernel():
    found = select.candidates(replace(PROBLEM, m=4), H200, registry)

    assert [c.kernel for c in found[:6]] == ["stream", "wgmma", "mma", "gemv", "dot", "cublas"]
    assert [c.config for c in found[:6]] == [
        Config(64, 7), Config(16, 3), Config(64, 5), Config(8, 1), Config(64, 3), None,
    ]  # fmt: skip
    assert len(found) == len({(c.pipeline, c.kernel, c.config) for c in found}) == 11
    assert all(select.choice_error(c, replace(PROBLEM, m=4), H200, registry) is None for c in found)


def test_swiglu_that_is_not_fused_is_a_linear_product():
    """gemv and mma are asked about the product of gate and up; the activation comes after it."""
    kernels = {c.kernel for c in select.candidates(replace(PROBLEM, op="swiglu", m=1), H200, registry)}
    assert kernels == {"stream", "wgmma", "mma", "gemv", "dot", "cublas"}


# 2. Batches


@pytest.mark.parametrize(("m", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128), (4000, 4096)])
def test_bucket(m, expected):
    assert select.bucket(m) == expected


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        pytest.param(1, [1, 2, 4], id="one"),
        pytest.param(16, [16, 32, 8, 64, 4], id="larger-first-if-equal"),
        pytest.param(17, [32, 16, 8, 64], id="own-first"),
        pytest.param(31, [32, 16, 64, 8], id="nearly-the-bucket"),
    ],
)
def test_near_buckets(m, expected):
    assert select.near_buckets(m) == expected


# 3. The order of sources


@pytest.mark.parametrize(
    ("device", "m", "op", "residency", "expected"),
    [
        (H200, 64, "linear", "palette", ("direct_palette", "mma", Config(64, 5))),
        (H200, 65, "linear", "palette", ("direct_palette", "stream", Config(64, 7))),
        (H200, 512, "linear", "palette", ("direct_palette", "stream", Config(64, 7))),
        (H200, 513, "linear", "palette", ("full_decode", "cublas", None)),
        (H200, 1, "swiglu", "palette", ("direct_palette", "mma", Config(64, 5))),
        (H200, 1, "transposed", "palette", ("direct_palette", "dot", Config(64, 3))),
        (H200, 65, "transposed", "palette", ("full_decode", "cublas", None)),
        (H200, 1, "linear", "huffman", ("full_decode", "cublas", None)),
        (A100, 64, "linear", "palette", ("direct_palette", "mma", Config(64, 5))),
        (A100, 65, "linear", "palette", ("full_decode", "cublas", None)),
        (replace(A100, gluon=False), 64, "linear", "palette", ("direct_palette", "dot", Config(64, 3))),
        (replace(A100, gluon=False), 65, "linear", "palette", ("full_decode", "cublas", None)),
        (CPU, 1, "linear", "palette", ("full_decode", "cublas", None)),
    ],
)
def test_default(device, m, op, residency, expected):
    choice = choose(Problem(op, residency, m, 4096, 4096), device)

    assert (choice.pipeline, choice.kernel, choice.config) == expected
    assert (choice.source, choice.microseconds) == ("default", None)


def test_order_of_sources():
    cache = cache_of((PROBLEM, "dot", Config(128, 3)))
    shipped = table_of(row(16))
    override = Choice("direct_palette", "stream", Config(32, 4), "default")

    assert choose(cache=cache, shipped=shipped, override=override) == replace(override, source="override")
    assert choose(cache=cache, shipped=shipped) == Choice("direct_palette", "dot", Config(128, 3), "cache", 10.0)
    assert choose(shipped=shipped) == Choice("direct_palette", "mma", Config(64, 5), "shipped", 12.0)
    assert choose().source == "default"


def test_the_fastest_that_passed_is_chosen_unless_another_was():
    candidates = (
        measured("stream", Config(64, 7), 9.0, "ok"),
        measured("mma", Config(64, 5), None, "wrong"),
        measured("dot", Config(64, 3), 8.0, "ok"),
        measured("cublas", None, 8.5, "ok", "full_decode"),
    )
    key = cache_key(PROBLEM, H200, registry)

    assert choose(cache={key: Entry(candidates)}).kernel == "dot"
    assert choose(cache={key: Entry(candidates, chosen=3)}).kernel == "cublas"


def test_nearest_bucket_in_the_cache_and_in_the_table():
    problems = {m: replace(PROBLEM, m=m) for m in (1, 8, 64)}
    configs = {1: Config(1, 1), 8: Config(8, 1), 64: Config(64, 1)}
    cache = cache_of(*((problems[m], "dot", configs[m]) for m in problems))
    shipped = table_of(*(row(m, "dot", configs[m]) for m in problems))

    for m, near in [(1, 1), (2, 1), (3, 8), (8, 8), (20, 8), (24, 64), (64, 64), (256, 64)]:
        assert choose(replace(PROBLEM, m=m), cache=cache).config == configs[near], m
        assert choose(replace(PROBLEM, m=m), shipped=shipped).config == configs[near], m
    assert choose(replace(PROBLEM, m=257), cache=cache).source == "default"
    assert choose(replace(PROBLEM, m=257), shipped=shipped).source == "default"


def test_shapes_are_not_near_each_other():
    assert choose(replace(PROBLEM, n=4160), cache=cache_of((PROBLEM, "dot", Config()))).source == "default"
    assert choose(replace(PROBLEM, n=4160), shipped=table_of(row(16))).source == "default"


def test_one_warning_for_each_matrix():
    def warned(problem, device=H200, **sources):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            select_config(problem, device, registry=registry, **({"shipped": NO_TABLE} | sources))
        return [str(w.message) for w in caught if w.category is UntunedWarning]

    new = replace(PROBLEM, n=777)
    (text,) = warned(new)
    assert "unweight tune 777x4096 --op linear --residency palette" in text
    assert H200.name in text
    assert warned(replace(new, m=1)) == []
    assert len(warned(replace(new, op="swiglu", n=778))) == 1
    assert warned(replace(new, n=779), CPU) == []
    # A batch far from those that were measured is no surprise.
    known = replace(PROBLEM, n=780)
    assert warned(replace(known, m=4096), cache=cache_of((known, "dot", Config()))) == []
    assert warned(replace(PROBLEM, n=781, m=4096), shipped=table_of(row(16, n=781))) == []
    # The table of another GPU says nothing.
    assert len(warned(replace(PROBLEM, n=782), shipped=table_of(row(16, n=782), device=A100))) == 1


# 4. What is never chosen


def test_a_refused_configuration_is_not_chosen():
    """gemv was the best for 4 rows, and can't serve 5 to 8; the second best there can."""
    four, eight = replace(PROBLEM, m=4), replace(PROBLEM, m=8)
    candidates = (measured("gemv", Config(8, 1), 5.0), measured("dot", Config(64, 3), 7.0))
    cache = {cache_key(four, H200, registry): Entry(candidates, 0)}

    assert choose(four, cache=cache).kernel == "gemv"
    assert choose(eight, cache=cache).kernel == "dot"
    assert choose(eight, shipped=table_of(row(4, "gemv", Config(8, 1)))).source == "default"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (Choice("direct_palette", "stream", Config(64, 9), "default"), "too many stages"),
        (Choice("direct_palette", "gemv", Config(), "default"), "16 rows are more than 4"),
        (Choice("direct_palette", "cublas", None, "default"), "doesn't end in cublas"),
        (Choice("exponent_decode", "planes", Config(), "default"), "no pipeline for palette weights"),
        (Choice("full_decode", "cublas", Config(), "default"), "no configuration"),
        (Choice("direct_palette", "dot", None, "default"), "needs a Config"),
    ],
)
def test_an_override_that_cannot_work_is_refused(override, said):
    with pytest.raises(ValueError, match=said):
        choose(override=override)


@pytest.mark.parametrize(
    "other",
    [
        replace(H200, triton="3.7.0"),
        replace(H200, cuda="13.0"),
        replace(H200, name="NVIDIA H100 80GB HBM3"),
        replace(H200, name="other", capability=(9, 1)),
    ],
    ids=["triton", "cuda", "name", "capability"],
)
def test_foreign_entries_are_not_used(other):
    assert choose(device=other, cache=cache_of((PROBLEM, "dot", Config()))).source == "default"


@pytest.mark.parametrize("field", ["sources", "space", "dtype", "schema", "bucket", "op", "residency"])
def test_stale_entries_are_not_used(field):
    key = cache_key(PROBLEM, H200, registry)
    entry = Entry((measured("dot", Config(), 1.0),), 0)
    others = {"schema": 0, "bucket": 1 << 12, "op": "swiglu", "residency": "huffman"}

    assert choose(cache={key: entry}).source == "cache"
    assert choose(cache={replace(key, **{field: others.get(field, "other")}): entry}).source == "default"


def test_another_search_space_makes_an_entry_stale():
    cache = cache_of((PROBLEM, "dot", Config()))
    more = KERNELS | {"mma": fake(1 << 20, Config(32, 5), ("linear",))}
    choice = select.find_choice(PROBLEM, H200, cache=cache, shipped=NO_TABLE, registry=more.__getitem__)
    assert choice.source == "default"


@pytest.mark.parametrize(
    "values",
    [
        {"pipeline": "exponent_decode", "kernel": "planes"},
        {"kernel": "other"},
        {"pipeline": "other"},
        {"config": None},
        {"config": {"rows": 64}, "kernel": "cublas", "pipeline": "full_decode"},
        {"config": {"columns": 64}},
        {"config": {"rows": 64, "stages": 99}},
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_not_used(values):
    good = row(16)
    assert choose(shipped=table_of(good)).source == "shipped"
    assert choose(shipped=table_of(replace(good, **values))).source == "default"


def test_the_table_of_another_capability_is_not_used():
    assert choose(shipped=replace(table_of(row(16)), capability=(9, 1))).source == "default"


# 5. Shipped tables


def test_shipped_tables_fit_their_kernels():
    """Each row's configuration exists, and its kernel takes it on a GPU of that kind."""
    for table in tables.shipped_tables():
        device = replace(H200, name=table.device, capability=table.capability)
        for r in table.rows:
            problem = Problem(r.op, r.residency, r.m, r.n, r.k)
            assert select.make_choice(r.pipeline, r.kernel, r.config, "shipped", r.microseconds, problem, device), r
            assert r.m == select.bucket(r.m)


def test_shipped_tables_are_found_by_the_name_of_the_gpu():
    assert tables.file_name("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb.json"
    assert tables.shipped_table("NVIDIA H200").device == "NVIDIA H200"
    assert tables.shipped_table("NVIDIA  H200") is None
    assert tables.shipped_table("nothing") is None


def test_tables_survive_their_file():
    table = table_of(row(1), row(16, "cublas", None, pipeline="full_decode"))
    text = tables.dump_table(table)

    assert tables.parse_table(text.encode()) == table
    assert text.count("\n") == 4, "one line for each row"


def test_export_has_the_best_of_the_last_measurements():
    key = cache_key(PROBLEM, H200, registry)
    candidates = (
        measured("stream", Config(), 9.004),
        measured("dot", Config(), 8.0),
        measured("mma", None, None, "wrong"),
    )
    cache = {
        replace(key, triton="3.5.0"): Entry(candidates, 1, 30.0, "2026-01-01T00:00:00Z"),
        key: Entry(candidates, 0, 30.0, "2026-01-02T00:00:00Z"),
        replace(key, bucket=1): Entry((measured("dot", Config(), None, "failed"),)),
        replace(key, sources="other", n=1): Entry(candidates, 0),
        replace(key, device="other", n=2): Entry(candidates, 0),
    }

    table = tables.export_table(cache, H200.name)

    assert table == table_of(
        Row("linear", "palette", 4096, 4096, 16, "direct_palette", "stream", asdict(Config()), 9.0, 30.0)
    )
    assert tables.export_table(cache, "unknown") is None


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"format": "unweight tuned table 1"}', '{"format": "x", "rows": []}', "x"]
)
def test_damaged_tables_are_refused(text):
    with pytest.raises(ValueError):
        tables.parse_table(text.encode())


# 6. Imports


def test_choosing_needs_no_torch():
    code = """if True:
        import sys
        import unweight.kernels as kernels
        from unweight.kernels import autotune, cache, select, tables
        device = kernels.DeviceInfo("cpu", (0, 0), 0, 0, False, "", "")
        assert kernels.select_config(kernels.Problem("linear", "palette", 1, 64, 64), device).kernel == "cublas"
        assert not {"torch", "triton", "numpy"} & sys.modules.keys()
        assert set(dir(kernels)) >= {"tune", "explain", "select_config", "PaletteTiles"}
        for name in kernels.__all__:
            assert callable(getattr(kernels, name)), name
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_is_a_module_as_well():
    """The import of the module would put itself in the place of the function."""
    import unweight.kernels

    folder = Path(unweight.kernels.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} & set(unweight.kernels.__all__) == set()
