"""What will this run be? Its topology, sizes and bytes as text, and whether its links can carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noloco_mega import checks, costs
from noloco_mega.config import ConfigError
from noloco_mega.plan.stability import spectral_radius, stable_gamma_range

if TYPE_CHECKING:
    from noloco_mega.config import Config

GIGA = 10**9


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the user knows about the network and the ranks' speed."""

    gbit_per_second: float
    """What one replica can send to the others of its site (all of them without sites), in each direction at once."""
    site_gbit_per_second: float
    """What one replica can send to replicas of other sites."""
    rank_tflops: float
    """TFLOP/s that one rank achieves in training, from which the time of an inner step follows."""


def describe(config: Config, hosts: Mapping[int, str] | None = None) -> str:
    """The whole report; `hosts` gives the host of each rank in the run, where they are known."""
    parts = [_topology(config, hosts or {}), _stages(config), _bytes(config), _outer(config)]
    return "\n\n".join(parts)


def judge(config: Config, links: Links) -> str:
    """Whether these links can carry this run, in words.

    Raises ConfigError where they can't: where routed activations take longer than computing what they are for, so that
    no overlap could hide them, or where one exchange takes longer than it may and every outer step would be missed. An
    average over all replicas has no deadline as a whole: it only takes its time.
    """
    traffic = costs.traffic(config)
    grid = config.topology.grid()
    compute = costs.inner_step_flops(config) / (grid.replica_size * links.rank_tflops * 1e12)
    routed = traffic.replica_inner_outside * 8 / (links.gbit_per_second * GIGA)
    slowest = min(links.gbit_per_second, links.site_gbit_per_second) if config.topology.sites else links.gbit_per_second
    outer = traffic.replica_outer * 8 / (slowest * GIGA)
    gradients = traffic.replica_gradients * 8 / (slowest * GIGA)
    phase = (compute + gradients) * config.noloco.inner_steps
    problems = []
    outside, exchanged = spoken_size(traffic.replica_inner_outside), spoken_size(traffic.replica_outer)
    if routed > compute:
        problems.append(
            f"random routing sends {outside} out of each replica per inner step, which "
            f"takes {_seconds(routed)} at {links.gbit_per_second:g} Gbit/s, longer than the {_seconds(compute)} of "
            f"computing at {links.rank_tflops:g} TFLOP/s per rank: set noloco.routing to fixed, group the "
            "replicas that share a fast network in topology.sites, or use fewer stages"
        )
    cap = config.noloco.transfer_cap_seconds
    if outer > cap and config.noloco.optimizer in costs.SMALL_GROUPS:
        problems.append(
            f"an outer step sends {exchanged} out of each replica, which takes {_seconds(outer)} at "
            f"{slowest:g} Gbit/s, longer than the {cap:g} s that noloco.link_timeout_seconds leaves it: every "
            f"exchange would be missed; raise that above {1.25 * (outer + config.noloco.exchange_deadline_seconds):.0f}"
        )
    if problems:
        raise ConfigError("these links cannot carry this run:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return (
        f"Links of {links.gbit_per_second:g} Gbit/s per replica"
        + (f" ({slowest:g} at the slowest)" if slowest != links.gbit_per_second else "")
        + f": routed activations take {_seconds(routed)} of an inner step of {_seconds(compute)} "
        f"(at {links.rank_tflops:g} TFLOP/s per rank),\n"
        + (f"averaging its gradients {_seconds(gradients)} more, " if gradients else "")
        + f"an exchange {_seconds(outer)} after {_seconds(phase)} of inner steps: "
        f"{outer / (outer + phase):.1%} of the time, if nothing overlaps. They can carry this run."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Right-aligned columns under a header."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _topology(config: Config, hosts: Mapping[int, str]) -> str:
    topology = config.topology
    grid = topology.grid()
    sites = topology.sites or (tuple(range(topology.replicas)),)
    site_of = {replica: number for number, site in enumerate(sites) for replica in site}
    header = ["rank", "replica", "stage", "tensor", "data", "site"] + (["host"] if hosts else [])
    rows = []
    for place in grid.places():
        rank = grid.rank(place)
        row = [rank, place.replica, place.stage, place.tensor, place.data, site_of[place.replica]]
        rows.append(row + ([hosts.get(rank, "?")] if hosts else []))
    return (
        f"{config.run.name}: {topology.replicas} replicas x {topology.stages} stages x {topology.tensor} tensor x "
        f"{topology.data} data = {grid.size} ranks, {grid.replica_size} per replica\n\n{table(header, rows)}"
    )


def _stages(config: Config) -> str:
    """Parameters and memory, for the ranks of each stage."""
    topology = config.topology
    on_gpu = config.run.device != "cpu"
    header = ["stage", "parameters", "weights", "gradients", "masters", "Adam", "φ", "δ", "activations", "sum", "host"]
    rows = []
    for stage in range(topology.stages):
        held = costs.memory(config, stage, on_gpu=on_gpu)
        parts = (held.weights, held.gradients, held.masters, held.adam, held.phi, held.delta, held.activations)
        sizes = [spoken_size(part) for part in (*parts, held.device_total, held.host_buffers)]
        rows.append([stage, f"{costs.stage_parameters(config, stage):,}", *sizes])
    a = costs.activation_bytes(config)
    return (
        f"The model has {costs.model_parameters(config):,} parameters ({costs.model_parameters(config) / GIGA:.3g} B). "
        f"Each rank of a stage holds:\n\n{table(header, rows)}\n\n"
        f"with P the rank's parameters: weights {a}·P; gradients "
        + ("4·P + 2·P" if config.bf16 else "4·P + 4·P/D")
        + "; masters 4·P/D; Adam 8·P/D; φ and δ, where the outer optimizer has them, 4·P/D each;\n"
        f"activations min(M, S − s) microbatches · layers · B·L·({a}·(4·q + 3·k + 5·F)/T + {2 * (8 + a)}·H"
        + ("/T" if topology.sequence_parallel else "")
        + "), with q and k the widths of all\nquery and key heads, and 4 bytes per logit of the last stage (Transformer"
        " Engine's layers keep less);\n"
        f"host: exchange buffers of {_buffers(config, on_gpu)}. What the libraries allocate themselves "
        "comes on top."
    )


def _buffers(config: Config, on_gpu: bool) -> str:
    if not costs.partners_of_a_replica(config):
        return "no bytes"
    if config.noloco.codec != "none":
        return "4·P/D·(n − 1) and n messages"
    return "4·P/D·n" if on_gpu else "4·P/D·(n − 1)"


def _bytes(config: Config) -> str:
    traffic = costs.traffic(config)
    header = ["stage", "per inner step", "per outer step"]
    rows: list[list[object]] = [
        [f"a rank of {stage}", spoken_size(inner + gradients), spoken_size(outer)]
        for stage, (inner, gradients, outer) in enumerate(
            zip(traffic.rank_inner, traffic.rank_gradients, traffic.rank_outer, strict=True)
        )
    ]
    inner, outside = (
        count + traffic.replica_gradients for count in (traffic.replica_inner, traffic.replica_inner_outside)
    )
    rows.append(["a replica", spoken_size(inner), spoken_size(traffic.replica_outer)])
    rows.append(["leaving it", spoken_size(outside), spoken_size(traffic.replica_outer)])
    tokens = config.replica_batch_size * config.model.seq_length
    return (
        f"Sent (and as much received), with an outer step every {config.noloco.inner_steps} inner steps:\n\n"
        f"{table(header, rows)}\n\n"
        f"An inner step of one replica takes {config.replica_batch_size} samples ({tokens:,} tokens) in "
        f"{config.microbatches} microbatches of {config.micro_batch_size}; the run's {config.topology.replicas} "
        f"replicas together {tokens * config.topology.replicas:,} tokens."
    )


def _outer(config: Config) -> str:
    noloco, replicas = config.noloco, config.topology.replicas
    coded = _codec(config)
    if noloco.optimizer != "noloco":
        waits = noloco.optimizer in checks.WAITS_FOR_EVERYBODY
        return (
            f'Outer optimizer "{noloco.optimizer}": no stability range applies.'
            + (" It waits for everybody: a lost replica ends the run." if waits else "")
            + coded
        )
    if replicas == 1:
        return "One replica: γ multiplies zero, and any value is stable."
    alpha, n, form = noloco.outer_momentum, noloco.group_size, checks.outer_step_form(noloco)
    if noloco.pairing == "tournament" and form["noise"]:
        return "Stability: not known for rounding errors under a tournament." + coded
    low, high = stable_gamma_range(alpha, n, replicas, **form)
    gammas = [noloco.gamma] + ([end] if (end := noloco.gamma_at_zero_lr) is not None else [])
    factors = [
        f"{spectral_radius(alpha, gamma, n, replicas, **form) ** 0.5:.3f} with γ = {gamma:g}" for gamma in gammas
    ]
    words = checks.outer_step_words(noloco)
    follows = ", to which γ goes as the learning rate goes to zero" if len(gammas) > 1 else ""
    return (
        f"Stability: with α = {alpha:g}, groups of {n} among {replicas} replicas{words}, γ must lie in "
        f"({low:g}, {high:.3f}). Per outer step the spread is multiplied by {', by '.join(factors)}{follows}." + coded
    )


def _codec(config: Config) -> str:
    noloco = config.noloco
    if noloco.codec == "none":
        return ""
    return (
        f"\nIn an exchange a weight takes {noloco.codec_bits} bits and 1/8 for the step of its block, over a range of "
        f"{noloco.codec_range:g} rms of the pair's difference."
    )


def spoken_size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
