"""PyTorch reads what we wrote: every folder below CASES is a checkpoint, with
`expected.json` beside its files: {key: {dtype, shape, sha256}}.

    referee.py cases CASES WORLD    dcp.load in WORLD processes, every tensor cut
                                    along each of its dimensions in turn
    referee.py torch FILE EXPECTED  torch.load(weights_only=True)
    referee.py save FILE EXPECTED   torch.save of a nested state dict
    referee.py hf FOLDER EXPECTED   safetensors, as Hugging Face reads it
"""

import hashlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")


def sha256(tensor):
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def check(key, tensor, wanted):
    assert str(tensor.dtype) == "torch." + wanted["dtype"], (key, tensor.dtype)
    assert list(tensor.shape) == wanted["shape"], (key, tensor.shape)
    assert sha256(tensor) == wanted["sha256"], key


def cases(rank, world, root, store):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    count = 0
    for n, case in enumerate(sorted(Path(root).iterdir())):
        expected = json.loads((case / "expected.json").read_text())
        state, cuts = {}, {}
        for key, wanted in expected.items():
            shape, dtype = torch.Size(wanted["shape"]), getattr(torch, wanted["dtype"])
            dim = n % len(shape) if shape else None
            if dim is None:
                state[key] = torch.zeros(shape, dtype=dtype)
                continue
            step = -(-shape[dim] // world)
            start = min(shape[dim], rank * step)
            own = list(shape)
            own[dim] = min(shape[dim], start + step) - start
            cuts[key] = (dim, start, own[dim])
            # A stride counts an empty dimension as one.
            stride = torch.empty(shape, device="meta").stride()
            state[key] = DTensor.from_local(
                torch.zeros(own, dtype=dtype), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
            )
        dcp.load(state, checkpoint_id=case)
        whole = {
            key: torch.zeros(wanted["shape"], dtype=getattr(torch, wanted["dtype"]))
            for key, wanted in expected.items()
        }
        dcp.load(whole, checkpoint_id=case, no_dist=True)
        for key, tensor in state.items():
            check(key, whole[key], expected[key])
            if key not in cuts:
                check(key, tensor, expected[key])
                continue
            dim, start, length = cuts[key]
            part = whole[key].contiguous().view(-1).view(torch.uint8)
            part = part.reshape(*expected[key]["shape"], tensor.dtype.itemsize)
            local = tensor.to_local().contiguous().reshape(-1).view(torch.uint8)
            part = part.narrow(dim, start, length).reshape(-1)
            assert torch.equal(part, local), (str(case), key)
        count += 1
    dist.barrier()
    if rank == 0:
        print(f"{count} cases in {world} processes")
    dist.destroy_process_group()


def flat(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*path, str(key)))
    elif isinstance(value, torch.Tensor):
        yield ".".join(path), value


def main(command, *arguments):
    if command == "cases":
        root, world = arguments[0], int(arguments[1])
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            mp.spawn(cases, (world, root, store), nprocs=world)
    elif command == "torch":
        state = torch.load(arguments[0], weights_only=True)
        expected = json.loads(Path(arguments[1]).read_text())
        found = dict(flat(state))
        assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
        for key, wanted in expected.items():
            check(key, found[key], wanted)
        print(f"{len(found)} tensors, step {state['train_state']['step']}")
    elif command == "save":
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
        tied = torch.arange(24.0).reshape(4, 6)
        state = {
            "model": model.state_dict(),
            "view": tied.t(),
            "rows": tied[1:3],
            "half": tied.to(torch.bfloat16),
            "odd": torch.arange(6).to(torch.uint16).reshape(2, 3)[:, 1:],
            "scalar": torch.tensor(3.5),
            "parameter": torch.nn.Parameter(torch.ones(2, 2)),
            "train_state": {"step": 17, "betas": (0.9, 0.95)},
        }
        torch.save(state, arguments[0])
        expected = {
            key: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "sha256": sha256(tensor),
            }
            for key, tensor in flat(state)
        }
        Path(arguments[1]).write_text(json.dumps(expected))
        print(f"{len(expected)} tensors saved")
    elif command == "hf":
        from safetensors import safe_open

        folder = Path(arguments[0])
        expected = json.loads(Path(arguments[1]).read_text())
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                assert tensors.metadata()["format"] == "pt"
                found.update({key: tensors.get_tensor(key) for key in tensors.keys()})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
        assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
        for key, wanted in expected.items():
            check(key, found[key], wanted)
        print(f"{len(found)} tensors of a Hugging Face model")


if __name__ == "__main__":
    main(*sys.argv[1:])
