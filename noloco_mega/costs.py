"""What does a rank hold, and what does it send? Arithmetic on a config alone: no torch, no processes.

Letters: P parameters of a rank, D inner data size, T tensor size, S stages, M microbatches per pipeline and inner step,
B samples of a microbatch, L tokens of a sample, H hidden size, N replicas, n group size, a bytes of an activation (4 in
fp32, 2 in bf16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noloco_mega.config import Config, Noloco

SLOW_WEIGHTS = frozenset({"noloco", "diloco"})
"""The outer optimizers that keep φ and δ."""
SMALL_GROUPS = frozenset({"noloco", "gossip"})
"""The outer optimizers whose replicas swap tensors in groups of n."""
CODE_BLOCK = 128
"""Weights that share a step under the modulo codec (comm/codec.py), with 2 bytes that tell it."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward 2, backward 4 (Kaplan et al., arXiv 2001.08361, section 2.1); attention scores are left out."""


def layer_parameters(config: Config, tensor: int) -> int:
    """Parameters of one layer on one of `tensor` tensor ranks: matrices are cut, and the biases of those cut by rows;
    the norms and the other biases are not."""
    model = config.model
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    queries, pairs = model.num_attention_heads * width, 2 * groups * width
    attention = model.hidden_size * (queries + pairs) + queries * model.hidden_size
    feed_forward = 3 * model.hidden_size * model.ffn_hidden_size  # SwiGLU: gate, up, down
    cut_biases = (queries + pairs if model.attention_bias != "none" else 0) + 2 * model.ffn_hidden_size * model.mlp_bias
    whole_biases = model.hidden_size * ((model.attention_bias == "all") + model.mlp_bias)
    norms = 2 * model.hidden_size + 2 * width * model.qk_norm
    return (attention + feed_forward + cut_biases) // tensor + whole_biases + norms


