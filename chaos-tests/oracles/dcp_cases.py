#!/usr/bin/env python3
"""PyTorch saves random checkpoints, for us to read.

    dcp_cases.py DIR COUNT SEED     COUNT cases, from 1, 2, 3 and 4 processes each

A case is DIR/<processes>-<n>/ with expected.json: {fqn: {"dtype", "shape",
"sha256"}}. Shapes, element types, meshes, placements, memory layouts and the
writer's options are random.
"""
import hashlib
import json
import os
import random
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]
# Those that DTensor can cut up without kernels that do not exist.
SHARDED = [d for d in DTYPES if not d.startswith(("float8", "uint16", "uint32", "uint64"))]
SAFETENSORS = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]


def raw(tensor):
    """The elements in C order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(rng, dtype, dims=5):
    shape = [rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 9]) for _ in range(rng.randrange(dims))]
    item = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    count = item
    for size in shape:
        count *= size
    data = torch.tensor([rng.randrange(256) for _ in range(count)], dtype=torch.uint8)
    if dtype == "bool":
        data &= 1
    return data.view(getattr(torch, dtype)).reshape(shape)


def random_case(rng, meshes, huggingface):
    """The state to save, and what must be read."""
    state, expected = {}, {}
    for n in range(rng.randrange(1, 5)):
        sharded = rng.random() < 0.7
        dtype = rng.choice(SAFETENSORS if huggingface else SHARDED if sharded else DTYPES)
        tensor = random_tensor(rng, dtype)
        fqn = f"layers.{n}.weight"
        expected[fqn] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(raw(tensor)).hexdigest(),
        }
        if tensor.dim() > 1 and not huggingface and rng.random() < 0.3:
            # The same elements in another order of memory, which safetensors has not.
            order = list(range(tensor.dim()))
            rng.shuffle(order)
            back = sorted(range(len(order)), key=order.__getitem__)
            tensor = tensor.permute(order).contiguous().permute(back)
        if sharded:
            mesh = rng.choice(meshes)
            choices = [Replicate(), *(Shard(d) for d in range(tensor.dim()))]
            placements = [rng.choice(choices) for _ in range(mesh.ndim)]
            tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        state[fqn] = tensor
    return state, expected


def work(rank, size, root, count, seed, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    for n in range(count):
        # Every process draws the same.
        rng = random.Random(f"{seed}-{size}-{n}")
        huggingface = rng.random() < 0.15
        state, expected = random_case(rng, meshes, huggingface)
        where = os.path.join(root, f"{size}-{n}")
        if huggingface:
            names = {fqn: 1 + rng.randrange(2) for fqn in state}
            writer = HuggingFaceStorageWriter(
                where, fqn_to_index_mapping=names, save_distributed=True
            )
            dcp.save(state, storage_writer=writer)
        else:
            writer = FileSystemWriter(
                where,
                single_file_per_rank=rng.random() < 0.8,
                thread_count=rng.randrange(1, 4),
                sync_files=False,
            )
            collectives = rng.random() < 0.85
            dcp.save(state, storage_writer=writer, use_collectives=collectives)
        dist.barrier()
        if rank == 0:
            with open(os.path.join(where, "expected.json"), "w") as out:
                json.dump(expected, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    root, count, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as scratch:
        for size in range(1, 5):
            store = f"file://{scratch}/store-{size}"
            mp.spawn(work, args=(size, root, count, seed, store), nprocs=size)
