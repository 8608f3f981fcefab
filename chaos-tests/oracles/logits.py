"""Logits of a checkpoint's model after each of some tokens, by PyTorch.

    logits.py CHECKPOINT CONFIG.json TOKENS OUT

TOKENS holds little-endian i64 ids; OUT receives little-endian f32 values,
[tokens, vocab_size].
"""

import json
import os
import sys
import tempfile

import numpy
import torch

import llama


def main():
    checkpoint, config, tokens, out = sys.argv[1:]
    torch.set_num_threads(1)
    with open(config, encoding="utf-8") as file:
        shape = json.load(file)["model"]
    with tempfile.TemporaryDirectory() as scratch:
        state = llama.load(checkpoint, os.path.join(scratch, "whole.pt"))
    ids = torch.from_numpy(numpy.fromfile(tokens, "<i8"))[None]
    with torch.no_grad():
        logits = llama.forward(shape, llama.parameters(state), ids)[0]
    logits.contiguous().numpy().astype("<f4").tofile(out)


main()
