"""How fast is a message in few bits written and read, beside a copy of the weights? One process, one thread, one run.

    python tools/bench/codec.py [--million 16] [--bits 4] [--rounds 5]

GB/s are of fp32 weights, per core, the median over rounds in which the ways take turns. Writing finds the steps, rounds
and packs; reading (of one partner) also works out the own rounding errors. With `--link-gbit-per-second` the time of a
whole exchange is told next to that of an uncompressed one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from noloco_mega.config import Noloco
from noloco_mega.costs import message_bytes
from noloco_mega.outer import coding


def measure(ways: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each way, which is called with the number of the round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            way(number)
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=16, help="weights, in millions (default: %(default)s)")
    parser.add_argument("--bits", type=int, default=4, choices=range(2, 9))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link-gbit-per-second", type=float, default=1.0, metavar="G")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = Noloco(codec="modulo", codec_bits=chosen.bits)
    generator = torch.Generator().manual_seed(0)
    rest = torch.randn(chosen.million * 1_000_000, generator=generator)
    own, other = (rest + 0.01 * torch.randn(len(rest), generator=generator) for _ in range(2))
    ours = coding.build(settings, [own], 0, [rest], 1.0)
    theirs = coding.build(settings, [other], 1, [rest], 1.0)
    copy = torch.empty_like(own)
    messages: dict[int, coding.Message] = {}

    def write(number: int) -> None:
        ours.write(number, 0)

    def read(number: int) -> None:
        found = ours.read(number, 0, {1: messages[number]})[1]
        assert found.wrapped_blocks < 0.01 * found.blocks

    def prepare(number: int) -> None:
        messages[number] = theirs.write(number, 0)

    seconds = measure(
        {"copy": lambda number: copy.copy_(own), "other": prepare, "write": write, "read": read}, chosen.rounds
    )
    size, weights = own.nbytes, len(own)
    for name in ("copy", "write", "read"):
        taken = seconds[name]
        copies = taken / seconds["copy"]
        print(
            f"{name:6s} {size / taken / 1e9:6.2f} GB/s, {taken / weights * 1e9:5.2f} ns a weight, {copies:5.1f} copies"
        )
    sent, per_second = message_bytes(settings, weights), chosen.link_gbit_per_second * 1e9 / 8
    coding_seconds = seconds["write"] + seconds["read"]
    print(
        f"{sent / weights * 8:.3f} bits per weight; an exchange at {chosen.link_gbit_per_second:g} Gbit/s takes "
        f"{sent / per_second + coding_seconds:.2f} s, {coding_seconds:.2f} of them on writing and reading by one core; "
        f"in fp32 {size / per_second:.2f} s"
    )


if __name__ == "__main__":
    main()
