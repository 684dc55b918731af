"""Which tensors and numbers of a rank make its run go on exactly?

They are collected from the engine, the outer optimizer and the journal, and put back into them: from a checkpoint, or
from a live twin (see donation.py).

Kinds of flat tensors, each of the shape [P] of a master and all of one layout:

    master                 the fp32 weights; the model's own (bf16) ones follow from them
    exp_avg, exp_avg_sq    the inner optimizer's state: whatever it keeps per element, under its own names
    outer.phi, outer.delta the outer optimizer's state: whatever its `state_dict` holds per element

Tensors of no layout are good for a rank of the same slices only, and for a checkpoint: "rng", torch's random
generators, and outer.* of other lengths, what the outer optimizer knows of blocks of weights. Any other rank begins
without them.

Numbers: the inner optimizer's step, counters of the engine and of the outer optimizer's hook, the losses that wait for
the journal's next row.

A rank whose slices are those of the one that saved reads its file back as it is: once, straight into the live tensors,
summing it on the way. Any other topology verifies its share of the files, then puts each master together from the rows
that it needs, one parameter at a time; padding stays zero. Random generators are then left as they are: the states of
T·S·D ranks say nothing about other ones, and training draws nothing from them (there is no dropout; the weights at step
0, routes, pairs and samples are functions of seeds and places).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from noloco_mega.checkpoint.format import CheckpointError, RankContent, Span, Stored, described
from noloco_mega.checkpoint.joiner import Donated, RankShape
from noloco_mega.checkpoint.reader import Part, SavedReplica, verify_share
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.engine.weights import Masters
from noloco_mega.model.parameters import ParameterSlices, parameter_slices
from noloco_mega.outer.hook import Hook

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""What a DeepSpeed engine counts."""

Flat = dict[str, list[torch.Tensor]]
"""Kind -> one live flat tensor per master."""


