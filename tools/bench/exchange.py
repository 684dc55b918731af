"""How fast is our pair exchange, beside bare sockets and ZeroMQ? One run, two processes, loopback, taking turns.

    python -m tools.bench.exchange [--megabytes 100] [--rounds 9]

Prints the median over rounds of each way's GB/s per direction (both directions at once; the slower side counts) and its
ratio to bare sockets. Ours connects and authenticates anew in every round and verifies a checksum; the others don't.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from noloco_mega.comm.channel import Listener
from noloco_mega.comm.exchange import Exchange, Received

SECRET = b"a secret for a measurement on loopback"
DEADLINE_SECONDS = 120.0

Swap = Callable[[torch.Tensor, torch.Tensor], None]


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def trade(pipe: Connection, mine: object) -> object:
    """Give the other process a value and take its own: also a barrier."""
    pipe.send(mine)
    return pipe.recv()


def ours(rank: int, pipe: Connection) -> Swap:
    listener = Listener(SECRET)
    exchange = Exchange(replica=rank, rank=0, listener=listener, secret=SECRET, run_id="bench", fingerprint="bench")
    address = trade(pipe, listener.address)
    step = 0

    def swap(send: torch.Tensor, receive: torch.Tensor) -> None:
        nonlocal step
        step += 1
        buffers, limits = {1 - rank: [receive]}, (DEADLINE_SECONDS, DEADLINE_SECONDS)
        pending = exchange.launch(step, [send], buffers, {1 - rank: address}, *limits)  # type: ignore[dict-item]
        outcome = pending.wait()[1 - rank]
        assert isinstance(outcome, Received), outcome

    return swap


def bare(rank: int, pipe: Connection) -> Swap:
    """One connection for all rounds, a sender thread, and nothing else."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            trade(pipe, server.getsockname())
            connection, _ = server.accept()
    else:
        connection = socket.create_connection(trade(pipe, None))  # type: ignore[arg-type]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def swap(send: torch.Tensor, receive: torch.Tensor) -> None:
        sender = threading.Thread(target=connection.sendall, args=(view(send),))
        sender.start()
        rest = view(receive)
        while rest:
            rest = rest[connection.recv_into(rest) :]
        sender.join()

    return swap


def zeromq(rank: int, pipe: Connection) -> Swap:
    """A PAIR socket for all rounds; one copy on receiving, which its interface asks for."""
    import zmq

    pair = zmq.Context().socket(zmq.PAIR)
    if rank == 0:
        trade(pipe, pair.bind_to_random_port("tcp://127.0.0.1"))
    else:
        pair.connect(f"tcp://127.0.0.1:{trade(pipe, None)}")

    def swap(send: torch.Tensor, receive: torch.Tensor) -> None:
        tracker = pair.send(view(send), copy=False, track=True)
        view(receive)[:] = pair.recv(copy=False).buffer
        tracker.wait()

    return swap


def measure(rank: int, pipe: Connection, names: list[str], megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per round of each way, at the slower of the two sides."""
    torch.set_num_threads(1)
    swaps = {name: WAYS[name](rank, pipe) for name in names}
    send = torch.full((megabytes * 250_000,), float(rank))
    receive = torch.empty_like(send)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, swap in swaps.items():
            receive.zero_()
            trade(pipe, None)
            started = time.perf_counter()
            swap(send, receive)
            mine = time.perf_counter() - started
            slower = max(mine, trade(pipe, mine))  # type: ignore[call-overload]
            assert bool((receive == 1 - rank).all()), f"{name} delivered something else"
            if number > 0:  # the first round warms up
                seconds[name].append(slower)
    return seconds


WAYS = {"bare sockets": bare, "noloco_mega": ours, "pyzmq": zeromq}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    names = list(WAYS)
    if importlib.util.find_spec("zmq") is None:
        names.remove("pyzmq")
        print("pyzmq is not installed: left out")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=measure, args=(1, there, names, arguments.megabytes, arguments.rounds), daemon=True)
    other.start()
    seconds = measure(0, here, names, arguments.megabytes, arguments.rounds)
    other.join()
    rates = {name: arguments.megabytes / 1e3 / statistics.median(taken) for name, taken in seconds.items()}
    for name, rate in rates.items():
        spread = [arguments.megabytes / 1e3 / taken for taken in seconds[name]]
        print(
            f"{name:13s} {rate:5.2f} GB/s per direction (rounds {min(spread):.2f}-{max(spread):.2f}), "
            f"{rate / rates['bare sockets']:4.2f} x bare sockets"
        )


if __name__ == "__main__":
    main()
