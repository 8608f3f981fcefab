"""All-reduce over Gloo: RANKS ITERATIONS BYTES..., a line of bytes and median each."""

import os
import socket
import sys
import time


def run(rank, ranks, iterations, sizes, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in sizes:
        buffer = torch.ones(size // 4)
        dist.all_reduce(buffer)
        times = []
        began = time.perf_counter()
        while True:
            buffer.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            took = time.perf_counter() - start
            enough = len(times) + 1 >= iterations or (
                time.perf_counter() - began > 4 and len(times) > 3
            )
            # The slowest rank's time; rank 0 says when it is enough.
            said = torch.tensor([took, float(enough and rank == 0)], dtype=torch.float64)
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
            times.append(said[0].item())
            if said[1].item() > 0:
                break
        if rank == 0:
            print(size, sorted(times)[len(times) // 2] * 1e6, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, iterations, *sizes = map(int, sys.argv[1:])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            run(rank, ranks, iterations, sizes, port)
            os._exit(0)
        children.append(child)
    run(0, ranks, iterations, sizes, port)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)