class RankState:
    """The state of one rank: live tensors and where they sit in the model."""

    def __init__(self, engine: DeepSpeedEngine, outer: Hook, world: ReplicaWorld) -> None:
        self._engine, self._outer, self._world = engine, outer, world
        self._masters = Masters(engine)
        self._slices: dict[str, ParameterSlices] = parameter_slices(engine.module, world)
        self._layouts: dict[str, list[Span]] = {str(index): [] for index in range(len(self._masters.tensors))}
        self._local_names: dict[str, str] = {}
        for segment in self._masters.segments():
            where = self._slices[segment.parameter]
            self._local_names[where.name] = segment.parameter
            span = Span(where.name, segment.master_offset, segment.parameter_offset, segment.numel)
            self._layouts[str(segment.master)].append(span)

    def finite(self) -> bool:
        """Whether all of this rank's weights are."""
        norms = [torch.linalg.vector_norm(master.detach(), dtype=torch.float64) for master in self._masters.tensors]
        norms += [torch.linalg.vector_norm(p.detach(), dtype=torch.float32) for p in self._engine.module.parameters()]
        return all(math.isfinite(norm) for norm in norms)

    def collect(self, losses: Sequence[tuple[float, int]]) -> RankContent:
        """Everything to write. The tensors are the live ones, on their device: copy them before training goes on.

        `losses` are the (total, microbatches) that the journal has not logged yet.
        """
        flat, blocks, outer_numbers = self._flat()
        stored = [
            Stored(key=f"{kind}.{index}", kind=kind, tensor=tensor.detach(), layout=str(index))
            for kind, tensors in flat.items()
            for index, tensor in enumerate(tensors)
        ]
        for kind, tensors in blocks.items():
            for index, tensor in enumerate(tensors):
                stored.append(Stored(key=f"{kind}.{index}", kind=kind, tensor=tensor.detach(), layout=None))
        for name, state in self._world.device.generator_states().items():
            stored.append(Stored(key=f"rng.{name}", kind="rng", tensor=state, layout=None))
        numbers = {
            "inner": self._inner_numbers(),
            "engine": {name: getattr(self._engine, name) for name in COUNTERS},
            "hook": {**self._outer.state_dict(), "optimizer": outer_numbers},
            "losses": [list(loss) for loss in losses],
        }
        return RankContent(tensors=stored, layouts=self._layouts, slices=self._named_slices(), numbers=numbers)

    @torch.no_grad()
    def restore(self, sources: Sequence[SavedReplica]) -> list[tuple[float, int]]:
        """Read what `sources` hold into the live state; with several of them the mean of every tensor.

        Verifies this rank's share of the files as it goes. The model's own weights follow with `publish`, once all
        ranks have succeeded; until then another restore may replace this one. Returns the losses for the journal.
        Raises CheckpointError naming a damaged file; the live state is then a mixture, and good for another restore
        only.
        """
        part = self._same_slices(sources)
        kinds = sources[0].kinds
        numbers = (part or sources[0].parts[0])["numbers"]
        self._forget(kinds, numbers)
        targets = self._targets(kinds)
        blocks: Flat = {}
        if part is not None:
            blocks = self._load(sources[0], part, targets)
        else:
            grid = self._world.grid
            verify_share(sources, grid.replica_rank(self._world.place), grid.replica_size)
            for source in sources:
                source.take_as_verified()  # what others find wrong keeps this state from being used
            for kind, tensors in targets.items():
                for index, target in enumerate(tensors):
                    self._assemble(kind, index, target, sources)
        self._finish(numbers, targets | blocks)
        return self._spread_losses(sources[0]) if part is None else [(t, count) for t, count in numbers["losses"]]

    def publish(self) -> None:
        """Make the model's weights follow what was restored. Collective over the replica."""
        self._masters.publish()

    def shape(self) -> RankShape:
        """What a state must be like for this rank to adopt it."""
        flat, _, _ = self._flat()
        return RankShape(
            **self._slices_described(),
            elements={str(index): master.numel() for index, master in enumerate(self._masters.tensors)},
            kinds=frozenset(kind for kind in flat if kind == "master" or kind.startswith("outer.")),
        )

    def misfit(self, donated: Donated) -> str | None:
        """Why a live twin's state is not for this rank; None if it is."""
        return self.shape().misfit(donated.slices, donated.entries) or self._numbers_misfit(donated.numbers)

    @torch.no_grad()
    def adopt(self, donated: Donated) -> None:
        """Take over a live twin's state: masters, the inner and the outer optimizer's state, counters. Losses that wait
        for the journal and random generators stay this rank's own. Collective over the replica.

        Raises CheckpointError naming what differs if it is not for this rank; nothing has been changed then.
        """
        if (reason := self.misfit(donated)) is not None:
            raise CheckpointError(f"the state of replica {donated.replica} is not for this rank: {reason}")
        kinds = list(dict.fromkeys(entry["kind"] for entry in donated.entries))
        self._forget(kinds, donated.numbers)
        targets = self._targets(kinds)
        for kind, tensors in targets.items():
            for index, target in enumerate(tensors):
                target.copy_(donated.tensors[f"{kind}.{index}"])
        self._finish(donated.numbers, targets)
        self.publish()

    def _forget(self, kinds: Sequence[str], numbers: Mapping[str, Any]) -> None:
        """Drop what the inner optimizer keeps and the state to come does not."""
        for state, coming in zip(self._live_inner_states(), numbers["inner"], strict=True):
            for key in state.keys() - set(kinds) - coming.keys():
                del state[key]

    def _finish(self, numbers: Mapping[str, Any], targets: Flat) -> None:
        """What follows the flat tensors: numbers, and that the outer optimizer takes its own."""
        self._set_inner_numbers(numbers["inner"])
        hook = numbers["hook"]
        outer = {kind.removeprefix("outer."): flat for kind, flat in targets.items() if kind.startswith("outer.")}
        self._outer.load_state_dict({**hook, "optimizer": {**hook["optimizer"], **outer}})
        for name in COUNTERS:
            setattr(self._engine, name, numbers["engine"][name])

    def _numbers_misfit(self, numbers: Mapping[str, Any]) -> str | None:
        """Why numbers can't be a rank's like this one; None if they can."""
        try:
            counts = [numbers["engine"][name] for name in COUNTERS]
            counts += [numbers["hook"][name] for name in ("step", "outer_step")]
            if not all(type(count) is int and count >= 0 for count in counts):
                return f"its counters are {counts}"
            if numbers["hook"]["optimizer"].keys() != self._flat()[2].keys():
                return f"its outer optimizer keeps {sorted(numbers['hook']['optimizer'])} beside tensors"
            if len(numbers["inner"]) != len(self._masters.tensors):
                return f"its inner optimizer steps {len(numbers['inner'])} masters"
            for number in (number for master in numbers["inner"] for number in master.values()):
                value, dtype = number["value"], number["tensor"]
                known = dtype is None or isinstance(getattr(torch, dtype, None), torch.dtype)
                if not known or not isinstance(value, int | float):
                    return f"its inner optimizer keeps {str(number)[:100]}"
        except (KeyError, TypeError, AttributeError) as error:
            return f"its numbers are malformed: {error!r}"
        return None

    def _flat(self) -> tuple[Flat, Flat, dict[str, Any]]:
        """All flat tensors by kind; those of other lengths that the outer optimizer's state holds; and its numbers."""
        flat: Flat = {"master": list(self._masters.tensors)}
        states = self._inner_states()
        for key in states[0]:
            if _per_element(states[0][key], self._masters.tensors[0]):
                flat[key] = [state[key] for state in states]
        blocks: Flat = {}
        numbers = {}
        for key, value in self._outer.state_dict()["optimizer"].items():
            if not (isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)):
                numbers[key] = value
            elif all(map(_per_element, value, self._masters.tensors)):
                flat[f"outer.{key}"] = value
            else:
                blocks[f"outer.{key}"] = value
        return flat, blocks, numbers

    def _inner_states(self) -> list[dict[str, Any]]:
        """The inner optimizer's state of each master; empty before its first step."""
        state = self._engine.basic_optimizer.state
        return [state.get(master, {}) for master in self._masters.tensors]

    def _inner_numbers(self) -> list[dict[str, Any]]:
        """What the inner optimizer keeps per master beside flat tensors: its step, a number or a tensor of one."""
        found = []
        for master, state in zip(self._masters.tensors, self._inner_states(), strict=True):
            numbers = {}
            for key, value in state.items():
                if not _per_element(value, master):
                    tensor = isinstance(value, torch.Tensor)
                    dtype = str(value.dtype).removeprefix("torch.") if tensor else None
                    numbers[key] = {"value": value.item() if tensor else value, "tensor": dtype}
            found.append(numbers)
        return found

    def _set_inner_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        for state, saved in zip(self._live_inner_states(), numbers, strict=True):
            for key, number in saved.items():
                dtype = number["tensor"]
                state[key] = torch.tensor(number["value"], dtype=getattr(torch, dtype)) if dtype else number["value"]

    def _live_inner_states(self) -> list[dict[str, Any]]:
        return [self._engine.basic_optimizer.state[master] for master in self._masters.tensors]

    def _targets(self, kinds: Sequence[str]) -> Flat:
        """Where each kind goes: the live tensors; new ones where the inner or outer optimizer has none yet."""
        masters = self._masters.tensors
        targets: Flat = {}
        for kind in kinds:
            if kind == "master":
                targets[kind] = [master.detach() for master in masters]
            elif kind.startswith("outer."):
                live = self._outer.state_dict()["optimizer"].get(kind.removeprefix("outer."))
                fits = isinstance(live, list) and all(map(_per_element, live, masters))
                targets[kind] = live if fits else [torch.zeros_like(master) for master in masters]
            else:
                for state, master in zip(self._live_inner_states(), masters, strict=True):
                    if kind not in state:
                        state[kind] = torch.zeros_like(master)
                targets[kind] = [state[kind] for state in self._live_inner_states()]
        return targets

    def _same_slices(self, sources: Sequence[SavedReplica]) -> Part | None:
        """The part that a rank like this one has saved, if there is exactly one source and it was cut the same way."""
        rank = self._world.grid.replica_rank(self._world.place)
        if len(sources) > 1 or len(sources[0].parts) != self._world.grid.replica_size:
            return None
        part = sources[0].parts[rank]
        own = self._slices_described()
        sizes = {(str(index), master.numel()) for index, master in enumerate(self._masters.tensors)}
        saved = {(t["layout"], t["numel"]) for t in part["tensors"] if t["kind"] == "master"}
        same = own == {key: part[key] for key in own} and sizes == saved
        return part if same else None

    def _slices_described(self) -> dict[str, Any]:
        """This rank's layouts and parameters, as `format.described` gives them."""
        return described(RankContent(tensors=(), layouts=self._layouts, slices=self._named_slices(), numbers={}))

    def _named_slices(self) -> list[ParameterSlices]:
        return [self._slices[local] for local in self._local_names.values()]

    def _load(self, source: SavedReplica, part: Part, targets: Flat) -> Flat:
        """Everything in this rank's own file, by way of host memory where the state is on a GPU. What the outer
        optimizer knows of blocks is returned, in the order of the masters."""
        device = self._world.device
        hosts, copies = {}, []
        blocks: Flat = {}
        for stored in part["tensors"]:
            if stored["layout"] is None:
                host = hosts[stored["key"]] = torch.empty(stored["numel"], dtype=getattr(torch, stored["dtype"]))
                if stored["kind"] != "rng":
                    blocks.setdefault(stored["kind"], []).append(host)
                continue
            target = targets[stored["kind"]][int(stored["layout"])]
            hosts[stored["key"]] = target if target.device.type == "cpu" else device.host_tensor(target)
            copies.append((target, hosts[stored["key"]]))
        source.load(part, hosts)
        for target, host in copies:
            if target is not host:
                target.copy_(host)
        device.set_generator_states(
            {key.removeprefix("rng."): host for key, host in hosts.items() if key.startswith("rng.")}
        )
        return blocks

    def _assemble(self, kind: str, index: int, target: torch.Tensor, sources: Sequence[SavedReplica]) -> None:
        """One flat tensor from the boxes of its parameters."""
        target.zero_()
        for span in self._layouts[str(index)]:
            first, stop = span.parameter_offset, span.parameter_offset + span.numel
            values = self._local(kind, self._local_names[span.parameter], first, stop, sources)
            target[span.tensor_offset : span.tensor_offset + span.numel].copy_(values)

    def _local(
        self, kind: str, local_name: str, first: int, stop: int, sources: Sequence[SavedReplica]
    ) -> torch.Tensor:
        """`kind` of the elements [first, stop) of a flattened local parameter: the mean over the sources.

        Only the rows (along dim 0) that hold these elements are asked for.
        """
        where = self._slices[local_name]
        shape = [max(piece.local[dim][1] for piece in where.pieces) for dim in range(len(where.shape))]
        row = math.prod(shape[1:])
        top, bottom = first // row, -(-stop // row)
        local = torch.empty([bottom - top, *shape[1:]])
        for piece in where.pieces:
            (begin, end), *others = piece.local
            start, end = max(begin, top), min(end, bottom)
            if start >= end:
                continue
            offset = piece.whole[0][0] - begin
            box = ((start + offset, end + offset), *piece.whole[1:])
            mean, *more = (source.box(where.name, kind, box) for source in sources)
            for each in more:
                mean += each
            local[(slice(start - top, end - top), *(slice(*extent) for extent in others))] = (
                mean / len(sources) if more else mean
            )
        return local.flatten()[first - top * row : stop - top * row]

    def _spread_losses(self, source: SavedReplica) -> list[tuple[float, int]]:
        """The replica's losses of another topology. Each tensor rank of the last stage holds them all: of T equal
        summands a mean is the same as of one, whatever T was."""
        place, grid = self._world.place, self._world.grid
        if place.stage != grid.stages - 1 or place.data != 0:
            return []
        tensor = source.manifest["config"]["topology"]["tensor"]
        losses = [loss for part in source.parts for loss in part["numbers"]["losses"]]
        total, count = sum(loss[0] for loss in losses), sum(loss[1] for loss in losses)
        return [(total / tensor, count // tensor)] if count else []


def _per_element(value: Any, master: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state is flat as the master is."""
    return isinstance(value, torch.Tensor) and value.shape == master.shape and value.is_floating_point()
