"""A whole run without a cluster: its replicas in one process, from the config that would train them.

    python tools/simulate_convergence.py --config configs/demo_noloco_fixed_4x2.json --set topology.replicas=16
    python tools/simulate_convergence.py --config configs/demo_diloco_fixed_4x2.json --set run.name=NAME

Same initial weights, samples, routes, pairs and formulas as the distributed run, in fp32. Of every replica it holds 24
bytes per parameter (θ, its gradient, Adam's two moments, φ, δ) beside activations and logits. Writes into the run's
folder what a run writes, the replicas' exact deviation, and result.json (noloco_mega/lab/record.py says what is
where); run.save_every and --resume auto let it go on where it was stopped. --rule lets the spread decide how long each
inner phase is (noloco_mega/lab/inner_steps.py); the first one is noloco.inner_steps long.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from noloco_mega.data.loader import open_loader
from noloco_mega.entry import add_config_arguments, guarded, load_config
from noloco_mega.lab import inner_steps
from noloco_mega.lab.loop import simulate
from noloco_mega.lab.record import RESULT
from noloco_mega.lab.simulation import Simulation
from noloco_mega.plan import views

RULES: dict[str, Callable[[argparse.Namespace], inner_steps.Rule]] = {
    "fixed": lambda arguments: inner_steps.Fixed(),
    "published": lambda arguments: inner_steps.Published(threshold=arguments.threshold),
    "target": lambda arguments: inner_steps.Target(target=arguments.target, power=arguments.power),
}


def run(arguments: argparse.Namespace) -> None:
    config = load_config(arguments)
    loader = open_loader(config, views.initial(config.topology.replicas))
    simulation = Simulation(config, loader)
    result = simulate(simulation, lambda text: print(text, flush=True), RULES[arguments.rule](arguments))
    if result["diverged_step"] is not None:
        print(f"diverged: a gradient at step {result['diverged_step']} is not finite")
    for replica, loss in result["replicas"].items():
        print(f"replica {replica}: validation loss {loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f})")
    print(f"mean of the {simulation.replicas} replicas' weights: {result['mean_of_weights']:.4f}")
    print(f"deviation of the replicas' weights from their mean: {result['deviation']:.4f}")
    print(f"sent by each replica: {result['sent_bytes_per_replica'] / 1e6:.1f} MB; figures in {config.output / RESULT}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--rule", choices=sorted(RULES), default="fixed", help="default: %(default)s")
    parser.add_argument("--target", type=float, default=0.05, help="relative spread that the target rule keeps")
    parser.add_argument("--power", type=float, default=2.0, help="p of the target rule (default: %(default)s)")
    parser.add_argument(
        "--threshold", type=float, default=0.01, help="growth per inner step that the published rule calls too fast"
    )
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
