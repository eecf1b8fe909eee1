"""Kernels run in Triton's interpreter where there is no GPU; it is chosen before they are made."""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