def stage_parameters(config: Config, stage: int, tensor: int | None = None) -> int:
    """P: parameters of stage `stage` on one tensor rank (of topology.tensor unless another size is given)."""
    model, topology = config.model, config.topology
    tensor = topology.tensor if tensor is None else tensor
    count = layer_parameters(config, tensor) * (model.num_layers // topology.stages)
    if stage == 0:
        count += model.vocab_size * model.hidden_size // tensor
    if stage == topology.stages - 1:
        count += model.hidden_size
        if not model.tied_embeddings:
            count += model.vocab_size * model.hidden_size // tensor
    return count


def model_parameters(config: Config) -> int:
    """Parameters of the whole model, each counted once."""
    return sum(stage_parameters(config, stage, tensor=1) for stage in range(config.topology.stages))


def activation_bytes(config: Config) -> int:
    """a: bytes of one element of an activation."""
    return 2 if config.bf16 else 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank of a stage holds. Buffers of the libraries, and fragmentation, come on top."""

    weights: int
    """a·P: what the model computes with."""
    gradients: int
    """4·P accumulated in fp32; in bf16 2·P more, one microbatch's own. ZeRO's partition: 4·P/D more in fp32."""
    masters: int
    """4·P/D: fp32 masters, cut over D by ZeRO stage 1."""
    adam: int
    """8·P/D: the first and second moment, fp32."""
    phi: int
    """4·P/D: slow weights φ, fp32 (outer optimizers "noloco" and "diloco", and "gossip" with a codec)."""
    delta: int
    """4·P/D: outer momentum δ, fp32 (outer optimizers "noloco" and "diloco")."""
    activations: int
    """Kept for the backward pass: min(M, S − s) microbatches · layers of a stage · `layer_activation_bytes`, and on the
    last stage 4 bytes per logit of one microbatch (and for a moment a + 4 more, which are not counted)."""
    host_buffers: int
    """4·P/D·(n − 1) to receive into; on a GPU 4·P/D more, pinned, to send from. With a codec 4·P/D·(n − 1) for what is
    read, and n messages. In the host's memory; none where everybody is averaged with."""

    @property
    def device_total(self) -> int:
        """What a GPU must hold; on a CPU `host_buffers` come on top."""
        return self.weights + self.gradients + self.masters + self.adam + self.phi + self.delta + self.activations


def memory(config: Config, stage: int, *, on_gpu: bool) -> Memory:
    """What one rank of `stage` holds while it trains."""
    topology, noloco = config.topology, config.noloco
    parameters = stage_parameters(config, stage)
    share = -(-parameters // topology.data)
    delta = 4 * share if noloco.optimizer in SLOW_WEIGHTS else 0
    coded_gossip = noloco.optimizer == "gossip" and noloco.codec != "none"
    return Memory(
        weights=activation_bytes(config) * parameters,
        gradients=4 * parameters + (2 * parameters if config.bf16 else 4 * share),
        masters=4 * share,
        adam=8 * share,
        phi=4 * share if coded_gossip else delta,
        delta=delta,
        activations=_activations(config, stage),
        host_buffers=_host_buffers(config, share, on_gpu),
    )


def _host_buffers(config: Config, share: int, on_gpu: bool) -> int:
    partners = partners_of_a_replica(config)
    if config.noloco.codec == "none" or not partners:
        return 4 * share * (partners + (1 if on_gpu and partners else 0))
    return 4 * share * partners + message_bytes(config.noloco, share) * (partners + 1)


def layer_activation_bytes(config: Config) -> int:
    """Bytes that one layer keeps of one microbatch for its backward pass, on one tensor rank.

    Per token a·(4·q + 3·k + 5·F)/T + 2·norm, with q and k the widths of all query and all key heads: the projection's
    output (q + k + k), the rotated queries and keys, the context and its transposed copy, both halves of SwiGLU with
    three products of theirs. With query and key norms 4·(q + k)/T more, the normalised heads in fp32, and in bf16 as
    much again for their input. Nothing is recomputed, attention keeps no scores. Measured on megatron-core's own
    layers; Transformer Engine's keep less.
    """
    model, topology = config.model, config.topology
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    cut = 4 * model.num_attention_heads * width + 3 * groups * width + 5 * model.ffn_hidden_size
    per_token = activation_bytes(config) * cut // topology.tensor + 2 * _norm_bytes(config)
    if model.qk_norm:
        per_token += (8 if config.bf16 else 4) * (model.num_attention_heads + groups) * width // topology.tensor
    return config.micro_batch_size * model.seq_length * per_token


def _norm_bytes(config: Config) -> int:
    """What RMSNorm keeps of a token: its input and the normalised one in fp32, and its output."""
    cut = config.topology.tensor if config.topology.sequence_parallel else 1
    return (8 + activation_bytes(config)) * config.model.hidden_size // cut


def _activations(config: Config, stage: int) -> int:
    model, topology = config.model, config.topology
    in_flight = min(config.microbatches, topology.stages - stage)
    total = in_flight * (model.num_layers // topology.stages) * layer_activation_bytes(config)
    if stage == topology.stages - 1:
        per_token = 4 * model.vocab_size // topology.tensor + _norm_bytes(config)
        total += config.micro_batch_size * model.seq_length * per_token
    return total


def partners_of_a_replica(config: Config) -> int:
    """n − 1: with how many others a replica swaps tensors in an outer step."""
    in_groups = config.noloco.optimizer in SMALL_GROUPS
    return min(config.noloco.group_size, config.topology.replicas) - 1 if in_groups else 0


def message_bytes(noloco: Noloco, elements: int) -> int:
    """What tells a tensor of `elements` weights to one other replica: 4 bytes each; with a codec `codec_bits` each, and
    two bytes per block, whose last one is filled up."""
    if noloco.codec == "none":
        return 4 * elements
    return -(-elements // CODE_BLOCK) * (2 + CODE_BLOCK * noloco.codec_bits // 8)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent; as many are received."""

    rank_inner: tuple[int, ...]
    """Per stage: what one of its ranks sends to other stages in an inner step: M·B·L·H·a per boundary that it touches
    (an activation forward or a gradient back), 1/T of it under sequence parallelism."""
    replica_inner: int
    """The sum over a replica's ranks: 2·(S − 1)·D·T·M·B·L·H·a, or without the T under sequence parallelism."""
    replica_inner_outside: int
    """Of that, what leaves the replica on average: the part (k − 1)/k in a site of k replicas under random routing."""
    rank_outer: tuple[int, ...]
    """Per stage: what one of its ranks sends in an outer step: `message_bytes` of P/D (without a codec 4 each) to
    each of n − 1 partners ("noloco", "gossip"); 2·(N − 1)/N times that, as a ring all-reduce does ("diloco")."""
    replica_outer: int
    """The sum over a replica's ranks: without a codec about 4·(n − 1) or 8·(N − 1)/N bytes per parameter."""
    rank_gradients: tuple[int, ...]
    """Per stage: what one of its ranks sends in an inner step to average gradients over replicas: 2·(N − 1)/N·4·P/D
    ("allreduce")."""
    replica_gradients: int
    """The sum over a replica's ranks."""


def traffic(config: Config) -> Traffic:
    """What a run sends, per inner step and per outer step."""
    topology, model, noloco = config.topology, config.model, config.noloco
    message = config.micro_batch_size * model.seq_length * model.hidden_size * activation_bytes(config)
    if topology.sequence_parallel:
        message //= topology.tensor
    last = topology.stages - 1
    boundaries = [(stage > 0) + (stage < last) for stage in range(topology.stages)]
    rank_inner = tuple(config.microbatches * message * count for count in boundaries)
    ranks_of_stage = topology.data * topology.tensor
    replica_inner = ranks_of_stage * sum(rank_inner)
    site = len(topology.site_of(0)) if topology.sites is None else max(map(len, topology.sites))
    outside = (site - 1) / site if noloco.routing == "random" else 0.0
    shares = [-(-stage_parameters(config, stage) // topology.data) for stage in range(topology.stages)]
    replicas = topology.replicas
    messages = [message_bytes(noloco, share) for share in shares]
    ring = tuple(2 * (replicas - 1) * message // replicas for message in messages)
    rank_outer = tuple(partners_of_a_replica(config) * message for message in messages)
    if noloco.optimizer == "diloco":
        rank_outer = ring
    rank_gradients = ring if noloco.optimizer == "allreduce" else (0,) * topology.stages
    return Traffic(
        rank_inner=rank_inner,
        replica_inner=replica_inner,
        replica_inner_outside=round(replica_inner * outside),
        rank_outer=rank_outer,
        replica_outer=ranks_of_stage * sum(rank_outer),
        rank_gradients=rank_gradients,
        replica_gradients=ranks_of_stage * sum(rank_gradients),
    )


def inner_step_flops(config: Config) -> float:
    """Floating-point operations of one replica's inner step: 6 per parameter and token; the input embedding, which is
    only looked up, is left out."""
    tokens = config.replica_batch_size * config.model.seq_length
    multiplied = model_parameters(config)
    if not config.model.tied_embeddings:
        multiplied -= config.model.vocab_size * config.model.hidden_size
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * multiplied * tokens)
