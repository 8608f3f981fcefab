#!/usr/bin/env python3
"""Makes the golden checkpoints of the rarer variants, with PyTorch 2.11.

    more.py DIR     file_per_item, rank_indices, zstd (needs the package
                    zstandard), hf_whole (safetensors with an index)
"""
import hashlib
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def tensors():
    generator = torch.Generator().manual_seed(11)

    def made(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "tok_embeddings.weight": made(7, 4),
        "layers.0.attention.wq.weight": made(6, 5).to(torch.bfloat16),
        "norm.weight": made(3),
    }


def state(mesh):
    tensors_ = tensors()
    sharded = {
        "tok_embeddings.weight": distribute_tensor(tensors_["tok_embeddings.weight"], mesh, [Shard(0)]),
        "layers.0.attention.wq.weight": distribute_tensor(
            tensors_["layers.0.attention.wq.weight"], mesh, [Shard(1)]
        ),
        "norm.weight": tensors_["norm.weight"],
    }
    return {**sharded, "train_state": {"step": 7, "betas": (0.9, 0.95)}}


def describe(objects=True):
    items = {}
    for fqn, tensor in tensors().items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        items[fqn] = {
            "kind": "tensor",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "nbytes": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
            "path": [fqn],
        }
    if objects:
        betas = [{"py": "float", "value": 0.9}, {"py": "float", "value": 0.95}]
        items["train_state.step"] = {
            "kind": "bytes", "value": {"py": "int", "value": 7}, "path": ["train_state", "step"],
        }
        items["train_state.betas"] = {
            "kind": "bytes", "value": {"py": "tuple", "items": betas}, "path": ["train_state", "betas"],
        }
    return {"items": items, "note": {"torch": torch.__version__}}


def save(rank, store, root):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def write(case, **options):
        where = os.path.join(root, case)
        writer = FileSystemWriter(where, single_file_per_rank=options.pop("single", True),
                                  _extensions=options.pop("extensions", None))
        dcp.save(state(mesh), storage_writer=writer, **options)

    write("file_per_item", single=False)
    write("rank_indices", use_collectives=False)
    from torch.distributed.checkpoint._extension import ZStandard

    write("zstd", extensions=[ZStandard()])
    dist.destroy_process_group()


def save_whole(where):
    names = {fqn: 1 + (fqn == "norm.weight") for fqn in tensors()}
    writer = HuggingFaceStorageWriter(where, fqn_to_index_mapping=names)
    dcp.save(tensors(), storage_writer=writer, no_dist=True)


if __name__ == "__main__":
    root = sys.argv[1]
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(save, args=(f"file://{scratch}/store", root), nprocs=RANKS)
    save_whole(os.path.join(root, "hf_whole"))
    for case in ["file_per_item", "rank_indices", "zstd", "hf_whole"]:
        with open(os.path.join(root, case, "expected.json"), "w") as out:
            json.dump(describe(objects=case != "hf_whole"), out, indent=1, sort_keys=True)
