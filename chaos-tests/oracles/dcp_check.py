#!/usr/bin/env python3
"""Asks PyTorch itself about a distributed checkpoint.

    dcp_check.py read DIR EXPECTED   PyTorch loads what we wrote: in one process,
                                     in two that shard every tensor, and by
                                     dcp_to_torch; every byte and value is compared
    dcp_check.py save DIR EXPECTED   PyTorch saves from two processes, and writes
                                     down what is in it

EXPECTED is JSON: {fqn: {"path": [..], "dtype", "shape", "sha256"} for a tensor,
{"path": [..], "value": a Python literal} for an object}.
"""
import ast
import hashlib
import json
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")
PROCESSES = 2


def raw(tensor):
    """The elements in C order, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(tensor):
    return hashlib.sha256(raw(tensor)).hexdigest()


def nest(expected, leaf):
    """The nested state dict of the paths, with leaf(fqn, item) at each key."""
    root = {}
    for fqn, item in expected.items():
        *path, last = item["path"]
        at = root
        for key, following in zip(path, [*path[1:], last]):
            fresh = [] if isinstance(following, int) else {}
            if isinstance(at, list):
                at.extend([None] * (key + 1 - len(at)))
                at[key] = at[key] if at[key] is not None else fresh
                at = at[key]
            else:
                at = at.setdefault(key, fresh)
        if isinstance(at, list):
            at.extend([None] * (last + 1 - len(at)))
        at[last] = leaf(fqn, item)
    return root


def get(state, path):
    for key in path:
        state = state[key]
    return state


def empty(item):
    """A tensor of the right kind, full of wrong bytes."""
    tensor = torch.empty(item["shape"], dtype=getattr(torch, item["dtype"]))
    tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
    return tensor


def check(state, expected, how):
    for fqn, item in expected.items():
        found = get(state, item["path"])
        if "value" in item:
            wanted = ast.literal_eval(item["value"])
            assert type(found) is type(wanted) and found == wanted, f"{how}: {fqn}: {found!r}"
            continue
        if isinstance(found, DTensor):
            found = found.full_tensor()
        assert str(found.dtype) == f"torch.{item['dtype']}", f"{how}: {fqn}: {found.dtype}"
        assert list(found.shape) == item["shape"], f"{how}: {fqn}: {found.shape}"
        assert digest(found) == item["sha256"], f"{how}: {fqn}: bytes differ"
    print(f"{how}: {len(expected)} items equal")


def read(directory, expected):
    target = nest(expected, lambda _, item: 0 if "value" in item else empty(item))
    dcp.load(target, checkpoint_id=directory, no_dist=True)
    check(target, expected, "dcp.load in 1 process")

    with tempfile.TemporaryDirectory() as scratch:
        single = os.path.join(scratch, "single.pt")
        dcp_to_torch_save(directory, single)
        check(torch.load(single, weights_only=True), expected, "dcp_to_torch")

    in_processes(read_sharded, directory, expected)


def read_sharded(rank, mesh, directory, expected):
    for dim in range(2):

        def leaf(_, item):
            if "value" in item:
                return 0
            tensor = empty(item)
            # Collectives and sharding know the common types only.
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.int64):
                return tensor
            shardable = tensor.dim() > dim and tensor.numel() > 0
            return distribute_tensor(tensor, mesh, [Shard(dim) if shardable else Replicate()])

        target = nest(expected, leaf)
        dcp.load(target, checkpoint_id=directory)
        check(target, expected, f"dcp.load in {PROCESSES} processes, rank {rank}, Shard({dim})")


def save(directory, expected):
    in_processes(save_sharded, directory, expected)


def save_sharded(rank, mesh, directory, expected):
    generator = torch.Generator().manual_seed(7)

    def tensor(*shape):
        return torch.randn(shape, generator=generator)

    weight, tall, bias = tensor(9, 10), tensor(3, 64, 33), tensor(5)
    state = {
        "tok_embeddings.weight": distribute_tensor(weight, mesh, [Shard(0)]),
        "layers.0.tall": distribute_tensor(tall, mesh, [Shard(1)]),
        "half": distribute_tensor(weight.to(torch.bfloat16), mesh, [Shard(1)]),
        "optimizer": {"state.tok_embeddings.weight.step": torch.tensor(3.0), "turned": bias},
        "train_state": {"step": 17, "betas": (0.9, 0.95), "names": ["a", None, True]},
    }
    dcp.save(state, checkpoint_id=directory)
    if rank != 0:
        return
    for fqn, path, found in [
        ("tok_embeddings.weight", ["tok_embeddings.weight"], weight),
        ("layers.0.tall", ["layers.0.tall"], tall),
        ("half", ["half"], weight.to(torch.bfloat16)),
        ("optimizer.state.tok_embeddings.weight.step", None, torch.tensor(3.0)),
        ("optimizer.turned", None, bias),
    ]:
        path = path or fqn.split(".", 1)
        dtype = str(found.dtype).removeprefix("torch.")
        shape = list(found.shape)
        expected[fqn] = {"path": path, "dtype": dtype, "shape": shape, "sha256": digest(found)}
    with open(os.environ["DCP_CHECK_EXPECTED"], "w") as out:
        json.dump(expected, out)


def in_processes(work, directory, expected):
    with tempfile.TemporaryDirectory() as scratch:
        store = f"file://{scratch}/store"
        mp.spawn(process, args=(work, store, directory, expected), nprocs=PROCESSES)


def process(rank, work, store, directory, expected):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    work(rank, init_device_mesh("cpu", (PROCESSES,)), directory, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    command, directory, path = sys.argv[1:]
    os.environ["DCP_CHECK_EXPECTED"] = path
    if command == "save":
        save(directory, {})
    else:
        with open(path) as expected:
            read(directory, json.load(expected))
