"""PyTorch's side of `elastic bench checkpoint`: one command a line on standard
input, one JSON object a line on standard output.

    pytorch.py RANK WORLD STORE TENSORS ROWS COLUMNS
"""

import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

warnings.filterwarnings("ignore")
rank, world, store, tensors, rows, columns = sys.argv[1:7]
rank, world, tensors, rows, columns = map(int, (rank, world, tensors, rows, columns))
alone = world == 1
if not alone:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
torch.manual_seed(rank)


def state():
    """Every page of it in memory."""
    names = [f"t{n:03}" for n in range(tensors)]
    if alone:
        return {name: torch.rand(rows, columns) for name in names}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    step = -(-rows // world)
    own = max(0, min(rows, (rank + 1) * step) - rank * step)
    shape, stride = torch.Size((rows, columns)), (columns, 1)
    return {
        name: DTensor.from_local(
            torch.rand(own, columns), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        for name in names
    }


def save(path, threads):
    writer = FileSystemWriter(path, thread_count=threads)
    started = time.perf_counter()
    dcp.save(held, storage_writer=writer, no_dist=alone)
    return time.perf_counter() - started


def load(path):
    started = time.perf_counter()
    dcp.load(held, storage_reader=FileSystemReader(path), no_dist=alone)
    return time.perf_counter() - started


def save_async(path):
    started = time.perf_counter()
    future = dcp.async_save(held, storage_writer=FileSystemWriter(path), no_dist=True)
    blocked = time.perf_counter() - started
    future.result()
    return blocked


held = state()
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # What libraries print is not for the reader of ours.
print(json.dumps({"torch": torch.__version__}), file=out, flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if not alone:
        dist.barrier()
    what = {"save": save, "load": load, "async": save_async}[command.pop("do")]
    print(json.dumps({"seconds": what(**command)}), file=out, flush=True)
