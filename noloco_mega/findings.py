"""What do the ranks' reports of a launch mean? The tables and the verdict of the live check, from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from noloco_mega import costs, report, versions

if TYPE_CHECKING:
    from noloco_mega.config import Config

Report = Mapping[str, Any]
"""A rank's {"facts": ..., "links": [...]}, as noloco_mega/preflight.py makes them."""

SHOWN_LINKS = 40
CLOCK_SECONDS = 1.0
"""A larger difference of clocks is worth a warning: times in logs then mislead."""


def judge(config: Config, reports: Mapping[int, Report], waited_seconds: float) -> tuple[str, bool]:
    """The text that ends with the verdict, and whether it is a good one."""
    links = _links(reports)
    problems = [*_missing(config, reports, waited_seconds), *_unequal(reports), *_places(config, reports)]
    problems += [f"rank {row['from']} and rank {row['to']}: {row['problem']}" for row in links if "problem" in row]
    problems += _too_slow(config, links)
    warnings = list(_clocks(links))
    parts = [_ranks(config, reports)]
    if measured := [row for row in links if "problem" not in row]:
        parts.append(_link_table(measured))
    if warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in warnings))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        parts.append(f"VERDICT: this launch would NOT work:\n{listed}")
    else:
        parts.append(f"VERDICT: this launch works: all {len(reports)} ranks are here, equal, and reach each other.")
    return "\n\n".join(parts), not problems


def _ranks(config: Config, reports: Mapping[int, Report]) -> str:
    grid = config.topology.grid()
    header = [
        "rank",
        "replica",
        "stage",
        "tensor",
        "data",
        "host",
        "address",
        "interface",
        "device",
        "GPUs seen",
        "disk",
    ]
    rows = []
    for rank, found in sorted(reports.items()):
        place, facts = grid.place(rank), found["facts"]
        speed = f" ({facts['interface_mbit'] / 1000:g} Gbit/s)" if facts["interface_mbit"] > 0 else ""
        free, pace = (report.spoken_size(facts["disk"][key]) for key in ("free", "bytes_per_second"))
        row = [rank, place.replica, place.stage, place.tensor, place.data, facts["host"], facts["address"]]
        row += [facts["interface"] + speed, facts["device"], facts["visible_gpus"] or "-", f"{free} free, {pace}/s"]
        rows.append(row)
    return report.table(header, rows)


def _links(reports: Mapping[int, Report]) -> list[Report]:
    """One row per pair: the measurement, or else the first problem."""
    found: dict[tuple[int, int], Report] = {}
    for _, reported in sorted(reports.items()):
        for row in reported["links"]:
            pair = (row["from"], row["to"])
            if pair not in found or "problem" in found[pair]:
                found[pair] = row
    return [found[pair] for pair in sorted(found)]


def _slower_way(row: Report) -> float:
    """Gbit/s of a measured link's slower direction."""
    return min(row["there_gbit"], row["back_gbit"])


def _link_table(links: list[Report]) -> str:
    ordered = sorted(links, key=_slower_way)
    header = ["link", "latency", "there", "back", "clock"]
    rows = [
        [
            f"{row['from']} - {row['to']}",
            f"{row['latency_seconds'] * 1000:.3f} ms",
            f"{row['there_gbit']:.3g} Gbit/s",
            f"{row['back_gbit']:.3g} Gbit/s",
            f"{row['clock_seconds'] * 1000:+.1f} ms",
        ]
        for row in ordered[:SHOWN_LINKS]
    ]
    slowest, farthest = ordered[0], max(links, key=lambda row: row["latency_seconds"])
    rest = f" ({len(links) - SHOWN_LINKS} faster ones are left out)" if len(links) > SHOWN_LINKS else ""
    return (
        f"{len(links)} links that training would use, slowest first, measured while the others measured too"
        f"{rest}\n\n{report.table(header, rows)}\n\n"
        f"Slowest link: rank {slowest['from']} - rank {slowest['to']}, {_slower_way(slowest):.3g} Gbit/s. "
        f"Longest way: rank {farthest['from']} - rank {farthest['to']}, {farthest['latency_seconds'] * 1000:.3f} ms."
    )


def _missing(config: Config, reports: Mapping[int, Report], waited_seconds: float) -> Iterator[str]:
    grid = config.topology.grid()
    for rank in range(grid.size):
        if rank not in reports:
            place = grid.place(rank)
            yield (
                f"rank {rank} (replica {place.replica}, stage {place.stage}) did not report in {waited_seconds:g} s: "
                "is it started, and does it reach rank 0?"
            )


def _unequal(reports: Mapping[int, Report]) -> Iterator[str]:
    first = reports[0]["facts"]
    for rank, found in sorted(reports.items()):
        facts = found["facts"]
        if different := versions.differences(first["versions"], facts["versions"]):
            yield f"rank 0 and rank {rank} ({facts['host']}) run different versions: {different}"
        if facts["config"] != first["config"]:
            yield f"rank {rank} ({facts['host']}) was started with another configuration than rank 0"


def _places(config: Config, reports: Mapping[int, Report]) -> Iterator[str]:
    """Devices and disks."""
    needed = 4 * costs.model_parameters(config) * config.topology.replicas
    for rank, found in sorted(reports.items()):
        facts = found["facts"]
        if facts["device_problem"]:
            yield f"rank {rank}: {facts['device_problem']}"
        if facts["disk"]["problem"]:
            yield f"rank {rank} ({facts['host']}): {facts['disk']['problem']}"
        elif facts["disk"]["free"] < needed:
            free = report.spoken_size(facts["disk"]["free"])
            yield (
                f"rank {rank} ({facts['host']}): {config.run.directory} has {free} free; the weights of all "
                f"replicas need {report.spoken_size(needed)}"
            )


def _too_slow(config: Config, links: list[Report]) -> Iterator[str]:
    """Links between twins over which an exchange would take longer than it may."""
    grid, cap = config.topology.grid(), config.noloco.transfer_cap_seconds
    sent = costs.traffic(config).rank_outer
    for row in links:
        if "problem" in row or (row["to"] - row["from"]) % grid.replica_size:
            continue
        seconds = sent[grid.place(row["from"]).stage] * 8 / (_slower_way(row) * 1e9)
        if seconds > cap:
            yield (
                f"an exchange between rank {row['from']} and rank {row['to']} would take {seconds:.0f} s at "
                f"{_slower_way(row):.3g} Gbit/s, longer than the {cap:g} s that noloco.link_timeout_seconds leaves it"
            )


def _clocks(links: list[Report]) -> Iterator[str]:
    for row in links:
        if "problem" not in row and abs(row["clock_seconds"]) > CLOCK_SECONDS:
            yield (
                f"the clocks of rank {row['from']} and rank {row['to']} differ by {row['clock_seconds']:+.1f} s; "
                "training does not mind, but times in logs cannot be compared"
            )
