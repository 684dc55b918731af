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
from noloco_mega.entry import add_config_arguments, guarded, rank_of_run
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


def train(config: Config, launch: Launch, place: Place) -> None:
    """One rank of a run, from its launch to its replica's saved weights."""
    run = Connection(config, launch, place)
    with run.reporting(), contextlib.ExitStack() as stack:
        _train(config, place, run, stack)


def _train(config: Config, place: Place, run: Connection, stack: contextlib.ExitStack) -> None:
    view_log = views.initial(config.topology.replicas)
    loader = open_loader(config, view_log)
    journal = Journal(config, place, joins=run.under_way())
    run.join()
    keeper = Keeper(config, place, run, loader, journal, view_log)

    model = build_stage(config.model, config.topology, run.world, torch.bfloat16 if config.bf16 else torch.float32)
    start.initial_weights(model, run.world, config, resumed=keeper.resumed)
    peers = run.meet(fingerprint(model), loader.digest(), view_log)
    steering = run.steering
    requests = stack.enter_context(stop_requests())  # until here a signal simply ends the process
    engine = engines.build_engine(model, config, run.world)
    outer = attach(engine, config, peers)  # engine.step now ends with an outer step, every H inner steps
    pipeline = Pipeline(engine.module, config, run.world, loader)
    evaluate = functools.partial(pipeline.evaluate, steering.local)

    step, last_step = keeper.begin(engine, outer, peers), config.run.steps
    journal.tell(f"connected, {len(run.members)} replicas of {run.world.grid.replica_size} ranks in the run")
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
        agreed = steering.agree(step, links_good, bool(requests))
        if not agreed.links_good:
            # Nobody applies the gradients of a step that one rank could not finish; the replica redoes it along
            # identity routes, which need no other replica.
            engines.drop_gradients(engine)
            journal.redo()
            steering.leave_circuit()
            continue
        if agreed.join_outer_step != STAY:
            step = outer.hurry(agreed.join_outer_step)  # others wait already: this inner step is the phase's last
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
        if step == last_step or (config.run.eval_every and step % config.run.eval_every == 0):
            journal.evaluate(evaluate, peers)
        journal.stepped(step, lr, grad_norm, loss, outer, peers, routed, last=step == last_step)
        if step == last_step or keeper.due(step):
            keeper.save(step)

    ended = consensus.finish(config, engine, peers, step, journal.tell)
    save_weights(
        journal.replica_folder / "weights",
        dict(engine.module.named_parameters()),
        parameters.parameter_slices(engine.module, run.world),
        run.world,
        {"step": step, **keeper.facts, **ended},
    )
    keeper.close()
    journal.close()
    journal.tell(f"done after step {step} of {config.run.steps}, weights in {journal.replica_folder / 'weights'}")
    steering.close()
    peers.close()
    run.close()


@contextlib.contextmanager
def stop_requests() -> Iterator[list[float]]:
    """When (monotonic seconds) SIGINT or SIGTERM asked this process to stop; one more, later on, ends it at once."""
    requests: list[float] = []

    def request(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # One Ctrl-C reaches a rank twice, from the terminal and from its launcher.
        if requests and now - requests[0] > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        requests.append(now)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
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
