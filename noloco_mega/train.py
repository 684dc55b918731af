"""The training loop: inner steps along random routes, and every H of them an outer step among a few replicas.

    torchrun | deepspeed | srun | mpirun ...  -m noloco_mega.train --config FILE [--set KEY=VALUE ...]

Between replicas there is no collective here, nor anywhere below: activations and gradients go from stage to stage,
outer state from twin to twin, and addresses through the rendezvous.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from noloco_mega import checkpoint
from noloco_mega.bootstrap import Connection
from noloco_mega.comm.links import LinkBroken
from noloco_mega.config import Config
from noloco_mega.data.loader import open_loader
from noloco_mega.engine import deepspeed as engines
from noloco_mega.entry import add_config_arguments, guarded, rank_of_run
from noloco_mega.grid import Place
from noloco_mega.journal import Journal
from noloco_mega.launcher import Launch
from noloco_mega.model import parameters
from noloco_mega.model.stage import build_stage
from noloco_mega.outer.hook import attach
from noloco_mega.pipeline import Pipeline
from noloco_mega.plan import views


def train(config: Config, launch: Launch, place: Place) -> None:
    """One rank of a run, from its launch to its replica's saved weights."""
    view_log = views.initial(config.topology.replicas)
    loader = open_loader(config, view_log)
    journal = Journal(config, place)
    run = Connection(config, launch, place)

    model = build_stage(config.model, config.topology, run.world, torch.bfloat16 if config.bf16 else torch.float32)
    parameters.initialise(model, run.world, config.run.seed, config.model.init_method_std)
    peers = run.meet(parameters.fingerprint(model), loader.digest(), view_log)
    engine = engines.build_engine(model, config, run.world)
    outer = attach(engine, config, peers)  # engine.step now ends with an outer step, every H inner steps
    pipeline = Pipeline(engine.module, config, run.world, loader)
    evaluate = functools.partial(pipeline.evaluate, run.local)

    with stop_requests() as requests:
        journal.begin()
        journal.evaluate(evaluate, peers)
        journal.started()
        step, last_step = 0, config.run.steps
        while step < last_step:
            # Inner step: M microbatches of every replica, each along its own route, then one step of AdamW.
            lr = engines.set_learning_rate(engine, step)
            engines.begin(engine)
            try:
                loss, links_good = pipeline.forward_backward(step, run.circuit), True
            except LinkBroken as broken:
                loss, links_good = None, False
                journal.warn(f"inner step {step}: {broken}")
            all_good, nobody_asked, stop_step = peers.agree(links_good, not requests, run.stop_step(step))
            if not all_good:
                # Nobody applies the gradients of a step that one rank could not finish; the replica redoes it along
                # identity routes, which need no other replica.
                engines.drop_gradients(engine)
                run.leave_routes()
                continue
            # Outer step, every H inner steps: a few replicas swap one tensor and move together, inside this call.
            grad_norm = engines.apply(engine, run.world)
            step += 1

            if not nobody_asked:
                run.propose_stop(step)
            if stop_step <= step and peers.agree(run.confirm_stop(step))[0]:
                last_step = step
            if step == last_step or (config.run.eval_every and step % config.run.eval_every == 0):
                journal.evaluate(evaluate, peers)
            journal.stepped(step, lr, grad_norm, loss, outer, peers, last=step == last_step)

        checkpoint.save_weights(
            journal.replica_folder / "weights",
            dict(engine.module.named_parameters()),
            parameters.parameter_slices(engine.module, run.world),
            run.world,
            {"step": step, "replica": place.replica, "config": config.to_json()},
        )
    journal.close()
    peers.exchange.close()
    run.close()


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The signals (SIGINT, SIGTERM) that have asked this process to stop, as they come in; a second one ends it."""
    requests: list[int] = []

    def request(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        for asked in before:
            signal.signal(asked, signal.SIG_DFL)

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
