"""How does every command begin and end? The arguments that name a config, and errors told to the user."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from noloco_mega import checks, config, launcher
from noloco_mega.comm.rendezvous import StartFailed
from noloco_mega.grid import Place

USER_MUST_ACT = 2
"""Exit status of what fails in the same way if it is only started again."""
TRY_AGAIN = 75
"""Exit status (sysexits.h's EX_TEMPFAIL) of what may go on when it is started again: other processes are gone, or this
replica has left a run."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--config (or --deepspeed_config), --set, --resume and the launchers' --local_rank."""
    parser.add_argument(
        "--config", "--deepspeed_config", dest="config", required=True, metavar="FILE", help="the run's JSON file"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, dotted: --set noloco.inner_steps=20 (repeatable)",
    )
    parser.add_argument(
        "--resume",
        metavar="WHERE",
        help="go on from a checkpoint: auto, newest or a step; short for --set run.resume=WHERE",
    )
    # Some launchers hand it to every process; the rank variables say the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def rank_of_run(arguments: argparse.Namespace) -> tuple[config.Config, launcher.Launch, Place]:
    """The config, the launch and this process's place in it. Raises ConfigError or LaunchError."""
    loaded = load_run(arguments)
    launch = launcher.read()
    return loaded, launch, launcher.place(launch, loaded.topology.grid())


def load_run(arguments: argparse.Namespace) -> config.Config:
    """The config of a run. Raises ConfigError, too, for what can only be simulated."""
    loaded = load_config(arguments)
    if problems := list(checks.run_problems(loaded.noloco)):
        raise config.ConfigError("\n".join(problems))
    return loaded


def load_config(arguments: argparse.Namespace) -> config.Config:
    """The config that the arguments name. Raises ConfigError."""
    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        overrides.append(f"run.resume={arguments.resume}")
    return config.load(arguments.config, overrides)


def guarded(command: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """Run a command; its exit status, 0 where it returns none. What a user can mend (ValueError, OSError) is printed
    without a traceback.

    NOLOCO_TRACEBACK=1 shows the traceback all the same.
    """
    try:
        return command(arguments) or 0
    except (ValueError, OSError) as error:
        if os.environ.get("NOLOCO_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130


def exit_status(error: Exception) -> int:
    """Whether what failed with this error may be started again as it is: TRY_AGAIN, or USER_MUST_ACT."""
    elsewhere = isinstance(error, StartFailed) and not error.lasting
    return TRY_AGAIN if elsewhere or isinstance(error, ConnectionError) else USER_MUST_ACT
