#!/usr/bin/env python3
"""Recomputes the digests of a checkpoint with PyTorch (TRAJ-1, CKPT-2).

    digest.py CHECKPOINT [--weights HEX] [--state HEX] [--loss HEX]

CHECKPOINT is a DCP folder; torch.distributed.checkpoint reads it, nothing of
ours does. Prints one JSON object: weights_sha256, state_sha256 (null for a
checkpoint of the model only), loss_sha256 (null where the checkpoint has none),
step. With an expected digest the exit status is 1 when it differs.

weights_sha256 is SHA-256 over the parameters in byte order of their names, each
as name, shape (little-endian i64) and float32 little-endian values in C order.
state_sha256 has exp_avg and exp_avg_sq behind each parameter's values and the
step (little-endian i64) at the end.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
import tempfile

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# Top-level keys of a checkpoint that are not parameters.
OTHERS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


def flatten(value, prefix=""):
    """A nested state dict as one of dotted keys."""
    flat = {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        name = f"{prefix}{key}"
        if isinstance(item, (dict, list)):
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def load(folder):
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "all.pt")
        dcp_to_torch_save(folder, path)
        return flatten(torch.load(path, map_location="cpu", weights_only=False))


def values(tensor):
    array = tensor.detach().to(torch.float32).contiguous().numpy()
    return array.astype("<f4", copy=False).tobytes()


def digest(state, names, moments, step):
    total = hashlib.sha256()
    for name in names:
        tensor = state[name]
        total.update(name.encode())
        total.update(struct.pack(f"<{tensor.dim()}q", *tensor.shape))
        total.update(values(tensor))
        for moment in moments:
            total.update(values(state[f"optimizer.state.{name}.{moment}"]))
    if step is not None:
        total.update(struct.pack("<q", step))
    return total.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint")
    for name in ("weights", "state", "loss"):
        parser.add_argument(f"--{name}", metavar="HEX")
    options = parser.parse_args()

    state = load(options.checkpoint)
    names = [name for name, value in state.items()
             if isinstance(value, torch.Tensor) and name.split(".")[0] not in OTHERS]
    names.sort(key=str.encode)
    step = state.get("train_state.step")
    whole = step is not None and all(f"optimizer.state.{name}.exp_avg" in state for name in names)
    loss = state.get("train_state.loss_chain")
    result = {
        "weights_sha256": digest(state, names, (), None),
        "state_sha256": digest(state, names, ("exp_avg", "exp_avg_sq"), int(step)) if whole else None,
        "loss_sha256": loss.hex() if isinstance(loss, bytes) else loss,
        "step": None if step is None else int(step),
    }
    print(json.dumps(result))
    wrong = [name for name in ("weights", "state", "loss")
             if getattr(options, name) and getattr(options, name).lower() != result[f"{name}_sha256"]]
    for name in wrong:
        print(f"digest: {name}_sha256 is {result[f'{name}_sha256']}, expected "
              f"{getattr(options, name)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
