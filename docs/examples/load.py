"""Load a bundle, say how much memory its weights take, and go on with a text.

python docs/examples/load.py BUNDLE "Once upon a time" --max-memory 20GiB
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import transformers

import unweight


def main(arguments: Sequence[str] | None = None) -> str:
    """The text and what the model makes of it."""
    parser = argparse.ArgumentParser(description="Load a bundle and generate.")
    parser.add_argument("bundle", help="a directory, or the id of a bundle on the Hub")
    parser.add_argument("text", help="what to go on with")
    parser.add_argument("--residency", default="auto", help="auto, palette, huffman or dense")
    parser.add_argument("--max-memory", default=None, help="for weights and KV cache, like 20GiB")
    parser.add_argument("--tokens", type=int, default=40, help="how many to generate")
    options = parser.parse_args(arguments)

    model = unweight.load(options.bundle, residency=options.residency, max_memory=options.max_memory, plan=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.bundle)
    print(f"weights: {model.get_memory_footprint() / 1e6:.1f} MB on {model.device}")
    prompt = tokenizer(options.text, return_tensors="pt").to(model.device)
    tokens = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)
    text: str = tokenizer.decode(tokens[0], skip_special_tokens=True)
    print(text)
    return text


if __name__ == "__main__":
    main()
