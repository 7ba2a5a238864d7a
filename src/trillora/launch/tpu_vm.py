"""A recipe on a rented TPU: create, wait, copy, set up, run, follow, fetch, delete.

    plan = make_plan(bundle, "v6e-8", hours=1.5, out=Path("runs/chat"))
    plan.commands()                 # every command, for the dry run
    TpuVm(plan, listener).launch()  # all steps; returns the exit code of the run

The machine is always deleted, unless --keep is set. A spot machine may be taken away at any time: then
it is deleted, created again, and the run resumes from its checkpoints in a bucket.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trillora.errors import EXIT_STOPPED, TrilloraError
from trillora.events import Alarm, Listener, Note, Progress, ignore_events
from trillora.launch.bundle import Bundle
from trillora.launch.gcloud import TABLES, TIMED_OUT, Gcloud, GcloudRefused, Phase, explain, said_by
from trillora.launch.install import TOKEN_FILE
from trillora.launch.offers import (
    Offer,
    checked_name,
    checked_project,
    choose_backend,
    choose_zone,
    default_name,
    find_offer,
)
from trillora.launch.worker_files import EXIT_MARK, write_files
from trillora.safe_text import visible
from trillora.secrets import mask_message

STEPS = ("create", "wait", "copy", "setup", "run", "follow", "fetch", "delete")
ASK, CREATE, COPY, SET_UP, DELETE = 120.0, 900.0, 3600.0, 3600.0, 900.0  # seconds for a command to end
BOOT_SECONDS = 900.0  # from ACTIVE to a machine that answers to ssh
MAX_FAILURES = 5  # questions in a row that gcloud does not answer
MAX_SILENT = 8  # connections in a row that print nothing, until a machine counts as lost
SILENCE = 60.0  # seconds without a line of the log, until the machine's state is asked for
MAX_SILENCES = 10  # in a row, until the connection is made again: it may have died without a sign
OWN_CODES = (0, 1, 2, EXIT_STOPPED, 76)  # of a run that ended by itself; others may be signs of a preemption
PREEMPTION_CHECKS = 4  # the state of a preempted machine may change a little later than its processes end


class MachineLost(Exception):
    """The machine was preempted, or is gone for another reason."""


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the commands of a launch depend on."""

    bundle: Bundle
    offer: Offer
    backend: str
    zone: str
    name: str
    out: Path
    hours: float | None = None  # of the run, by preflight; None: not known
    is_spot: bool = True
    project: str | None = None
    patience_hours: int = 6  # how long the request may wait for a free machine
    has_token: bool = False

    @property
    def bucket(self) -> str | None:
        """Where checkpoints outlive the machine; None if they do not."""
        place = self.bundle.recipe.train.checkpoint_dir
        return place if place and "://" in place else None

    def gcloud(self) -> Gcloud:
        fields = {
            "name": self.name,
            "zone": self.zone,
            "slice": self.offer.slice.name,
            "accelerator_type": self.offer.accelerator_type,
            "runtime_version": self.offer.runtime_version,
            "machine_type": self.offer.machine_type or "",
            "image_family": self.offer.chip.image_family,
            "patience": f"{self.patience_hours}h",
            "longest": f"{math.ceil(2 * self.hours + 2) if self.hours else 24}h",
        }
        return Gcloud(TABLES[self.backend], fields, self.is_spot, self.project)

    def commands(self) -> list[tuple[str, str]]:
        """Step and command, in their order, as a person would type them."""
        gcloud, name = self.gcloud(), self.name
        workers = range(self.offer.slice.num_hosts)
        listed = [
            ("create", gcloud.command("create")),
            ("wait", gcloud.command("state")),
            ("wait", gcloud.command("node_state")),
            ("copy", gcloud.command("addresses")),
            ("copy", gcloud.command("upload", source=f"TEMPORARY_FOLDER/{name}", target="")),
            *([("copy", self._token_command(gcloud, "TEMPORARY_FOLDER"))] if self.has_token else []),
            ("setup", gcloud.command("ssh_all", command=f"bash {name}/setup.sh")),
            *(("run", gcloud.command("ssh", worker=str(n), command=f"bash {name}/start.sh {n}")) for n in workers),
            ("follow", gcloud.command("ssh", worker="0", command=f"bash {name}/follow.sh 1")),
            ("fetch", gcloud.command("download", source=f"{name}/run", target=str(self.out))),
            ("delete", gcloud.command("delete")),
        ]
        return [(step, shlex.join(words)) for step, words in listed]

    def costs(self) -> list[str]:
        """What it costs, per hour and in total, in lines for people."""
        return self.offer.costs(spot=self.is_spot, hours=self.hours)

    def warnings(self) -> list[str]:
        if self.is_spot and self.bucket is None:
            return [
                "Checkpoints are on the machine only: if it is preempted, the run is lost. Set "
                "train.checkpoint_dir=gs://BUCKET/FOLDER, or use --on-demand"
            ]
        return []

    def refusal(self) -> TrilloraError | None:
        """Why the results cannot be fetched into `out`; None if they can."""
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        do = "use another --out, or remove it"
        return TrilloraError("The folder for the results is not empty.", where=str(self.out), do=do)

    def _token_command(self, gcloud: Gcloud, folder: str) -> list[str]:
        return gcloud.command("upload", source=f"{folder}/{TOKEN_FILE}", target=f"{self.name}/{TOKEN_FILE}")


