"""What run is this? One JSON file, parsed into frozen dataclasses; DeepSpeed's own keys stay at its top level.

    {"train_micro_batch_size_per_gpu": 4, ..., "bf16": {...},          <- DeepSpeed's, as it names them
     "topology": {...}, "model": {...}, "data": {...}, "noloco": {...}, "run": {...}}    <- ours, documented below

The same file serves ``--deepspeed_config``: DeepSpeed keeps blocks that it does not know without complaint. Batch
sizes, clipping, precision, inner optimizer and its schedule live on DeepSpeed's side only, and count per replica.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from noloco_mega import checks, deepspeed_keys
from noloco_mega.grid import Grid

Positive = Annotated[int, Field(gt=0, le=deepspeed_keys.LARGEST_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=deepspeed_keys.LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# poll counts milliseconds in an int, so that no wait can be longer than 24 days.
PositiveSeconds = Annotated[float, Field(gt=0, le=1e6)]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
DEEPEST = 8
"""Levels of objects and arrays in a file; anything deeper is no config."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message lists every problem found and what to change."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many ranks, and how they are cut: ranks = replicas · data · stages · tensor."""

    __pydantic_config__ = STRICT

    replicas: Positive
    """N: whole model instances. Each is a torch.distributed world of its own."""
    stages: Positive = 1
    """S: pipeline stages of each replica; divides model.num_layers."""
    tensor: Positive = 1
    """T: tensor-parallel size inside a stage; divides heads, query groups, FFN width and vocabulary."""
    data: Positive = 1
    """D: inner data parallelism, an ordinary all-reduce inside each replica."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism over the tensor axis (needs tensor > 1)."""
    start_replicas: Positive | None = None
    """With how many replicas the run begins; the others join when they come. Absent: with all."""
    sites: tuple[tuple[NonNegative, ...], ...] | None = None
    """Groups of replicas that share a fast network, e.g. [[0, 1], [2, 3]]; random routes stay inside a site, pairs are
    drawn over all replicas. Absent: one site of all replicas."""

    def grid(self) -> Grid:
        return Grid(replicas=self.replicas, data=self.data, stages=self.stages, tensor=self.tensor)

    def site_of(self, replica: int) -> tuple[int, ...]:
        """The replicas (ascending) of the site that `replica` belongs to."""
        sites = self.sites or (tuple(range(self.replicas)),)
        return next(tuple(sorted(site)) for site in sites if replica in site)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies changed for contexts longer than the model was first trained on."""

    __pydantic_config__ = STRICT

    type: Literal["linear", "llama3"]
    """"linear": all frequencies divided by the factor; "llama3": only the low ones, with a smooth passage."""
    factor: Annotated[float, Field(ge=1)]
    """What low frequencies are divided by."""
    low_freq_factor: Annotated[float, Field(gt=0)] | None = None
    """llama3: waves longer than original_max_position_embeddings / this are low frequencies."""
    high_freq_factor: Annotated[float, Field(gt=0)] | None = None
    """llama3: waves shorter than original_max_position_embeddings / this keep their frequency."""
    original_max_position_embeddings: Positive | None = None
    """llama3: context length before scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama-style decoder, named with Megatron's words."""

    __pydantic_config__ = STRICT

    vocab_size: Positive
    """Rows of the embedding, exactly the tokenizer's (an imported model may have more rows than its fast tokenizer has
    tokens); train tokenizers to a multiple of 128·tensor."""
    hidden_size: Positive
    """H: width of the residual stream."""
    num_layers: Positive
    """Transformer layers of the whole model."""
    num_attention_heads: Positive
    """Query heads; divides hidden_size unless kv_channels is given."""
    num_query_groups: Positive | None = None
    """Key/value heads (grouped-query attention); absent: as many as query heads."""
    kv_channels: Positive | None = None
    """Width of one head; absent: hidden_size / num_attention_heads."""
    ffn_hidden_size: Positive
    """Width of the SwiGLU block."""
    seq_length: Positive
    """Tokens of one sample."""
    rotary_base: Annotated[float, Field(gt=0)] = 10_000.0
    """RoPE theta."""
    rope_scaling: RopeScaling | None = None
    """Changed rotary frequencies, e.g. {"type": "linear", "factor": 4}; absent: none."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which projections of the attention add a bias: "qkv" (query, key and value) or "all" (the output's too)."""
    mlp_bias: bool = False
    """Whether both projections of the SwiGLU block add a bias."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon of RMSNorm."""
    init_method_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights; output projections use it divided by sqrt(2·num_layers)."""
    tied_embeddings: bool = False
    """One matrix for input and output embedding; only with stages = 1."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenized text, as tools/preprocess_data.py writes it (Megatron's .bin/.idx)."""

    __pydantic_config__ = STRICT

    train: str
    """Path prefix of the training data: PREFIX.bin and PREFIX.idx."""
    valid: str
    """Path prefix of the validation data."""
    blend: dict[str, Annotated[float, Field(gt=0, lt=1)]] = field(default_factory=dict)
    """Further training data by path prefix, with its share of the samples, e.g. {"data/code": 0.3}; `train` has the
    rest. Small data sets are repeated within an epoch as their share asks for."""
    valid_domains: dict[str, str] = field(default_factory=dict)
    """Further validation data by name, e.g. {"code": "data/code_valid"}: evaluated whenever `valid` is, on as many
    microbatches each."""
    tokenizer: str
    """Path of the tokenizer that wrote both: a sentencepiece model, or a Hugging Face fast tokenizer (tokenizer.json or
    a folder with it); read for its vocabulary size and for printed samples."""
    cache: str | None = None
    """Folder for what is found out about token files that have no .json (their largest token id); absent: beside each
    file."""


