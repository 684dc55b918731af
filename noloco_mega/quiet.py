"""Which warnings of our dependencies are meant, and not shown? Each is expected in every process, and says nothing new.

Imported by the package itself, since most of them are given while the dependencies are imported.
"""

from __future__ import annotations

import logging
import os
import warnings

# megatron-core: which optional CUDA packages are absent, and a default of its own that it calls deprecated.
MEGATRON = ("Apex is not installed", "Transformer Engine and Apex are not installed", "full scope is deprecated")

# torch, on megatron-core's and DeepSpeed's behalf: names that they will have to change.
TORCH = (r".*torch\.distributed\._(all_gather|reduce_scatter)_base.*", r".*all_gather_into_tensor.*deprecated.*")

# torch: that a parameter of the simulator is not one piece of memory: it is some columns of [N, P] (lab/stacked.py).
LAYOUT = "grad and param do not obey the gradient layout contract"

# DeepSpeed: that there is no GPU, and a learning rate read before the first step, which is 0 as it should be.
DEEPSPEED = (
    "Setting accelerator to CPU",
    "Attempting to get learning rate from scheduler before it has started",
)


class _Expected(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(DEEPSPEED)


def expected() -> None:
    """Drop exactly these warnings, in this process."""
    # torch's C++ part prints a stack trace for every store that ends with its server, which is how a circuit that is
    # given up ends; its errors are raised as well. Read once, when torch is first imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in (*MEGATRON, LAYOUT):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    for message in TORCH:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(_Expected())
