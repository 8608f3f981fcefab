"""Trains the model of a checkpoint with PyTorch's own autograd, AdamW and
clipping, the whole global batch at once, and writes down loss, gradient norm
and learning rate of every step.

    reference.py CHECKPOINT CONFIG.json TOKENS OUT.json

CONFIG is the engine's configuration; TOKENS holds little-endian i64 ids,
[steps, global batch, seq_len + 1].
"""

import argparse
import json
import math
import os
import tempfile

import numpy
import torch

import llama


def factor(config, step):
    """torchtitan's warm-up, stable, decay: one virtual stable step before the decay."""
    schedule = config["lr_scheduler"]
    total = schedule["total_steps"] or config["training"]["steps"]
    warmup = min(schedule["warmup_steps"], total)
    ratio = schedule["decay_ratio"]
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    stable = total + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    progress = (step + 1 - warmup - stable) / decay
    curve = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[schedule["decay_type"]]
    floor = schedule["min_lr_factor"]
    return floor + (1 - floor) * curve


def main():
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "config", "tokens", "out"):
        parser.add_argument(name)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open(arguments.config, encoding="utf-8") as file:
        config = json.load(file)
    with tempfile.TemporaryDirectory() as scratch:
        state = llama.load(arguments.checkpoint, os.path.join(scratch, "whole.pt"))
    dtype = getattr(torch, arguments.dtype)
    weights = {
        name: value.to(dtype).requires_grad_() for name, value in llama.parameters(state).items()
    }

    training, options = config["training"], config["optimizer"]
    batch, time = training["global_batch_size"], training["seq_len"]
    tokens = torch.from_numpy(numpy.fromfile(arguments.tokens, "<i8")).view(-1, batch, time + 1)
    optimizer = torch.optim.AdamW(
        list(weights.values()),
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        foreach=False,
        fused=False,
    )
    out = {"loss": [], "grad_norm": [], "lr": []}
    for step, ids in enumerate(tokens):
        lr = options["lr"] * factor(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        logits = llama.forward(config["model"], weights, ids[:, :-1]).flatten(0, 1)
        targets = ids[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / (batch * time)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), training["max_norm"])
        optimizer.step()
        for key, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", lr)):
            out[key].append(value)
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(out, file)


main()
