"""Kernels run on the GPU where there is one, else in Triton's interpreter, which is chosen before they are made."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
