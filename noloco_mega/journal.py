"""What is measured of a run, and when? One replica's rows, put together from all its ranks.

    step, replica              inner steps done, and whose row it is
    loss                       mean over the replica's microbatches since its last row (nats per token)
    lr, grad_norm              of the last inner step; the norm is the whole replica's, before clipping
    tokens, tokens_per_second  this replica's own, since the start and since its last row
    outer_step, partner        outer steps done, and with whom the last one was meant to be ("diloco", "allreduce":
                               all others)
    exchange_seconds           from launch until the last partner answered or was given up, on the rank that writes
                               ("allreduce": of all averages since the last outer step)
    exchange_bytes             payload that the replica's ranks sent in that outer step, counted at the sockets;
                               "diloco" and "allreduce" (since the last outer step): payload handed to the all-reduce,
                               counted once, of which a ring sends 2·(N − 1)/N times as much
    missed, missed_reason      partners whose data did not arrive whole
    spread                     ‖c_i − c_j‖ / ‖c_i‖ of the exchange ("gossip": of the weights)
    unacknowledged             partners whose data arrived but who did not confirm that they have ours
    wrap_rate                  share of the partners' weights whose codes had wrapped, most of which were mended: from
                               the blocks that did not add up (comm/codec.py); null without a codec
    routed                     the replicas that the last inner step's microbatches were routed among
    redone_steps               inner steps since the last row that lost a link and were run again
    bad_steps                  inner steps since the last row whose gradient was not finite: they changed no weight
    skipped_steps              inner steps since the last row that were left out to meet the others
    present                    the replicas that are paired at this step, as far as this one knows
    save_seconds               for which training stood still to save checkpoints since the last row
    val_loss                   at evaluations: nats per token on the validation samples, along identity routes
    val_loss_by_domain         the same on each of data.valid_domains, by name
    at_end                     what is here only because the run ended at this step: "row" (all of it) or "val_loss";
                               void once the run goes on from here
    resumed                    the run went on from here: what this replica has written beyond is void (see read_rows)

Every row has every column; null where the step had no such thing.
Beside them probe.jsonl holds, for each outer step, a few of the replica's weights right before and right after it, from
which the spread of all replicas follows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from noloco_mega.comm.membership import Peers
from noloco_mega.config import Config
from noloco_mega.grid import Place
from noloco_mega.metrics import JsonLines, ProgressLine, TensorBoard, Tracker, Trackers, write_json
from noloco_mega.outer.hook import Hook
from noloco_mega.pipeline import StepLoss

COLUMNS = (
    *("step", "replica", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "outer_step", "partner"),
    *("exchange_seconds", "exchange_bytes", "missed", "missed_reason", "unacknowledged", "spread", "wrap_rate"),
    *("val_loss", "routed", "redone_steps", "bad_steps", "skipped_steps", "present", "save_seconds", "at_end"),
    "val_loss_by_domain",
)


class Journal:
    """The record of one rank. Every rank of a replica calls it alike, since its sums are collective over the replica;
    one of them (the last stage's first, which has the loss) writes."""

    def __init__(self, config: Config, place: Place) -> None:
        grid = config.topology.grid()
        self.folder = config.output
        self.replica_folder = config.replica_folder(place.replica)
        self._config, self._place, self._joins = config, place, False
        self._leads = grid.replica_rank(place) == 0
        self._writes = place.stage == grid.stages - 1 and place.data == place.tensor == 0
        self._trackers = Trackers()
        self._probes = Trackers()
        self._losses: list[StepLoss] = []
        self._val_loss: float | None = None
        self._val_loss_by_domain: dict[str, float] | None = None
        self._missed: set[int] = set()
        self._unwritable: set[str] = set()
        """What could not be written last time."""
        self._skipping = False
        self._since = time.monotonic()
        self._logged_step = 0
        self._save_seconds = 0.0
        self._redone = 0
        self._bad = 0
        self._skipped = 0
        self.last: dict[str, float] = {}
        """The last "loss" and "val_loss" of the replica, on all its ranks."""

    def look(self, joins: bool) -> None:
        """Before anything is written. A replica that `joins` its run under way goes on with what it has written before;
        else raises FileExistsError if its folder holds a run already which is not to be resumed."""
        self._joins = joins
        before = self.replica_folder.exists() and any(self.replica_folder.iterdir())
        if self._leads and before and self._config.run.resume == "no" and not joins:
            raise FileExistsError(
                f"{self.replica_folder} holds an earlier run, which would be overwritten: go on with it "
                f"(--resume auto), choose another run.name (--set run.name=NAME) or move the folder away"
            )

    def begin(
        self, start: int, outer_step: int = 0, losses: Sequence[tuple[float, int]] = (), skipped: int = 0
    ) -> None:
        """Open the files: by now the run has met, so that one which could not start leaves nothing behind.

        It goes on from inner step `start` and outer step `outer_step`; `losses` are those that `pending` gave there,
        and `skipped` the inner steps left out so far. Raises OSError where a new run can't be written; one that goes on
        only warns.
        """
        resumes = self._joins or self._config.run.resume != "no"
        if self._leads or self._writes:
            try:
                self._make_folder(config=self._leads)
            except OSError as error:
                if not resumes:
                    raise
                self._warn_unwritable("files", start, error)
        if self._writes:
            rows, probes = JsonLines(self.folder / "metrics.jsonl"), JsonLines(self.replica_folder / "probe.jsonl")
            if resumes:
                self._mark(rows, {"step": start, "replica": self._place.replica, "resumed": True}, start)
                self._mark(probes, {"outer_step": outer_step, "resumed": True}, start)
            trackers: list[Tracker] = [rows]
            if self._config.run.tensorboard:
                trackers.append(TensorBoard(self.replica_folder, start if resumes else None))
            if self._place.replica == 0:
                trackers.append(ProgressLine(self._config.run.steps, self._config.topology.replicas, start))
            self._trackers = Trackers(trackers)
            self._probes = Trackers([probes])
        self._losses = [StepLoss(torch.tensor(total, dtype=torch.float64), count) for total, count in losses]
        self._since, self._logged_step, self._skipped = time.monotonic(), start, skipped

    def evaluate(self, evaluation: Callable[[str | None], StepLoss], peers: Peers) -> None:
        """Run an evaluation, of the validation data (None) and of each domain; the losses go into the row that comes
        next."""
        began = time.monotonic()
        domains = list(self._config.data.valid_domains)
        losses = [evaluation(domain) for domain in (None, *domains)]
        sums = peers.total([value for loss in losses for value in _sum_and_count([loss])])
        self._val_loss, *rest = (total / count for total, count in zip(sums[0::2], sums[1::2], strict=True))
        self.last["val_loss"] = self._val_loss
        if domains:
            self._val_loss_by_domain = dict(zip(domains, rest, strict=True))
        self._since += time.monotonic() - began  # an evaluation's time is not training time

    def started(self) -> None:
        """The row of a run's start, before its first inner step."""
        self._log(0, {})

    def stepped(
        self,
        step: int,
        lr: float,
        grad_norm: float,
        loss: StepLoss | None,
        outer: Hook,
        peers: Peers,
        routed: Sequence[int],
        *,
        last: bool,
    ) -> None:
        """Inner step number `step` is done, with the outer step and the evaluation that may follow it."""
        if loss is not None:
            self._losses.append(loss)
        if not math.isfinite(grad_norm) and not self._skipping and self._leads:
            self.warn(f"inner step {step}: the gradient is not finite; such steps change no weight")
        self._skipping = not math.isfinite(grad_norm)
        self._bad += self._skipping
        exchanged = outer.optimizer.due(step) and outer.last_report is not None
        run = self._config.run
        evaluated = bool(run.eval_every) and step % run.eval_every == 0
        due = step % run.log_every == 0 or exchanged or evaluated
        if not (due or last):
            return
        now = time.monotonic()
        skipped, self._skipped = outer.skipped - self._skipped, outer.skipped
        steps, seconds = step - self._logged_step - skipped, now - self._since
        sent = outer.last_report.sent_bytes if exchanged and outer.last_report else 0
        total, count, exchange_bytes = peers.total([*_sum_and_count(self._losses), sent])
        self.last["loss"] = total / count
        row: dict[str, Any] = {
            "loss": total / count,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": self.tokens(step),
            "tokens_per_second": steps * self._config.replica_step_tokens / seconds,
        }
        if last and not evaluated:
            row["at_end"] = "val_loss" if due else "row"
        if routed:
            row["routed"] = list(routed)
        counts = {"redone_steps": self._redone, "bad_steps": self._bad, "skipped_steps": skipped}
        row |= {key: count for key, count in counts.items() if count}
        self._redone = self._bad = 0
        if exchanged:
            row["present"] = list(peers.members(outer.outer_step - 1, outer.optimizer.settings))
        if self._save_seconds:
            row["save_seconds"] = self._save_seconds
        if exchanged:
            row |= self._exchange(outer, int(exchange_bytes))
            self._log_probe(outer)
        self._log(step, row)
        if due:
            self._losses.clear()  # otherwise a run that goes on from here needs them for its next row
        self._save_seconds = 0.0
        self._since, self._logged_step = now, step

    def tokens(self, step: int) -> int:
        """What this replica has trained on by inner step `step`."""
        return (step - self._skipped) * self._config.replica_step_tokens

    def redo(self) -> None:
        """An inner step lost a link, and is run again."""
        self._redone += 1

    def pending(self) -> list[tuple[float, int]]:
        """The losses (total, microbatches) of this rank that no row holds yet."""
        return [(float(loss.total), loss.microbatches) for loss in self._losses]

    def saved(self, seconds: float) -> None:
        """Training stood still for so long to save a checkpoint."""
        self._save_seconds += seconds

    def warn(self, text: str) -> None:
        """Tell the user of something that went wrong and was dealt with."""
        print(f"replica {self._place.replica}, stage {self._place.stage}: {text}", file=sys.stderr, flush=True)

    def tell(self, text: str) -> None:
        """Tell the user, once per replica, how far it is."""
        if self._leads:
            print(f"replica {self._place.replica}: {text}", flush=True)

    def close(self) -> None:
        self._trackers.close()
        self._probes.close()

    def _log_probe(self, outer: Hook) -> None:
        assert outer.last_probe is not None
        before, after = (probe.tolist() for probe in outer.last_probe)
        row = {"outer_step": outer.outer_step, "before": before, "after": after}
        self._write("probes", self._probes, row, outer.step)

    def _exchange(self, outer: Hook, sent_bytes: int) -> dict[str, Any]:
        report = outer.last_report
        assert report is not None
        for absent in report.missed.keys() - self._missed:
            if self._writes:
                self.warn(f"outer step {outer.outer_step} without replica {absent}: {report.missed[absent]}")
        self._missed = (self._missed | report.missed.keys()) - set(report.received)
        partner: Any = list(report.asked)
        if self._config.noloco.group_size == 2 and len(partner) <= 1:
            partner = report.asked[0] if report.asked else None
        return {
            "outer_step": outer.outer_step,
            "partner": partner,
            "exchange_seconds": report.exchange_seconds,
            "exchange_bytes": sent_bytes,
            "missed": len(report.missed),
            "missed_reason": "; ".join(f"{who}: {why}" for who, why in report.missed.items()) or None,
            "unacknowledged": len(report.unacknowledged),
            "spread": report.spread,
            "wrap_rate": report.wrap_rate,
        }

    def _log(self, step: int, row: dict[str, Any]) -> None:
        whole = {"step": step, "replica": self._place.replica, **row}
        whole |= {"val_loss": self._val_loss, "val_loss_by_domain": self._val_loss_by_domain}
        self._val_loss = self._val_loss_by_domain = None
        self._write("rows", self._trackers, dict.fromkeys(COLUMNS) | whole, step)

    def _make_folder(self, *, config: bool) -> None:
        """The replica's folder and config.json beside it. Raises OSError."""
        self.replica_folder.mkdir(parents=True, exist_ok=True)
        # A run may begin without replica 0.
        if config and (self._place.replica == 0 or not (self.folder / "config.json").exists()):
            write_json(self.folder / "config.json", self._config.to_json())

    def _mark(self, file: JsonLines, row: dict[str, Any], step: int) -> None:
        """Write where the run goes on, at the latest before the next row."""
        try:
            file.log(row, keep=True)
        except OSError as error:
            self._warn_unwritable("marks", step, error)

    def _write(self, what: str, trackers: Trackers, row: dict[str, Any], step: int) -> None:
        """A full disk must not end weeks of training, nor must somebody who tidies up."""
        try:
            if self._writes and not self.replica_folder.is_dir():
                self.warn(f"{self.replica_folder} was removed or moved away; it is made anew, without what was in it")
                self._make_folder(config=True)
            trackers.log(row)
        except OSError as error:
            self._warn_unwritable(what, step, error)
        else:
            self._unwritable.discard(what)

    def _warn_unwritable(self, what: str, step: int, error: OSError) -> None:
        if what not in self._unwritable:
            self.warn(f"{what} are lost from step {step} on, until {self.folder} can be written again: {error}")
        self._unwritable.add(what)


def _sum_and_count(losses: list[StepLoss]) -> tuple[float, float]:
    """What, summed over a replica's ranks, gives the mean. The last stage's T ranks hold the same, which cancels."""
    return sum(float(loss.total) for loss in losses), sum(loss.microbatches for loss in losses)
