"""One network namespace per host, all joined by a bridge in another: links that a test can cut.

    namespace of host i: eth0 (10.87.0.(i + 1)) ── port i ── bridge (10.87.0.254, where the rendezvous lives)

Nothing outside these namespaces is touched, so several such networks may exist at once.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
HUB = -1
"""The host number of the bridge's own namespace."""


def missing() -> str | None:
    """Why no network can be made here, or None."""
    if shutil.which("ip") is None:
        return "no iproute2 here (apt-get install iproute2)"
    if os.getuid() != 0:
        return "network namespaces need root"
    probe = f"noloco-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


class Network:
    """A context manager: the namespaces exist inside it."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._name = f"noloco-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in range(HUB, self.hosts):
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], capture_output=True)

    def namespace(self, host: int) -> str:
        return f"{self._name}-{'hub' if host == HUB else host}"

    def address(self, host: int) -> str:
        return "10.87.0.254" if host == HUB else f"10.87.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Take a host's cable out."""
        self._ip(HUB, "link", "set", "dev", f"port{host}", "down")

    def mend(self, host: int) -> None:
        self._ip(HUB, "link", "set", "dev", f"port{host}", "up")

    def part(self, one: int, other: int) -> None:
        """Drop what two hosts send each other; both still reach all others. One pair at a time."""
        for host in (one, other):
            self._ip(HUB, "link", "set", "dev", f"port{host}", "type", "bridge_slave", "isolated", "on")

    def unite(self, one: int, other: int) -> None:
        for host in (one, other):
            self._ip(HUB, "link", "set", "dev", f"port{host}", "type", "bridge_slave", "isolated", "off")

    def reaches(self, one: int, other: int) -> bool:
        """Whether a packet gets from one host to the other and back: nobody listens on port 9, which is an answer."""
        program = (
            "import socket; s = socket.socket(); s.settimeout(1)\n"
            f"try: s.connect(({self.address(other)!r}, 9))\n"
            "except ConnectionRefusedError: pass"
        )
        words = ["ip", "netns", "exec", self.namespace(one), "/usr/bin/env", "python3", "-I", "-S", "-c", program]
        return subprocess.run(words, capture_output=True).returncode == 0

    def _make(self) -> None:
        for host in range(HUB, self.hosts):
            subprocess.run(["ip", "netns", "add", self.namespace(host)], check=True)
            self._ip(host, "link", "set", "dev", "lo", "up")
        self._ip(HUB, "link", "add", "bridge", "type", "bridge")
        self._ip(HUB, "address", "add", f"{self.address(HUB)}/24", "dev", "bridge")
        self._ip(HUB, "link", "set", "dev", "bridge", "up")
        for host in range(self.hosts):
            port = f"port{host}"
            self._ip(HUB, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace(host))
            self._ip(HUB, "link", "set", "dev", port, "master", "bridge", "up")
            self._ip(host, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._ip(host, "link", "set", "dev", "eth0", "up")

    def _ip(self, host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self.namespace(host), *words], check=True)


def enter(namespace: str) -> None:
    """Move this thread, and whatever it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
