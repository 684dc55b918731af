"""Which slots of which hosts are replica r's? A hostfile, as DeepSpeed and Open MPI have it, cut into replicas.

    node1 slots=8
    node2 slots=8        # comments and empty lines are skipped

Replicas take slots in the file's order, each as many as it has ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

Share = dict[str, list[int]]
"""Host -> the numbers of its slots (its GPUs)."""

ENTRY = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def read(path: str | Path) -> dict[str, int]:
    """Host -> slots, in the file's order. Raises ValueError naming the first line that makes no sense."""
    slots: dict[str, int] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = ENTRY.fullmatch(line)
        if not match or int(match[2]) < 1:
            raise ValueError(f'{path}, line {number}: "{line}" is not "HOST slots=N"')
        if match[1] in slots:
            raise ValueError(f"{path}, line {number}: {match[1]} is listed twice; add up its slots in one line")
        slots[match[1]] = int(match[2])
    return slots


def shares(slots: dict[str, int], replicas: int, replica_size: int) -> list[Share]:
    """The slots of each replica. Raises ValueError if there are too few."""
    wanted, total = replicas * replica_size, sum(slots.values())
    if total < wanted:
        raise ValueError(
            f"the hostfile has {total} slots, but {replicas} replicas of {replica_size} ranks need {wanted}: add "
            "hosts, or make topology smaller"
        )
    everything = [(host, slot) for host, count in slots.items() for slot in range(count)]
    found: list[Share] = []
    for replica in range(replicas):
        share: Share = {}
        for host, slot in everything[replica * replica_size : (replica + 1) * replica_size]:
            share.setdefault(host, []).append(slot)
        found.append(share)
    return found


def spoken(share: Share) -> str:
    """As deepspeed's --include takes it: node1:0,1@node2:0,1."""
    return "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in share.items())