def make_plan(
    bundle: Bundle,
    slice_name: str,
    *,
    out: Path,
    hours: float | None = None,
    backend: str | None = None,
    zone: str | None = None,
    name: str | None = None,
    project: str | None = None,
    is_spot: bool = True,
    has_token: bool = False,
    force: bool = False,
) -> LaunchPlan:
    """Checks what can be checked without Google: the slice, the zone, the names."""
    offer = find_offer(slice_name)
    return LaunchPlan(
        bundle=bundle,
        offer=offer,
        backend=choose_backend(offer, backend),
        zone=choose_zone(offer, zone, force=force),
        name=checked_name(name or default_name(bundle.name)),
        out=out,
        hours=hours,
        is_spot=is_spot,
        project=checked_project(project),
        has_token=has_token,
    )


class TpuVm:
    """The steps of a launch. Each can be called alone, in another process than the one before."""

    def __init__(
        self, plan: LaunchPlan, listener: Listener = ignore_events, *, token: str | None = None, pace: float = 15.0
    ) -> None:
        self._plan, self._listener, self._token = plan, listener, token
        self._gcloud = plan.gcloud()
        self._pace = pace  # seconds between two questions
        self._is_ours = False  # whether this process may have created a machine that still exists
        self._is_answered = True  # whether Google has answered the last request to create one

    # ---- all steps

    def launch(self, *, keep: bool = False, max_restarts: int = 10) -> int:
        """Runs all steps and returns the exit code of the run. The machine is deleted at any end, unless kept."""
        self.check()
        with _signals_raise():
            try:
                code = self._train(max_restarts)
                self._end(code)
            except BaseException:
                self._clean_up(keep)
                raise
            if keep:
                self._say_kept()
            else:
                with _signals_ignored():
                    self.delete()
        return code

    def _train(self, max_restarts: int) -> int:
        """From nothing to the end of the run, on as many machines as it takes."""
        for attempt in range(max_restarts + 1):
            try:
                self.create()
                self.wait()
                self.copy()
                self.setup()
                self.run()
                code = self.follow()
                if code == EXIT_STOPPED and self._plan.bundle.recipe.train.time_limit is None:
                    raise MachineLost("the run received a signal to stop, as before a preemption")
                return code
            except MachineLost as lost:
                self._listener(Alarm(f"The machine {self._plan.name} is lost: {lost}."))
                self.delete()
                if self._plan.bucket is None:
                    raise TrilloraError(
                        "The machine was lost, and the run with it: its checkpoints were on the machine.",
                        where=self._plan.zone,
                        do="set train.checkpoint_dir=gs://BUCKET/FOLDER, or use --on-demand, and start again",
                    ) from lost
                if attempt < max_restarts:
                    self._listener(Note(f"Creating it again, to resume from {self._plan.bucket}"))
        raise TrilloraError(
            f"The machine was lost {max_restarts + 1} times; the run is saved.",
            where=self._plan.zone,
            do=f"resume it with the same command, in another zone ({' '.join(self._plan.offer.zones)}) or --on-demand",
        )

    def _end(self, code: int) -> None:
        """Fetches what there is. The log of the first worker was shown; the other logs matter after an error."""
        if code not in (0, EXIT_STOPPED) and self._plan.offer.slice.num_hosts > 1:
            with contextlib.suppress(GcloudRefused):
                command = f"tail -n 20 {self._plan.name}/worker.log"
                self._show(self._gcloud.call("ssh_all", command=command, seconds=ASK))
        try:
            self.fetch()
        except TrilloraError as error:
            if code == 0:
                raise
            self._listener(Alarm(f"Nothing was fetched: {error.what}"))

    def _clean_up(self, keep: bool) -> None:
        """After an error, which is shown next: an error of the deletion must not replace it."""
        if not self._is_ours:
            return
        if keep:
            self._say_kept()
            return
        with _signals_ignored():
            try:
                self.delete()
            except TrilloraError as error:
                self._listener(Alarm(f"{error.what} Do: {error.do}"))

    def _say_kept(self) -> None:
        command = shlex.join(self._gcloud.command("delete"))
        self._listener(Note(f"The machine {self._plan.name} is kept, and costs money until you run: {command}"))

    # ---- one step each

    def step(self, name: str) -> int:
        """One of STEPS alone. Returns the exit code of the run for "follow", otherwise 0."""
        if name == "create":
            self.check()
        with _signals_raise():
            try:
                return int(getattr(self, name)() or 0)
            except MachineLost as lost:
                raise TrilloraError(
                    f"The machine {self._plan.name} is lost: {lost}.",
                    where=self._plan.zone,
                    do="delete what is left of it with --step delete, then start again; a bucket keeps the checkpoints",
                ) from lost
            except BaseException:
                if name == "create":
                    self._clean_up(keep=False)
                raise

    def check(self) -> None:
        """What would fail later, and costs nothing to find out now."""
        if (refusal := self._plan.refusal()) is not None:
            raise refusal
        accounts = self._plain("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
        if not accounts.strip():
            raise TrilloraError("gcloud is not logged in.", where="gcloud auth list", do="run `gcloud auth login`")
        if self._plan.project is None and self._plain("config", "get-value", "project").strip() in ("", "(unset)"):
            do = "use --project ID, or run `gcloud config set project ID`"
            raise TrilloraError("gcloud has no project.", where="gcloud config get-value project", do=do)
        if (place := self._plan.bucket) is not None and place.startswith("gs://"):
            self._check_bucket("/".join(place.split("/")[:3]))

    def create(self) -> None:
        self._listener(Note(f"Creating {self._plan.name}: {self._plan.offer.slice.name} in {self._plan.zone}"))
        self._is_ours, self._is_answered = True, False  # also if the command fails after Google has accepted it
        try:
            self._gcloud.call("create", seconds=CREATE)
            self._is_answered = True
        except GcloudRefused as refused:
            self._is_ours, self._is_answered = refused.reason != "exists", refused.code != TIMED_OUT
            raise self._explained(refused) from refused

    def wait(self) -> None:
        """Returns when the machine answers to ssh. Raises `MachineLost` if it was taken away meanwhile."""
        self._poll("state", self._plan.patience_hours * 3600.0 + BOOT_SECONDS)
        self._poll("node_state", BOOT_SECONDS)
        until = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                self._gcloud.call("ssh_all", command="true", seconds=ASK)
                return
            except GcloudRefused as refused:
                self._require_ready()
                if time.monotonic() > until:
                    raise MachineLost(f"it does not answer to ssh ({said_by(refused.text)})") from refused
                time.sleep(self._pace)

    def copy(self) -> None:
        """Copies the bundle, the scripts and the token to all workers."""
        plan = self._plan
        self._listener(Note(f"Copying {plan.bundle.num_bytes / 1e6:,.1f} MB to all workers"))
        with tempfile.TemporaryDirectory(prefix="trillora-launch-") as temporary:
            folder = Path(temporary) / plan.name
            write_files(folder, plan.bundle, self._addresses(), self._listener)
            self._on_machine("upload", seconds=COPY, source=str(folder), target="")
            if self._token is not None:
                file = Path(temporary) / TOKEN_FILE
                with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as secret:
                    secret.write(self._token)
                self._on_machine("upload", seconds=ASK, source=str(file), target=f"{plan.name}/{TOKEN_FILE}")

    def setup(self) -> None:
        self._listener(Note("Installing Python and Trillora on all workers; this takes minutes"))
        self._show(self._on_machine("ssh_all", seconds=SET_UP, command=f"bash {self._plan.name}/setup.sh"))

    def run(self) -> None:
        """Starts the run on all workers. It continues without a connection."""
        num_workers = len(self._addresses())

        def start(number: int) -> None:
            command = f"bash {self._plan.name}/start.sh {number}"
            self._on_machine("ssh", seconds=ASK, worker=str(number), command=command)

        with ThreadPoolExecutor(8) as pool:
            for number, _ in enumerate(pool.map(start, range(num_workers))):
                self._listener(Progress("workers started", number + 1, num_workers))

    def follow(self) -> int:
        """Shows the log of the first worker until the run ends, and returns its exit code."""
        next_line, silent = 1, 0
        while True:
            code, seen, is_cut = self._follow_once(next_line)
            if code is not None:
                for _ in range(0 if code in OWN_CODES else PREEMPTION_CHECKS):
                    time.sleep(self._pace)
                    self._require_ready()
                return code
            self._require_ready()
            silent = 0 if seen or is_cut else silent + 1
            if silent >= MAX_SILENT:
                raise MachineLost("it does not answer to ssh any more")
            next_line += seen
            time.sleep(self._pace)

    def fetch(self) -> None:
        """Copies the run's folder from the first worker to `out`, completely or not at all."""
        out = self._plan.out
        out.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{out.name}.fetching-", dir=out.parent))
        try:
            try:
                self._gcloud.call("download", seconds=COPY, source=f"{self._plan.name}/run", target=str(making))
            except GcloudRefused as refused:
                raise self._explained(refused) from refused
            os.replace(making / "run", out)
        except OSError as error:
            do = "use another --out, or remove it; then --step fetch"
            raise TrilloraError(f"The results cannot be stored: {error.strerror}.", where=str(out), do=do) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
        self._listener(Note(f"Results are in {out}"))

    def delete(self) -> None:
        """Deletes the machine and what holds its quota. It is no error if there is none. A machine whose creation was
        interrupted may appear a little later, so it is looked for several times."""
        self._listener(Note(f"Deleting {self._plan.name}"))
        for attempt in range(MAX_FAILURES):
            try:
                self._gcloud.call("delete", seconds=DELETE)
                break
            except GcloudRefused as refused:
                is_last = attempt == MAX_FAILURES - 1
                if refused.reason == "missing" and (self._is_answered or is_last):
                    break
                if is_last:
                    raise TrilloraError(
                        f"The machine {self._plan.name} could not be deleted. It may still run and cost money.",
                        where=f"gcloud: {said_by(refused.text)}",
                        do=f"run `{shlex.join(self._gcloud.command('delete'))}`",
                    ) from refused
                time.sleep(self._pace)
        self._is_ours = False

    # ---- questions to gcloud

    def _poll(self, question: str, limit: float) -> None:
        """Returns when the state that this command prints is a ready one."""
        shown, started = "", time.monotonic()
        while True:
            state, _, why = self._ask(question).strip().partition("\t")
            if state != shown:
                shown = state
                self._listener(Note(f"State: {said_by(state)}"))
            phase = self._phase(question, state)
            if phase == "ready":
                return
            if phase == "lost":
                self._refuse_failed(state, why)
                raise MachineLost(f"its state is {said_by(state)}")
            waited = time.monotonic() - started
            if waited > limit:
                raise TrilloraError(
                    f"The machine was still {state} after {waited / 3600:.1f} h.",
                    where=self._plan.zone,
                    do=f"try again later, or in another zone: {' '.join(self._plan.offer.zones)}",
                )
            self._listener(Progress(f"waiting, {state}, seconds", int(waited), int(limit)))
            time.sleep(self._pace)

    def _refuse_failed(self, state: str, why: str) -> None:
        """A request that FAILED would fail again: an error. What was taken away is asked for again."""
        if state == "FAILED":
            refused = GcloudRefused(why, 1)
            if refused.reason != "other":
                raise self._explained(refused)
            do = "try another --zone, or see `gcloud compute tpus queued-resources describe`"
            what = "Google Cloud could not provide the machine: the request FAILED."
            raise TrilloraError(what, where=f"{self._plan.zone}: {said_by(why)}", do=do)

    def _phase(self, question: str, state: str) -> Phase:
        table = self._gcloud.table
        return table.phase(state) if question == "state" else table.node_phase(state)

    def _require_ready(self) -> None:
        state = self._ask("node_state").strip()
        if self._phase("node_state", state) != "ready":
            raise MachineLost(f"its state is {said_by(state)}")

    def _ask(self, question: str) -> str:
        """The answer to a question, asked again if the network fails. `MachineLost` if there is no such machine."""
        for attempt in range(MAX_FAILURES):
            try:
                return self._gcloud.call(question, seconds=ASK)
            except GcloudRefused as refused:
                if refused.reason in ("missing", "lost"):
                    raise MachineLost("there is no such machine") from refused
                if refused.reason != "other" or attempt == MAX_FAILURES - 1:
                    raise self._explained(refused) from refused
                time.sleep(self._pace)
        raise AssertionError("unreachable")

    def _on_machine(self, name: str, *, seconds: float, **fields: str) -> str:
        """A command that needs the machine. If it fails, the machine may be gone."""
        try:
            return self._gcloud.call(name, seconds=seconds, **fields)
        except GcloudRefused as refused:
            self._require_ready()
            raise self._explained(refused) from refused

    def _addresses(self) -> list[str]:
        words = re.split(r"[;,\s]+", self._ask("addresses").strip())
        if not all(re.fullmatch(r"[0-9A-Za-z.:-]{1,60}", word) for word in words):
            raise TrilloraError(
                "gcloud does not list the addresses of the workers.",
                where=shlex.join(self._gcloud.command("addresses")),
                do="update it with `gcloud components update`",
            )
        return words

    def _follow_once(self, first: int) -> tuple[int | None, int, bool]:
        """Shows the log from a line on. Returns the exit code, or None if the connection ended; the number of lines
        shown; and whether the connection was cut because it was silent for long."""
        command = f"bash {self._plan.name}/follow.sh {first}"
        held: str | None = None  # the last line, which may be the exit code
        seen, silences = 0, 0
        with self._gcloud.stream("ssh", worker="0", command=command) as stream:
            while silences < MAX_SILENCES:
                try:
                    line = stream.line(min(SILENCE, 4 * self._pace))
                except queue.Empty:
                    self._require_ready()
                    silences += 1
                    continue
                if line is None:
                    break
                silences = 0
                if held is not None:
                    seen += 1
                    self._show(held)
                held = line
        if held is not None and (found := re.fullmatch(rf"{EXIT_MARK} ([0-9]{{1,3}})", held)):
            return int(found[1]), seen, False
        if held is not None:
            seen += 1
            self._show(held)
        return None, seen, silences == MAX_SILENCES

    def _show(self, text: str) -> None:
        for line in text.splitlines():
            if line.strip():
                self._listener(Note(visible(mask_message(line))))

    def _plain(self, *words: str) -> str:
        try:
            return self._gcloud.plain(list(words), seconds=ASK)
        except GcloudRefused as refused:
            raise self._explained(refused) from refused

    def _check_bucket(self, bucket: str) -> None:
        try:
            self._gcloud.plain(["storage", "buckets", "describe", bucket, "--format=value(location)"], seconds=ASK)
        except GcloudRefused as refused:
            region = self._plan.zone.rpartition("-")[0]
            raise TrilloraError(
                f"The bucket {bucket} does not exist, or this account may not read it.",
                where=f"train.checkpoint_dir: {said_by(refused.text)}",
                do=f"create it with `gcloud storage buckets create {bucket} --location={region}`",
            ) from refused

    def _explained(self, refused: GcloudRefused) -> TrilloraError:
        return explain(refused, self._gcloud, self._plan.offer.zones)


# ---- signals

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like Ctrl-C, so that the machine is deleted."""
    with _handled(SIGNALS, _stop):
        yield


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """While the machine is deleted, nothing interrupts."""
    with _handled((*SIGNALS, signal.SIGINT), signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Signals that are ignored already, for example by nohup, stay ignored. Only the main thread has handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    changed = [number for number in numbers if is_main and signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, handler) for number in changed}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