@dataclass(frozen=True, kw_only=True)
class Noloco:
    """The outer step and the routing between replicas."""

    __pydantic_config__ = STRICT

    optimizer: str = "noloco"
    """Outer optimizer by name: "noloco" (pairs and modified Nesterov), or a baseline: "diloco" (an all-reduce of outer
    gradients every H inner steps), "allreduce" (of gradients at every inner step), "gossip" (pairs average weights) or
    "local" (replicas never exchange). "diloco" and "allreduce" wait for everybody: one lost replica ends the run. A
    setting below that the optimizer does not use may only have its default."""
    inner_steps: Positive = 50
    """H: inner steps per outer step; with "local" and "allreduce" only how often outer steps are counted and
    reported."""
    outer_lr: Annotated[float, Field(gt=0, le=1e6)] = 0.7
    """β: outer learning rate ("noloco", "diloco")."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """α: coefficient of the outer momentum δ ("noloco", "diloco")."""
    nesterov: bool = False
    """Look ahead as torch.optim.SGD(nesterov=True) does, instead of heavy-ball momentum ("noloco", "diloco")."""
    gamma: Annotated[float, Field(ge=0, le=1e6)] = 0.7
    """γ: consensus strength, the pull towards the group's mean slow weights ("noloco"). The paper gives no value."""
    gamma_at_zero_lr: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Let γ follow the inner learning rate: `gamma` where that is highest in the run, this value where it is zero, and
    linear in between. Above `gamma`, replicas are pulled together as the rate decays; 0 makes γ proportional to it.
    Absent: γ is constant ("noloco")."""
    combine: Literal["step", "after"] = "step"
    """Where the group's mean comes in ("noloco"). "step": in the step, as in the paper; replicas average outer
    gradients, and the pull of γ enters the momentum. "after": adapt, then combine; every replica takes a step of its
    own, and the weights that come out are pulled together. Stable for any α below 1 and γ below 2; γ = 1 averages."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """λ: decoupled outer weight decay, φ ← φ − β·λ·φ beside the step ("noloco", "diloco"); 0 in the paper."""
    group_size: Annotated[int, Field(ge=2, le=deepspeed_keys.LARGEST_COUNT)] = 2
    """n: replicas that average with each other in one outer step ("noloco", "gossip")."""
    pairing: Literal["random", "hypercube", "tournament"] = "random"
    """Who they are ("noloco", "gossip"). "random": drawn afresh for every outer step. "hypercube": pairs that have
    not met, not even through others, within a cycle of log2 N outer steps; N is a power of two. "tournament": pairs
    that have not met within a cycle of N − 1 outer steps. The last two are for groups of 2."""
    codec: Literal["none", "modulo", "absmax"] = "none"
    """How a replica's tensor travels. "none": fp32. "modulo": `codec_bits` per weight, read as what lies nearest to the
    receiver's own tensor ("noloco", "gossip"); spend what it saves on a smaller inner_steps. "absmax": each replica's
    outer gradient rounded to as many bits, with error feedback ("diloco"; only in the simulator)."""
    codec_bits: Annotated[int, Field(ge=2, le=8)] = 4
    """Bits per weight; two bytes per 128 weights come on top."""
    codec_range: Annotated[float, Field(ge=2, le=1000)] = 6.0
    """"modulo": half the range that a code can tell, in rms of the difference between two partners. Smaller: finer
    steps, and more weights that wrap (`wrap_rate` in metrics.jsonl)."""
    allow_unstable: bool = False
    """Run settings of the outer step outside their exact stability range; for studies of exactly that."""
    routing: Literal["random", "fixed"] = "random"
    """"random": each microbatch crosses each stage boundary to a randomly drawn replica of its site; "fixed": the
    ordinary pipeline."""
    seed: Seed = 0
    """Seed of routes and pairs."""
    inner_phase: Literal["steps", "seconds"] = "steps"
    """What ends an inner phase: "steps" (inner_steps of them) or "seconds" (inner_phase_seconds have passed, or
    inner_steps were taken), so that slow replicas take fewer inner steps and nobody waits for them; the run's step
    counts inner_steps per phase either way. Only where replicas are not coupled step by step: with routing "fixed", or
    one stage."""
    inner_phase_seconds: PositiveSeconds | None = None
    """Length of a phase where inner_phase is "seconds"."""
    heartbeat_seconds: PositiveSeconds = 5.0
    """Interval of signs of life between replicas; one that misses four is taken for dead."""
    exchange_deadline_seconds: PositiveSeconds = 60.0
    """How long an outer step waits for a partner before it goes on without ("noloco", "gossip"). Once the two have met,
    the transfer has time of its own: four times what the last one took, and given up earlier when no byte moves for a
    while. A replica that keeps its partner waiting for half of this ends its inner phase early."""
    link_timeout_seconds: PositiveSeconds = 300.0
    """How long a stage waits for a routed activation before it declares the link broken, and how long "diloco" and
    "allreduce" wait for the last replica before the run ends."""
    rendezvous_timeout_seconds: PositiveSeconds = 600.0
    """How long a rank waits at the start for the rendezvous and for all other ranks."""

    @property
    def transfer_cap_seconds(self) -> float:
        """How long the data of a partner that was met may take at most. Together with meeting it that is four fifths of
        link_timeout_seconds: the rest is left to evaluations and checkpoints, for which others wait as well."""
        return max(self.exchange_deadline_seconds, 0.8 * self.link_timeout_seconds - self.exchange_deadline_seconds)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length, evaluation and output of the run."""

    __pydantic_config__ = STRICT

    name: str
    """Output goes to DIRECTORY/NAME."""
    directory: str = "runs"
    """Parent folder of all runs."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"cuda": refuse to run where a rank finds no GPU; "cpu": leave GPUs alone; "auto": a GPU wherever there is one."""
    steps: Positive
    """Inner steps of the whole run."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of samples."""
    init_from: str | None = None
    """Folder of weights to start from, of any topology: tools/convert_from_hf.py's output, or another run's
    replica_RR/weights; absent: weights drawn from `seed`."""
    final_consensus: bool = False
    """End the run, once all its steps are taken, with rounds of averaging among random groups until the replicas are
    nearly equal; its weights are then that consensus."""
    consensus_tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Largest ‖θ_i − θ_j‖ / ‖θ_i‖ of two replicas at which they count as equal."""
    consensus_rounds: Positive = 64
    """Rounds of averaging at most."""
    log_every: Positive = 10
    """Inner steps between two rows of metrics.jsonl."""
    eval_every: NonNegative = 0
    """Inner steps between two evaluations; 0: only before the first and after the last step."""
    eval_microbatches: Positive = 8
    """Microbatches of one evaluation, the same ones every time and on every replica."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    save_every: NonNegative = 0
    """Inner steps between two checkpoints; 0: none. With any other value the run also saves where it ends or is asked
    to stop."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that each replica keeps; the newest one known complete on all replicas stays in any case, and
    so do up to 8 newer ones that other replicas may have, or be about to save."""
    save_async: bool = True
    """Write checkpoints behind training, from a copy of the state in CPU memory; false: training waits."""
    resume: str | int = "no"
    """Where to begin: "no" (a new run; an existing one is refused), "auto" (the newest checkpoint that is complete on
    all replicas and undamaged, a new run if there is none), "newest" (the newest that any replica has; the others take
    over the state of the replica nearest in number, whose folder they must be able to read), or a step or its folder's
    name (step_00000200)."""
    shrink: Literal["refuse", "drop", "merge"] = "refuse"
    """Resuming with fewer replicas (N) than have saved: "drop" the others, or "merge": replica i takes the mean over
    the replicas j ≡ i (mod N)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `deepspeed` holds the file's other top-level keys, exactly as written."""

    topology: Topology
    model: Model
    data: Data
    noloco: Noloco
    run: Run
    deepspeed: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_batch_size(self) -> int:
        """B: samples of one microbatch."""
        return checks.batch_sizes(self.deepspeed, self.topology.data)[0]

    @property
    def microbatches(self) -> int:
        """M: microbatches that one pipeline runs per inner step (DeepSpeed's gradient accumulation steps)."""
        return checks.batch_sizes(self.deepspeed, self.topology.data)[1]

    @property
    def replica_batch_size(self) -> int:
        """Samples that one replica consumes per inner step: B·M·D."""
        return self.micro_batch_size * self.microbatches * self.topology.data

    @property
    def replica_step_tokens(self) -> int:
        """Tokens that one replica consumes per inner step: B·M·D·S."""
        return self.replica_batch_size * self.model.seq_length

    @property
    def bf16(self) -> bool:
        return deepspeed_keys.object_at(self.deepspeed, "bf16").get("enabled", False) is True

    @property
    def output(self) -> Path:
        return Path(self.run.directory) / self.run.name

    def replica_folder(self, replica: int) -> Path:
        """Where one replica writes what is its own."""
        return self.output / f"replica_{replica:02d}"

    def to_json(self) -> dict[str, Any]:
        """The file that would load as this config, defaults written out."""
        blocks = {name: json.loads(json.dumps(dataclasses.asdict(getattr(self, name)))) for name in BLOCKS}
        return {**self.deepspeed, **blocks}


