"""What `explain` says.

1. Without a GPU: that there is none, what runs instead, and what is shipped for others.
2. On a GPU: which kernels there are and aren't, every measured matrix by batch, and where each choice comes from.
3. For one product: every candidate, with its time or with what was wrong with it.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from unweight.kernels import explain
from unweight.kernels.cache import Entry, Measurement, TuningCache
from unweight.kernels.problems import DeviceInfo, Problem
from unweight.kernels.select import Kernel, bucket, cache_key
from unweight.kernels.tables import Row, Table

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, True, "3.6.0", "12.8")
A100 = DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, False, "3.2.0", "12.4")
CPU = DeviceInfo("cpu", (0, 0), 0, 0, False, "3.6.0", "")
NO_TABLE = Table("", (0, 0), "", "", ())
PROBLEM = Problem("linear", "palette", 16, 4096, 14336)


@dataclass(frozen=True)
class Config:
    size: int


def kernel(size):
    return Kernel(Config, lambda config, problem, device: None, lambda problem, device: [Config(size)])


KERNELS = {
    "stream": kernel(5),
    "wgmma": kernel(6),
    "mma": kernel(4),
    "gemv": kernel(3),
    "dot": kernel(2),
    "planes": kernel(1),
}
ENTRY = Entry(
    (
        Measurement("direct_palette", "stream", {"size": 5}, 20.0, "ok"),
        Measurement("direct_palette", "mma", {"size": 4}, 24.04, "ok"),
        Measurement("full_decode", "cublas", None, 81.25, "ok"),
        Measurement("direct_palette", "gemv", {"size": 3}, None, "wrong", "3 of 64 outputs are not written, or NaN"),
        Measurement("direct_palette", "dot", {"size": 2}, None, "out of memory", "tried to allocate 20 GiB"),
    ),
    0, 31.0, "2026-01-31T12:00:00Z",
)  # fmt: skip


def text(problem=None, device=H200, cache=(), shipped=NO_TABLE, **options):
    cache = {cache_key(p, device, KERNELS.__getitem__): entry for p, entry in cache}
    return explain(problem, device=device, cache=cache, shipped=shipped, registry=KERNELS.__getitem__, **options)


# 1. Without a GPU


def test_without_a_gpu():
    said = text(device=CPU)

    assert said.startswith("This machine: no GPU that torch can use.\n")
    assert "decode them to BF16" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_machine(tmp_path):
    assert "no GPU" in explain(cache=TuningCache(tmp_path / "none.json"))
    assert "full_decode > cublas" in explain((4096, 4096), cache={})


def test_shipped_tables_are_shown_without_a_gpu(monkeypatch):
    from unweight.kernels import explanation

    rows = (
        Row("linear", "palette", 4096, 14336, 1, "direct_palette", "gemv", {"size": 3}, 19.5, 31.0),
        Row("linear", "huffman", 4096, 14336, 512, "full_decode", "cublas", None, 120.0, None),
    )
    table = Table("NVIDIA H200", (9, 0), "3.6.0", "12.8", rows)
    monkeypatch.setattr(explanation, "shipped_tables", lambda: [table])

    assert (
        text(device=CPU).split("\n\n")[1]
        == """\
Shipped table for NVIDIA H200 (Triton 3.6.0, CUDA 12.8):
  op      weights  matrix         batch  us     BF16 us  choice
  linear  palette  [4096, 14336]  1      19.5   31.0     gemv(size=3)
  linear  huffman  [4096, 14336]  512    120.0  -        full_decode > cublas"""
    )


def test_a_gpu_that_is_not_supported(monkeypatch):
    from unweight.errors import DeviceError
    from unweight.kernels import devices

    def refuse(device):
        raise DeviceError("Tesla T4 has compute capability 7.5")

    monkeypatch.setattr(devices, "device_info", refuse)
    assert explain(device="cuda", cache={}).startswith("This machine: Tesla T4 has compute capability 7.5.\n")


# 2. On a GPU


def test_the_device():
    assert text().splitlines() == [
        "This machine: NVIDIA H200, compute capability 9.0, 132 multiprocessors, CUDA 12.8, Triton 3.6.0 with Gluon.",
        "Measured here: 0 products. Shipped for this GPU: a table of 0 products.",
    ]


def test_kernels_that_are_missing_have_a_reason():
    said = text(device=A100)

    assert "Triton 3.2.0 without Gluon" in said
    assert "Kernel stream: not available, it needs Gluon, which Triton 3.2.0 doesn't have" in said
    assert "Kernel mma: not available, it needs Gluon" in said
    assert "Kernel dot" not in said
    with_gluon = text(device=replace(A100, gluon=True))
    assert "Kernel stream: not available, it needs a Hopper GPU (compute capability 9.x), not 8.0." in with_gluon
    assert "Kernel mma" not in with_gluon


def test_the_file_is_named(tmp_path):
    assert str(tmp_path / "tuning.json") in explain(
        device=H200, cache=TuningCache(tmp_path / "tuning.json"), registry=KERNELS.__getitem__
    )


def test_every_matrix_by_batch():
    shipped = Table(
        H200.name, H200.capability, "3.6.0", "12.8",
        (Row("swiglu", "palette", 28672, 4096, 1, "direct_palette", "stream", {"size": 5}, 43.0, 64.0),),
    )  # fmt: skip
    said = text(cache=[(PROBLEM, ENTRY)], shipped=shipped, batches=(1, 16, 1024))

    assert said.split("\n\n")[1:] == [
        """\
linear by a palette matrix [4096, 14336]:
  batch  us    BF16 us  speed  from                   choice
  1      -     -        -      default, not measured  mma(size=4)
  16     20.0  31.0     1.55x  measured here          stream(size=5)
  1024   -     -        -      default, not measured  full_decode > cublas""",
        """\
swiglu by a palette matrix [28672, 4096]:
  batch  us    BF16 us  speed  from                   choice
  1      43.0  64.0     1.49x  shipped table          stream(size=5)
  16     -     -        -      default, not measured  mma(size=4)
  1024   -     -        -      default, not measured  full_decode > cublas""",
    ]


def test_a_time_of_another_batch_is_not_compared():
    (line,) = (line for line in text((4096, 14336), cache=[(PROBLEM, ENTRY)], batches=(32,)).splitlines()[-1:])
    assert line.split() == ["32", "20.0", "-", "-", "measured", "here", "stream(size=5)"]


def test_explaining_warns_about_nothing(recwarn):
    text((555, 64))
    assert not recwarn.list


# 3. One product


def test_one_product():
    said = text(replace(PROBLEM, m=13), cache=[(PROBLEM, ENTRY)])

    assert (
        said.split("\n\n")[1]
        == """\
linear of 13 rows by a palette matrix [4096, 14336]: stream(size=5) (measured here)
Measured for batch 16 on 2026-01-31T12:00:00Z, dense BF16 31.0 us:
  us    candidate
  20.0  stream(size=5)        chosen
  24.0  mma(size=4)
  81.2  full_decode > cublas
  -     gemv(size=3)          wrong: 3 of 64 outputs are not written, or NaN
  -     dot(size=2)           out of memory: tried to allocate 20 GiB"""
    )


def test_one_product_that_was_not_measured():
    said = text(Problem("transposed", "huffman", 5, 64, 128), device=A100)

    assert "full_decode > cublas (default, not measured)" in said
    assert "palette_transcode with stream: no, it has no transposed product" in said
    assert f"Nothing was measured here for batch {bucket(5)}." in said
