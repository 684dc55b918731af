"""The training loop: inner steps along random routes, and every H of them an outer step among a few replicas.

    torchrun | deepspeed | srun | mpirun ...  -m noloco_mega.train --config FILE [--set KEY=VALUE ...]

Between replicas there is no collective here, nor anywhere below, but for the baselines that are one (DiLoCo and
all-reduce, comm/collective.py): activations and gradients go from stage to stage, outer state from twin to twin, and
addresses through the rendezvous.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import torch

from noloco_mega import start
from noloco_mega.bootstrap import Connection
from noloco_mega.checkpoint.keeper import Keeper
from noloco_mega.checkpoint.weights import save_weights
from noloco_mega.comm.control import NEVER
from noloco_mega.comm.links import LinkBroken
from noloco_mega.config import Config
from noloco_mega.data.loader import open_loader
from noloco_mega.engine import deepspeed as engines
from noloco_mega.engine.weights import fingerprint
from noloco_mega.entry import TRY_AGAIN, add_config_arguments, guarded, rank_of_run
from noloco_mega.grid import Place
from noloco_mega.journal import Journal
from noloco_mega.launcher import Launch
from noloco_mega.model import parameters
from noloco_mega.model.stage import build_stage
from noloco_mega.outer import consensus
from noloco_mega.outer.hook import attach
from noloco_mega.pipeline import Pipeline
from noloco_mega.plan import views
from noloco_mega.plan.lag import STAY

SAME_REQUEST_SECONDS = 3.0


def train(config: Config, launch: Launch, place: Place) -> int:
    """One rank of a run, from its launch to its replica's saved weights. Its exit status: 0, or TRY_AGAIN where this
    replica has left a run that goes on."""
    run = Connection(config, launch, place)
    with run.reporting(), contextlib.ExitStack() as stack:
        return _train(config, launch, place, run, stack)


def _train(config: Config, launch: Launch, place: Place, run: Connection, stack: contextlib.ExitStack) -> int:
    view_log = views.initial(config.topology.replicas)
    loader = open_loader(config, view_log)
    journal = Journal(config, place)
    journal.look(joins=run.gathering.under_way())  # before a queue is waited for
    run.join()
    journal.look(joins=run.gathering.joins)
    keeper = Keeper(config, place, run, loader, journal, view_log)

    model = build_stage(config.model, config.topology, run.world, torch.bfloat16 if config.bf16 else torch.float32)
    start.initial_weights(model, run.world, config, resumed=keeper.resumed)
    peers = run.meet(fingerprint(model), loader.digest(), view_log)
    steering = run.steering
    # Until here a signal simply ends the process.
    requests = stack.enter_context(stop_requests(launch.sigterm_leaves))
    engine = engines.build_engine(model, config, run.world)
    outer = attach(engine, config, peers)  # engine.step now ends with an outer step, every H inner steps
    pipeline = Pipeline(engine.module, config, run.world, loader)
    evaluate = functools.partial(pipeline.evaluate, steering.local)

    step, last_step, leaves = keeper.begin(engine, outer, peers), config.run.steps, False
    how = "joins" if run.gathering.joins else "connected,"
    journal.tell(f"{how} {len(run.gathering.members)} replicas of {run.world.grid.replica_size} ranks in the run")
    if not keeper.resumed:
        journal.evaluate(evaluate, peers)
        journal.started()
    while step < last_step:
        if steering.suspected:
            step = keeper.heal()
        # Inner step: M microbatches of every replica, each along its own route, then one step of AdamW.
        lr = engines.set_learning_rate(engine, step)
        engines.begin(engine)
        try:
            steering.enter(step)
            circuit, routed, taken = steering.circuit, steering.routed, step
            loss, links_good = pipeline.forward_backward(step, circuit), True
        except LinkBroken as broken:
            loss, links_good = None, False
            steering.broke()
            journal.warn(f"inner step {step}: {broken}")
        agreed = steering.agree(step, links_good, bool(requests.to_stop), bool(requests.to_leave))
        if not agreed.links_good:
            # Nobody applies the gradients of a step that one rank could not finish; the replica redoes it along
            # identity routes, which need no other replica.
            engines.drop_gradients(engine)
            journal.redo()
            steering.leave_circuit()
            continue
        if agreed.hurry_to != STAY:
            step = outer.hurry(agreed.hurry_to)  # others wait already: this inner step is the phase's last
        # Outer step, every H inner steps: a few replicas swap one tensor and move together, inside this call.
        grad_norm = engines.apply(engine, run.world)
        step += 1
        if outer.optimizer.due(step):
            keeper.donate()
        if not math.isfinite(grad_norm):
            steering.bad_step(taken, pipeline.bad_routes(taken, circuit, loss))

        if not agreed.nobody_asked and agreed.stop_step == NEVER:
            journal.tell(f"asked to stop, after step {step}; the weights will be saved")
            steering.propose_stop(step)
        if agreed.stop_step <= step and steering.confirm_stop(step):
            last_step = step
        leaves = agreed.leaves and agreed.stop_step == NEVER and step < last_step
        if leaves:
            steering.leave()
        elif step == last_step or (config.run.eval_every and step % config.run.eval_every == 0):
            journal.evaluate(evaluate, peers)
        last = leaves or step == last_step
        journal.stepped(step, lr, grad_norm, loss, outer, peers, routed, last=last)
        if last or keeper.due(step):
            keeper.save(step)
        if leaves:
            break

    weights = journal.replica_folder / "weights"
    if not leaves:
        ended = consensus.finish(config, engine, peers, step, journal.tell)
        slices = parameters.parameter_slices(engine.module, run.world)
        facts = {"step": step, **keeper.facts, **ended}
        try:
            save_weights(weights, dict(engine.module.named_parameters()), slices, run.world, facts)
        except OSError:
            keeper.close()  # the last checkpoint is still being written, and is all that is left of the end of the run
            raise
    keeper.close()
    journal.close()
    how = "leaves the run, which goes on," if leaves else "done"
    journal.tell(f"{how} after step {step} of {config.run.steps}" + ("" if leaves else f", weights in {weights}"))
    steering.close()
    peers.close()
    run.close()
    return TRY_AGAIN if leaves else 0


@dataclass
class Requests:
    """What signals have asked of this process."""

    to_stop: list[float] = field(default_factory=list)
    """When (monotonic seconds) SIGINT, or SIGTERM, asked it to end the run."""
    to_leave: bool = False
    """Whether SIGUSR1, or SIGTERM, asked it to end its own replica, while the others go on."""


@contextlib.contextmanager
def stop_requests(sigterm_leaves: bool) -> Iterator[Requests]:
    """Signals are noted, and taken up between two steps; one more that asks for a stop, later on, ends the process."""
    requests = Requests()

    def stop(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # One Ctrl-C reaches a rank twice, from the terminal and from its launcher.
        if requests.to_stop and now - requests.to_stop[0] > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        requests.to_stop.append(now)

    def leave(number: int, frame: FrameType | None) -> None:
        requests.to_leave = True

    handlers = {signal.SIGINT: stop, signal.SIGTERM: leave if sigterm_leaves else stop, signal.SIGUSR1: leave}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m noloco_mega.train", description="One rank of a training run.")
    add_config_arguments(parser)
    return guarded(lambda arguments: train(*rank_of_run(arguments)), parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