BLOCKS: dict[str, type] = {"topology": Topology, "model": Model, "data": Data, "noloco": Noloco, "run": Run}
ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(block) for name, block in BLOCKS.items()}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a JSON config, apply ``block.key=value`` overrides, validate and cross-check it.

    Raises ConfigError with every problem found; nothing has been started or written by then.
    """
    path = Path(path)
    try:
        raw = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant
        )
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; a config is a JSON object")
    for override in overrides:
        _override(raw, override)
    return parse(raw)


def parse(raw: dict[str, Any]) -> Config:
    """A Config from the file's JSON object. Raises ConfigError with every problem found."""
    _refuse_deep(raw)
    known = (*BLOCKS, *deepspeed_keys.TOP)
    listed = (*BLOCKS, *deepspeed_keys.supported(deepspeed_keys.TOP))
    problems = [deepspeed_keys.unknown_key(key, known, "", listed) for key in raw if key not in known]
    parts: dict[str, Any] = {"deepspeed": {key: value for key, value in raw.items() if key not in BLOCKS}}
    for name, block in BLOCKS.items():
        try:
            parts[name] = ADAPTERS[name].validate_json(json.dumps(raw.get(name, {})))
        except ValidationError as error:
            problems += _explain(name, block, error)
    problems += checks.problems(parts)
    if problems:
        raise ConfigError(_listed(problems))
    return Config(**parts)


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config's JSON as this version or an older one wrote it (`Config.to_json`), with the defaults of keys that came
    later; they are chosen so that a config without the key means what it meant before. Nothing is validated."""
    filled = dict(raw)
    for name, block in BLOCKS.items():
        filled[name] = _defaults(block) | raw.get(name, {})
    if filled["model"]["rope_scaling"] is not None:
        filled["model"]["rope_scaling"] = _defaults(RopeScaling) | filled["model"]["rope_scaling"]
    return filled


def _defaults(block: type) -> dict[str, Any]:
    values = {}
    for item in dataclasses.fields(block):
        if item.default is not dataclasses.MISSING:
            values[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            values[item.name] = item.default_factory()
    return json.loads(json.dumps(values))


def _refuse_deep(raw: Any) -> None:
    level = [raw]
    for _ in range(DEEPEST):
        containers = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for container in containers for item in container if isinstance(item, dict | list)]
        if not level:
            return
    raise ConfigError(f"the config is nested more than {DEEPEST} levels deep")


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in problems)


def _explain(name: str, block: type, error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in (name, *item["loc"]))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            inner = RopeScaling if "rope_scaling" in item["loc"][:-1] else block
            known = [f.name for f in dataclasses.fields(inner)]
            lines.append(
                deepspeed_keys.unknown_key(str(item["loc"][-1]), known, where.removesuffix(str(item["loc"][-1])))
            )
        elif item["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            lines.append(f'"{where}" is missing')
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            lines.append(f'"{where}": {message} (given: {json.dumps(item["input"])})')
    return lines


def _override(raw: dict[str, Any], override: str) -> None:
    """Apply one ``dotted.key=value``; the value is JSON where it parses as such, else a string."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set takes KEY=VALUE, e.g. noloco.inner_steps=20; got {override!r}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = text
    *parents, last = dotted.split(".")
    target = raw
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f'--set {override}: "{parent}" holds a value, not a block')
    target[last] = value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"the config names {', '.join(twice)} twice; JSON would silently keep the last")
    return seen


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
