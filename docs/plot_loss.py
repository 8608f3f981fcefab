#!/usr/bin/env python3
"""Draws the loss of a run that was disturbed over that of a quiet one.

    docs/plot_loss.py QUIET DISTURBED > docs/loss.svg

Both are dump folders of finished runs of one configuration. What is drawn is
what the nodes wrote down: the losses of metrics.jsonl, the failures and meshes
of events.jsonl. Prints on standard error whether the two curves differ in a
single bit. Standard library only.
"""

import json
import pathlib
import sys

WIDTH, LEFT, RIGHT = 760, 56, 16
LOSS_TOP, LOSS_BOTTOM = 48, 300
MESH_TOP, MESH_BOTTOM = 336, 396
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}"
    ".title{font-size:14px;fill:#111}"
    ".grid{stroke:#e4e4e4}"
    ".quiet{fill:none;stroke:#f2b134;stroke-width:6;stroke-linejoin:round}"
    ".hurt{fill:none;stroke:#1f4e79;stroke-width:1.6}"
    ".kill{stroke:#c0392b;stroke-dasharray:3 3}"
    ".cause{font-size:10px;fill:#c0392b}"
    ".mesh{fill:#1f4e79;fill-opacity:.18;stroke:#1f4e79}"
)


def lines(folder, name):
    for path in sorted(pathlib.Path(folder).glob(f"nodes/*/{name}")):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                pass  # The last line of a killed writer.


def losses(folder):
    """Loss by step, of the newest generation that reported the step."""
    newest = {}
    for line in lines(folder, "metrics.jsonl"):
        seen = newest.get(line["step"], (-1, 0.0))
        newest[line["step"]] = max(seen, (line["generation"], line["loss"]))
    return {step: loss for step, (_, loss) in sorted(newest.items())}


def generations(folder):
    """(first step, ranks, whether a loss caused it, reason), in order."""
    plans, seals = {}, {}
    for event in lines(folder, "events.jsonl"):
        key = (event.get("era"), event.get("generation"))
        if event["kind"] == "planned":
            plans[key] = event
        elif event["kind"] == "sealed":
            seals[key] = event["restore"]
    for key in sorted(seals):
        plan = plans[key]
        yield seals[key], len(plan["mesh"]), plan["failure"], plan["reason"]


def cause(reason):
    """The nodes of `lost worker 12 of node n2 (…); node n3 (…)`."""
    words = reason.replace("(", " ").replace(";", " ").split()
    names = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "node"]
    what = "worker" if "worker" in words else "node"
    return f"{what} {' '.join(dict.fromkeys(names))}"


def main(quiet_folder, hurt_folder):
    quiet, hurt = losses(quiet_folder), losses(hurt_folder)
    steps = max(quiet)
    highest = max(quiet.values()) * 1.05
    most = max(ranks for _, ranks, _, _ in generations(hurt_folder))

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss):
        return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * loss / highest

    def ranks_y(ranks):
        return MESH_BOTTOM - (MESH_BOTTOM - MESH_TOP) * ranks / most

    def curve(values):
        return " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in values.items())

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 430" width="{WIDTH}" '
        f'height="430"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
    ]
    for loss in range(0, int(highest) + 1):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, steps + 1, max(1, steps // 8)):
        out.append(f'<text x="{x(step):.1f}" y="{MESH_BOTTOM + 16}" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="424" text-anchor="middle">step</text>')
    out.append(f'<polyline class="quiet" points="{curve(quiet)}"/>')
    out.append(f'<polyline class="hurt" points="{curve(hurt)}"/>')

    path, meshes = "", list(generations(hurt_folder))
    kills, last_label = 0, 0.0
    for index, (first, ranks, failure, reason) in enumerate(meshes):
        end = meshes[index + 1][0] if index + 1 < len(meshes) else steps
        path += f"{'M' if not path else 'L'}{x(first):.1f},{ranks_y(ranks):.1f} H{x(end):.1f} "
        if failure:
            kills += 1
            at = x(first)
            out.append(f'<line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{LOSS_TOP}" y2="{MESH_BOTTOM}"/>')
            if at - last_label > 12:
                out.append(
                    f'<text class="cause" transform="translate({at + 11:.1f} {LOSS_TOP + 4}) rotate(90)">'
                    f"{cause(reason)} killed</text>"
                )
                last_label = at
    path += f"V{MESH_BOTTOM} H{x(meshes[0][0]):.1f} Z"
    out.append(f'<path class="mesh" d="{path}"/>')
    for ranks in range(1, most + 1):
        out.append(f'<text x="{LEFT - 8}" y="{ranks_y(ranks) + 4:.1f}" text-anchor="end">{ranks}</text>')
    out.append(f'<text x="{LEFT}" y="{MESH_TOP - 10}">ranks of the disturbed run</text>')
    out.append(f'<text class="title" x="{LEFT}" y="24">Loss: a quiet run, and one that lost workers and nodes {kills} times</text>')
    key = WIDTH - RIGHT - 236
    out.append(f'<line class="quiet" x1="{key}" x2="{key + 36}" y1="172" y2="172"/><text x="{key + 44}" y="176">quiet</text>')
    out.append(f'<line class="hurt" x1="{key}" x2="{key + 36}" y1="192" y2="192"/><text x="{key + 44}" y="196">disturbed: the same to the last bit</text>')
    out.append("</svg>")
    print("\n".join(out))

    differ = sorted(step for step in quiet if quiet[step] != hurt.get(step))
    if differ:
        sys.exit(f"the losses differ at {len(differ)} steps, first at {differ[0]}")
    print(f"{len(quiet)} losses, all equal; {kills} failures", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
