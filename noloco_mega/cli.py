"""What can I run? `python -m noloco_mega train | check | rendezvous | sizes | hosts | inspect`."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from noloco_mega import launcher
from noloco_mega.entry import add_config_arguments, guarded, load_config, load_run, rank_of_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are printed without a traceback and end with status 2."""
    parser = argparse.ArgumentParser(prog="python -m noloco_mega", description="Train without an all-reduce.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="one rank of a training run; started by a launcher")
    add_config_arguments(train)
    train.set_defaults(command=_train)

    check = commands.add_parser("check", help="validate a config and print its topology, memory and bytes")
    add_config_arguments(check)
    check.add_argument(
        "--link-gbit-per-second",
        type=_positive,
        metavar="G",
        help="what one replica can send to the others (inside its site): also say whether that carries the run",
    )
    check.add_argument(
        "--site-link-gbit-per-second",
        type=_positive,
        metavar="G",
        help="the same between sites (default: the same speed)",
    )
    check.add_argument(
        "--rank-tflops",
        type=_positive,
        default=150.0,
        metavar="F",
        help="TFLOP/s that a rank achieves in training, to compare the links with (default: %(default)g)",
    )
    check.add_argument(
        "--live", action="store_true", help="started by a launcher as training would be: test ranks, links and disks"
    )
    check.add_argument(
        "--wait-seconds", type=_positive, default=120.0, metavar="S", help="--live: how long ranks may take to appear"
    )
    check.set_defaults(command=_check)

    rendezvous = commands.add_parser("rendezvous", help="serve the directory of addresses until interrupted")
    rendezvous.add_argument("--host", default=launcher.LOOPBACK, help="address to listen on (default: %(default)s)")
    rendezvous.add_argument("--public-host", help="the name others dial, where --host is a wildcard such as 0.0.0.0")
    rendezvous.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    rendezvous.add_argument("--address-file", type=Path, help="write HOST:PORT here once it listens")
    rendezvous.add_argument("--parent", type=int, metavar="PID", help="end when this parent process is gone")
    rendezvous.set_defaults(command=_rendezvous)

    sizes = commands.add_parser("sizes", help="print the number of replicas and of ranks per replica")
    add_config_arguments(sizes)
    sizes.set_defaults(command=_sizes)

    hosts = commands.add_parser("hosts", help="print each replica's hosts and slots of a hostfile, a line per replica")
    add_config_arguments(hosts)
    hosts.add_argument("--hostfile", type=Path, required=True, help='lines of "HOST slots=N"')
    hosts.add_argument(
        "--together", action="store_true", help="print the hosts and slots of the whole run, in one line"
    )
    hosts.set_defaults(command=_hosts)

    inspect = commands.add_parser("inspect", help="say what is in a checkpoint")
    inspect.add_argument("checkpoint", type=Path, help="a step's folder, or a run's: its newest checkpoint")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    inspect.set_defaults(command=_inspect)

    arguments = parser.parse_args(argv)
    return guarded(arguments.command, arguments)


def _positive(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return number


def _train(arguments: argparse.Namespace) -> int:
    config, launch, place = rank_of_run(arguments)
    # Only now torch and its companions: a mistake above is answered at once.
    from noloco_mega.train import train

    return train(config, launch, place)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.live:
        from noloco_mega import preflight

        preflight.run(arguments)
        return
    from noloco_mega import report

    config = load_run(arguments)
    print(report.describe(config))
    if arguments.link_gbit_per_second is not None:
        links = report.Links(
            gbit_per_second=arguments.link_gbit_per_second,
            site_gbit_per_second=arguments.site_link_gbit_per_second or arguments.link_gbit_per_second,
            rank_tflops=arguments.rank_tflops,
        )
        print(f"\n{report.judge(config, links)}")


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
        if arguments.parent:
            threading.Thread(target=_end_with_parent, args=(arguments.parent, server.close), daemon=True).start()
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # how it is meant to end
    finally:
        server.close()


def _end_with_parent(parent: int, close: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    close()


def _sizes(arguments: argparse.Namespace) -> None:
    grid = load_config(arguments).topology.grid()
    print(grid.replicas, grid.replica_size)


def _hosts(arguments: argparse.Namespace) -> None:
    from noloco_mega import hostfile

    grid = load_config(arguments).topology.grid()
    launches = (1, grid.size) if arguments.together else (grid.replicas, grid.replica_size)
    for share in hostfile.shares(hostfile.read(arguments.hostfile), *launches):
        print(hostfile.spoken(share))


def _inspect(arguments: argparse.Namespace) -> None:
    from noloco_mega.checkpoint.inspect import described

    for line in described(arguments.checkpoint, arguments.verify):
        print(line)
