"""What does one stage compute? A slice of a Llama-style decoder, built from megatron-core's tensor-parallel layers.

Letters: T tensor-parallel size, S stages.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from noloco_mega import config
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.model import parameters, rotary
from noloco_mega.model.attention import SdpaCoreAttention


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron-core's constructor, for its spec: the stock one refuses sequence parallelism.

    Under sequence parallelism each tensor rank normalises its own part of the sequence, so the weight's gradient is
    a part of the whole one: `sum_partial_gradients` adds them up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def with_bias(linear: type[torch.nn.Module], bias: bool) -> type[torch.nn.Module]:
    """A parallel linear layer that adds a bias or does not, whatever it is asked for: megatron-core asks for one by a
    switch that attention and MLP share."""

    class Linear(linear):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": bias})

    return Linear


def transformer_config(
    model: config.Model,
    topology: config.Topology,
    dtype: torch.dtype,
    *,
    variable_seq_lengths: bool = False,
    transformer_engine: bool = False,
) -> TransformerConfig:
    """megatron-core's configuration of a stage. `dtype` (fp32 or bf16) is that of parameters and of activations sent.

    Weights are allocated on the CPU and not filled: `parameters.initialise` does. Nothing is fused but what
    Transformer Engine fuses, there is no dropout, and gradients accumulate in p.grad.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"parameters are fp32 or bf16, not {dtype}")
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.stages,
        sequence_parallel=topology.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=variable_seq_lengths,
        # Its constructor refuses the default dispatcher with variable lengths, even without experts.
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        cuda_graph_scope=[],
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=transformer_engine,
    )


def build_stage(
    model: config.Model,
    topology: config.Topology,
    world: ReplicaWorld,
    dtype: torch.dtype,
    *,
    variable_seq_lengths: bool = False,
) -> GPTModel:
    """This rank's stage, on its device; parameters hold no defined values until `parameters.initialise`.

    The first stage embeds tokens [B, S]; the last one returns the loss of each token [B, S] when it is given labels.
    Call it as ``stage(tokens, None, None, labels=labels)``: RoPE needs no position ids and the attention no mask.
    On CUDA the layers are Transformer Engine's where that is installed (written from megatron-core's source, not yet
    run on GPUs), otherwise, and on the CPU, megatron-core's own with `SdpaCoreAttention`.
    """
    place = world.place
    transformer_engine = world.device.is_cuda and find_spec("transformer_engine") is not None
    settings = transformer_config(
        model, topology, dtype, variable_seq_lengths=variable_seq_lengths, transformer_engine=transformer_engine
    )
    stage = GPTModel(
        settings,
        _transformer_engine_layers(model) if transformer_engine else _local_layers(model, topology),
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=place.stage == 0,
        post_process=place.stage == topology.stages - 1,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=world.mcore,
    )
    slices = parameters.parameter_slices(stage, world)
    for name, parameter in stage.named_parameters():
        # The engine counts a parameter that every tensor rank holds only once in the gradient's norm; megatron-core
        # sets this mark together with its own initial values, which are not used here.
        parameter.tensor_model_parallel = parameters.partition_dim(slices[name].name) is not None
        # Each tensor rank normalises its own heads with the one weight that all of them hold.
        per_head = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        parameter.partial_gradient = per_head or getattr(parameter, "sequence_parallel", False)
    if model.rope_scaling is not None:
        stage.rotary_pos_emb.inv_freq = rotary.inverse_frequencies(model)
    return stage.to(world.device.device)


def _transformer_engine_layers(model: config.Model) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    _set_biases(layer, model)
    return layer


def _local_layers(model: config.Model, topology: config.Topology) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = SequenceParallelRMSNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    _set_biases(layer, model)
    count = model.num_layers // topology.stages
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=SequenceParallelRMSNorm)


def _set_biases(layer: ModuleSpec, model: config.Model) -> None:
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_qkv = with_bias(attention.linear_qkv, model.attention_bias != "none")
    attention.linear_proj = with_bias(attention.linear_proj, model.attention_bias == "all")
    mlp.linear_fc1 = with_bias(mlp.linear_fc1, model.mlp_bias)
    mlp.linear_fc2 = with_bias(mlp.linear_fc2, model.mlp_bias)


def sum_partial_gradients(
    model: torch.nn.Module, world: ReplicaWorld, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> None:
    """Add up, over the T tensor ranks, the gradients of weights that all of them hold and that act on one part of the
    sequence, or of the heads, each.

    `gradient_of` gives a parameter's accumulated gradient, which the engine may keep elsewhere than in p.grad; it is
    changed in place. One all-reduce of all of them together; none where there are no such weights.
    """
    marked = [p for p in model.parameters() if getattr(p, "partial_gradient", False)]
    if not marked or world.grid.tensor == 1:
        return
    gradients = []
    for parameter in marked:
        gradient = gradient_of(parameter)
        assert gradient is not None, "a norm weight has no gradient: was the schedule run?"
        gradients.append(gradient)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=world.tensor)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
