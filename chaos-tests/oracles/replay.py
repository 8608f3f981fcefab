#!/usr/bin/env python3
"""Replays a run's data ledgers along its official history (DATA-1, GN-5).

    replay.py LEDGERS --events FILE... --tokens train.tok --seed 42 \\
              --seq-len 128 --local-batch 8 --global-batch 64 [--final-step 300]

LEDGERS is a folder; every *.jsonl below it whose lines look like ledger entries
is read. The events are JSON lines; of them the seals (which generation began at
which step) and the end of the run are used, repeated ones from several nodes
count once. Checked, with nothing but the documented rules and the token file:

* every committed step consumed every micro-batch exactly once, in the one
  generation that the chain of seals makes official for it;
* every attempt at a step, official or not, read the samples that the seeded
  order gives it, and the digest of their bytes is that of the token file;
* no attempt belongs to a generation that was never sealed, or to a step before
  the one that its generation restored.

Prints one line. Exit status: 0 sound, 1 violated, 2 cannot tell (bad input).
Standard library only; shares no code with what it checks.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import sys
from collections import Counter, defaultdict

MASK = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15
SHOWN = 20  # violations printed in full

# The events that matter.
SEALED = "sealed"  # era, generation, restore: the step that the generation goes on from
FINISHED = "job_finished"  # report.step: steps of the whole run


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class Permutation:
    """The order of one epoch: an 8-round Feistel network, cycle-walked."""

    def __init__(self, seed, epoch, n):
        self.n = n
        self.half = ((n - 1).bit_length() + 1) // 2
        key = mix((mix((seed + INCREMENT) & MASK) + epoch * INCREMENT) & MASK)
        self.keys = [mix((key + (r + 1) * INCREMENT) & MASK) for r in range(8)]

    def at(self, i):
        half, mask = self.half, (1 << self.half) - 1
        while True:
            left, right = i >> half, i & mask
            for key in self.keys:
                left, right = right, left ^ (mix(right ^ key) & mask)
            i = left << half | right
            if i < self.n:
                return i


class Tokens:
    """The token file: header of 64 bytes, then tokens."""

    def __init__(self, path):
        self.file = open(path, "rb")
        header = self.file.read(64)
        if len(header) < 64 or header[:8] != b"ELASTOK1":
            raise ValueError(f"{path} is not a token file")
        version, self.width, _, self.count = struct.unpack("<IIQQ", header[8:32])
        if version != 1:
            raise ValueError(f"{path} has version {version}, expected 1")

    def bytes(self, first, count):
        self.file.seek(64 + first * self.width)
        data = self.file.read(count * self.width)
        if len(data) != count * self.width:
            raise ValueError(f"tokens {first} + {count} are beyond the token file")
        return data


class Order:
    """Which samples a micro-batch of a step takes, and their digest."""

    def __init__(self, tokens, seed, seq_len, local, glob):
        self.tokens, self.seed, self.seq_len = tokens, seed, seq_len
        self.local, self.glob = local, glob
        self.micro_batches = glob // local
        self.samples = (tokens.count - 1) // seq_len
        self.epochs, self.known = {}, {}

    def expected(self, step, micro_batch):
        key = (step, micro_batch)
        if key not in self.known:
            ids, digest = [], hashlib.sha256()
            first = step * self.glob + micro_batch * self.local
            for position in range(first, first + self.local):
                epoch, place = divmod(position, self.samples)
                if epoch not in self.epochs:
                    self.epochs[epoch] = Permutation(self.seed, epoch, self.samples)
                ids.append(self.epochs[epoch].at(place))
                digest.update(self.tokens.bytes(ids[-1] * self.seq_len, self.seq_len + 1))
            self.known[key] = ids, digest.hexdigest()
        return self.known[key]


def field(event, *path):
    value = event
    for name in path:
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"event {json.dumps(event)[:200]} has no field {'.'.join(path)}")
        value = value[name]
    return value


def json_lines(path):
    """The objects of a file of JSON lines. The last line of a process that was
    killed may be torn: it is the only one allowed to be."""
    text = path.read_text(errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from None
        if isinstance(value, dict):
            yield value


def read_history(paths, final):
    """The chain of seals as [(era, generation), restore], and the final step."""
    seals = {}
    for path in paths:
        for event in json_lines(path):
            kind = event.get("kind")
            if kind == SEALED:
                token = field(event, "era"), field(event, "generation")
                restore = field(event, "restore")
                if seals.setdefault(token, restore) != restore:
                    raise ValueError(f"generation {token} was sealed at {seals[token]} and {restore}")
            elif kind == FINISHED and final is None:
                final = field(event, "report", "step")
    if not seals:
        raise ValueError("the events have no seal")
    if final is None:
        raise ValueError("the events have no end of the run: give --final-step")
    return sorted(seals.items()), final


def official_generations(seals, final):
    """For each step the generation whose attempt counts. A seal keeps what came
    before its restore step and drops the rest, also over several generations."""
    official = []
    current = None
    for token, restore in seals:
        if current is None and restore:
            raise ValueError(f"the first seal {token} restores step {restore}: seals are missing")
        official += [current] * (restore - len(official))
        del official[restore:]
        current = token
    official += [current] * (final - len(official))
    del official[final:]
    return official


def is_entry(value):
    return {"era", "generation", "step", "rank", "micro_batch", "samples", "sha256"} <= value.keys()


def audit(attempts, seals, official, order):
    """Yields one line for each violation."""
    restored = dict(seals)
    for (token, step), entries in sorted(attempts.items()):
        where = f"generation {token[0]}.{token[1]}, step {step}"
        if token not in restored:
            yield f"{where}: the generation was never sealed"
        elif step < restored[token]:
            yield f"{where}: the generation began at step {restored[token]}"
        counts = Counter(entry["micro_batch"] for entry in entries)
        for micro_batch, count in sorted(counts.items()):
            if count > 1:
                yield f"{where}: micro-batch {micro_batch} was consumed {count} times"
        for entry in entries:
            micro_batch, rank = entry["micro_batch"], entry["rank"]
            if not 0 <= micro_batch < order.micro_batches:
                yield f"{where}, rank {rank}: there is no micro-batch {micro_batch}"
                continue
            ids, digest = order.expected(step, micro_batch)
            if entry["samples"] != ids:
                yield (f"{where}, rank {rank}: micro-batch {micro_batch} read samples "
                       f"{entry['samples']}, the order says {ids}")
            elif entry["sha256"] != digest:
                yield (f"{where}, rank {rank}: micro-batch {micro_batch} read bytes of SHA-256 "
                       f"{entry['sha256']}, the token file has {digest}")
    for step, token in enumerate(official):
        consumed = {entry["micro_batch"] for entry in attempts.get((token, step), ())}
        missing = [m for m in range(order.micro_batches) if m not in consumed]
        if missing:
            yield f"step {step}, committed by generation {token[0]}.{token[1]}: skipped {missing}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("ledgers", type=pathlib.Path)
    parser.add_argument("--events", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=pathlib.Path, required=True)
    parser.add_argument("--final-step", type=int)
    for name in ("seed", "seq-len", "local-batch", "global-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    try:
        tokens = Tokens(options.tokens)
        order = Order(tokens, options.seed, options.seq_len, options.local_batch, options.global_batch)
        seals, final = read_history(options.events, options.final_step)
        official = official_generations(seals, final)
        attempts, files = defaultdict(list), 0
        for path in sorted(options.ledgers.rglob("*.jsonl")):
            entries = [value for value in json_lines(path) if is_entry(value)]
            files += bool(entries)
            for entry in entries:
                attempts[(entry["era"], entry["generation"]), entry["step"]].append(entry)
        violations = list(audit(attempts, seals, official, order))
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"replay: cannot tell: {error}", file=sys.stderr)
        return 2
    for line in violations[:SHOWN]:
        print(f"replay: {line}", file=sys.stderr)
    if len(violations) > SHOWN:
        print(f"replay: and {len(violations) - SHOWN} more", file=sys.stderr)
    counting = {(token, step) for step, token in enumerate(official)}
    redone = sum(1 for attempt in attempts if attempt not in counting)
    consumed = sum(len(e["samples"]) for a in counting for e in attempts.get(a, ()))
    print(f"replay: {'VIOLATED' if violations else 'ok'}: {final} committed steps, {consumed} samples "
          f"(epoch of {order.samples}), {len(seals)} generations, {files} ledgers, "
          f"{redone} attempts that do not count, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
