"""What can I run? `python -m noloco_mega train | rendezvous | sizes | inspect`."""

from __future__ import annotations

import argparse
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from noloco_mega import launcher
from noloco_mega.entry import add_config_arguments, guarded, load_config, rank_of_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are printed without a traceback and end with status 2."""
    parser = argparse.ArgumentParser(prog="python -m noloco_mega", description="Train without an all-reduce.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="one rank of a training run; started by a launcher")
    add_config_arguments(train)
    train.set_defaults(command=_train)

    rendezvous = commands.add_parser("rendezvous", help="serve the directory of addresses until interrupted")
    rendezvous.add_argument("--host", default=launcher.LOOPBACK, help="address to listen on (default: %(default)s)")
    rendezvous.add_argument("--public-host", help="the name others dial, where --host is a wildcard such as 0.0.0.0")
    rendezvous.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    rendezvous.add_argument("--address-file", type=Path, help="write HOST:PORT here once it listens")
    rendezvous.set_defaults(command=_rendezvous)

    sizes = commands.add_parser("sizes", help="print the number of replicas and of ranks per replica")
    add_config_arguments(sizes)
    sizes.set_defaults(command=_sizes)

    inspect = commands.add_parser("inspect", help="say what is in a checkpoint")
    inspect.add_argument("checkpoint", type=Path, help="a step's folder, or a run's: its newest checkpoint")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    inspect.set_defaults(command=_inspect)

    arguments = parser.parse_args(argv)
    return guarded(arguments.command, arguments)


def _train(arguments: argparse.Namespace) -> None:
    config, launch, place = rank_of_run(arguments)
    # Only now torch and its companions: a mistake above is answered at once.
    from noloco_mega.train import train

    train(config, launch, place)


def _rendezvous(arguments: argparse.Namespace) -> None:
    from noloco_mega.comm.rendezvous import RendezvousServer

    # Every rank keeps a connection open: more than the usual 1024 in a large run.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = RendezvousServer(launcher.secret(), arguments.host, arguments.port, public_host=arguments.public_host)
    try:
        address = "{}:{}".format(*server.address)
        if arguments.address_file:
            draft = arguments.address_file.with_name(arguments.address_file.name + ".draft")
            draft.write_text(address)
            draft.rename(arguments.address_file)
        else:
            print(f"rendezvous at {address}, secret from {launcher.secret_source()}", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # how it is meant to end
    finally:
        server.close()


def _sizes(arguments: argparse.Namespace) -> None:
    grid = load_config(arguments).topology.grid()
    print(grid.replicas, grid.replica_size)


def _inspect(arguments: argparse.Namespace) -> None:
    from noloco_mega.checkpoint.inspect import described

    for line in described(arguments.checkpoint, arguments.verify):
        print(line)
