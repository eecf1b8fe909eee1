"""Benchmarks are scripts that import their neighbours; kernels run in Triton's interpreter where there is no GPU."""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
