"""Kernels run on the GPU where there is one, else in Triton's interpreter, which is chosen before they are made.

And a tiny chat model, its bundle and a few conversations, made once.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A BF16 checkpoint of a tiny chat model.  Not to be changed."""
    from tiny_chat import save_model

    return save_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def bundle(base, tmp_path_factory):
    """The bundle of ``base``.  Not to be changed."""
    from unweight import convert

    target = tmp_path_factory.mktemp("bundle") / "bundle"
    convert(base, target, workers=1)
    return target


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Sixteen short conversations.  Not to be changed."""
    from tiny_chat import chats, write_lines

    return write_lines(tmp_path_factory.mktemp("data") / "chats.jsonl", chats())
