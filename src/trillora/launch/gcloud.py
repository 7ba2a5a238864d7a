"""Google's command line: which commands a launch needs, as one table per backend, and what its answers mean.

    gcloud = Gcloud(TABLES["cloud-tpu"], {"name": "chat", "zone": "us-east5-b", ...})
    gcloud.command("delete")   # ["gcloud", "compute", "tpus", "queued-resources", "delete", "chat", ...]
    gcloud.call("delete")      # its output; GcloudRefused if gcloud fails

A command of a table is split into words before its fields are filled in, so a value can never become a second word.
Nothing here passes through a shell of this machine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Literal

from trillora.errors import TrilloraError
from trillora.launch.offers import CLOUD_TPU, COMPUTE_ENGINE
from trillora.safe_text import visible
from trillora.secrets import mask_message

MAX_OUTPUT = 1 << 20  # characters of an answer
MAX_LINE = 1 << 16  # characters; a longer line comes in pieces
SHOWN = 600  # characters of an answer in an error
TIMED_OUT = 124  # the exit code of a command that took too long, as of `timeout`
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of no use to gcloud, so it does not get them
INSTALL = "install it from https://cloud.google.com/sdk/docs/install, then run `gcloud auth login`"

Phase = Literal["waiting", "ready", "lost"]


@dataclass(frozen=True)
class Table:
    """The commands of one backend, with {fields}; and the states of its machines."""

    create: str
    spot: str  # added to `create` for a spot machine
    state: str  # prints the state, and why it failed if it did
    node_state: str  # prints the state of the machine itself
    addresses: str  # prints the internal address of every worker
    ssh: str
    ssh_all: str
    upload: str  # to all workers
    download: str  # from the first worker
    delete: str
    waiting: frozenset[str]
    ready: frozenset[str]  # every other state is lost: it is deleted, and created again
    node_waiting: frozenset[str] = frozenset({"CREATING", "STARTING", "RESTARTING", "REPAIRING"})
    node_ready: frozenset[str] = frozenset({"READY"})

    def phase(self, state: str) -> Phase:
        return "ready" if state in self.ready else "waiting" if state in self.waiting else "lost"

    def node_phase(self, state: str) -> Phase:
        return "ready" if state in self.node_ready else "waiting" if state in self.node_waiting else "lost"


_QUEUE, _NODE, _VM = "compute tpus queued-resources", "compute tpus tpu-vm", "compute instances"
_INSTANCE_WAITING = frozenset({"PENDING", "PROVISIONING", "STAGING", "REPAIRING"})
TABLES: dict[str, Table] = {
    CLOUD_TPU: Table(
        create=f"{_QUEUE} create {{name}} --node-id={{name}} --zone={{zone}} --accelerator-type={{accelerator_type}} "
        "--runtime-version={runtime_version} --valid-until-duration={patience} --quiet",
        spot="--spot",
        state=f"{_QUEUE} describe {{name}} --zone={{zone}} --format=value(state.state,state.failedData.error.message)",
        node_state=f"{_NODE} describe {{name}} --zone={{zone}} --format=value(state)",
        addresses=f"{_NODE} describe {{name}} --zone={{zone}} --format=value(networkEndpoints[].ipAddress)",
        ssh=f"{_NODE} ssh {{name}} --zone={{zone}} --worker={{worker}} --quiet --command={{command}}",
        ssh_all=f"{_NODE} ssh {{name}} --zone={{zone}} --worker=all --quiet --command={{command}}",
        upload=f"{_NODE} scp --recurse {{source}} {{name}}:{{target}} --zone={{zone}} --worker=all --quiet",
        download=f"{_NODE} scp --recurse {{name}}:{{source}} {{target}} --zone={{zone}} --worker=0 --quiet",
        # A queued resource that FAILED or was SUSPENDED holds its quota until it is deleted. --force deletes its node.
        delete=f"{_QUEUE} delete {{name}} --zone={{zone}} --force --quiet",
        waiting=frozenset({"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"}),
        ready=frozenset({"ACTIVE"}),
    ),
    COMPUTE_ENGINE: Table(
        create=f"{_VM} create {{name}} --zone={{zone}} --machine-type={{machine_type}} "
        "--image-project=ubuntu-os-accelerator-images --image-family={image_family} --maintenance-policy=TERMINATE "
        "--boot-disk-size=200GB --scopes=cloud-platform --max-run-duration={longest} "
        "--instance-termination-action=DELETE --quiet",
        spot="--provisioning-model=SPOT",
        state=f"{_VM} describe {{name}} --zone={{zone}} --format=value(status,statusMessage)",
        node_state=f"{_VM} describe {{name}} --zone={{zone}} --format=value(status)",
        addresses=f"{_VM} describe {{name}} --zone={{zone}} --format=value(networkInterfaces[0].networkIP)",
        ssh="compute ssh {name} --zone={zone} --quiet --command={command}",
        ssh_all="compute ssh {name} --zone={zone} --quiet --command={command}",
        upload="compute scp --recurse {source} {name}:{target} --zone={zone} --quiet",
        download="compute scp --recurse {name}:{source} {target} --zone={zone} --quiet",
        delete=f"{_VM} delete {{name}} --zone={{zone}} --quiet",
        waiting=_INSTANCE_WAITING,
        ready=frozenset({"RUNNING"}),
        node_waiting=_INSTANCE_WAITING,
        node_ready=frozenset({"RUNNING"}),
    ),
}

Reason = Literal[
    "capacity", "quota", "zone", "lost", "missing", "exists", "account", "project", "disabled", "denied", "other"
]
# In the order in which they are looked for: an answer about capacity may also contain RESOURCE_EXHAUSTED.
_REASONS: tuple[tuple[Reason, str], ...] = (
    ("lost", r"not supported while in state PREEMPTED|has been preempted"),
    ("capacity", r"no more capacity in the zone|ZONE_RESOURCE_POOL_EXHAUSTED|stockout|Insufficient reserved capacity"),
    ("quota", r"Quota limit '|Quota '\w+' exceeded|QUOTA_EXCEEDED|RESOURCE_EXHAUSTED"),
    ("project", r"required property \[project\] is not currently set|project property is set to the empty string"),
    ("account", r"do not currently have an active account|gcloud auth login|Reauthentication|invalid_grant"),
    ("disabled", r"SERVICE_DISABLED|has not been used in project|API \S+ is not enabled"),
    (
        "zone",
        r"invalid AcceleratorType|Location \S+ is not found|Invalid value for field 'zone'|not allowed to use the",
    ),
    ("exists", r"ALREADY_EXISTS|already exists"),
    ("missing", r"NOT_FOUND|was not found|could not be found"),
    ("denied", r"PERMISSION_DENIED|Required '\S+' permission|does not have permission"),
)
_QUOTA_NAME = re.compile(r"Quota (?:limit )?'([^']{1,120})'")
_LIMIT = re.compile(r"Limit: ([0-9.]{1,12})")


class GcloudRefused(Exception):
    """gcloud failed. `reason` is what its answer means."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code
        self.reason: Reason = next((name for name, pattern in _REASONS if re.search(pattern, text)), "other")


class LineReader:
    """The lines of a process, read by a thread: a connection to a machine that is gone may stay silent for ever."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=10_000)
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def line(self, seconds: float) -> str | None:
        """The next line; None at the end. Raises `queue.Empty` if nothing comes in this time."""
        return self._lines.get(timeout=seconds)

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            while line := pipe.readline(MAX_LINE):
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


@dataclass(frozen=True)
class Gcloud:
    """The commands of a backend for one machine."""

    table: Table
    fields: Mapping[str, str]
    is_spot: bool = True
    project: str | None = None  # None: gcloud's own setting
    program: str = field(default="gcloud")

    def command(self, name: str, **fields: str) -> list[str]:
        """The words of a command of the table."""
        template = getattr(self.table, name)
        if name == "create" and self.is_spot:
            template = f"{template} {self.table.spot}"
        words = [word.format(**self.fields, **fields) for word in template.split()]
        return ["gcloud", *words, *([f"--project={self.project}"] if self.project else [])]

    def call(self, name: str, *, seconds: float, **fields: str) -> str:
        """The output of a command. Raises `GcloudRefused` if it fails or takes longer."""
        return self.plain(self.command(name, **fields)[1:], seconds=seconds)

    def plain(self, words: list[str], *, seconds: float) -> str:
        """The output of any command of gcloud."""
        try:
            # A session of its own: Ctrl-C in the terminal ends this program, which then deletes the machine by gcloud.
            done = subprocess.run(
                [self._found(), *words],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GcloudRefused(f"gcloud did not end within {seconds:.0f} s", TIMED_OUT) from error
        if done.returncode:
            raise GcloudRefused((done.stderr + done.stdout)[-MAX_OUTPUT:], done.returncode)
        return done.stdout[:MAX_OUTPUT]

    @contextlib.contextmanager
    def stream(self, name: str, **fields: str) -> Iterator[LineReader]:
        """A long command and the lines that it prints. It is ended with the block."""
        process = subprocess.Popen(
            [self._found(), *self.command(name, **fields)[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            yield LineReader(process.stdout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()

    def _found(self) -> str:
        program = shutil.which(self.program)
        if program is None:
            raise TrilloraError("Google's command line, gcloud, is not installed.", where="PATH", do=INSTALL)
        return program


def explain(refused: GcloudRefused, gcloud: Gcloud, zones: tuple[str, ...]) -> TrilloraError:
    """The answer of gcloud as an error that says what to do."""
    zone = gcloud.fields["zone"]
    kind = gcloud.fields["slice"]
    others = " ".join(other for other in zones if other != zone) or "none that we know of"
    said = said_by(refused.text)
    where = f"gcloud, zone {zone}: {said}"
    match refused.reason:
        case "capacity":
            what = f"No {kind} is free in zone {zone} now."
            do = f"try again later, or in another zone with --zone: {others}"
        case "quota":
            name, limit = _QUOTA_NAME.search(refused.text), _LIMIT.search(refused.text)
            allowed = f" It allows {limit[1]}." if limit else ""
            what = f"The project's quota {name[1] + ' ' if name else ''}is used up or too small for {kind}.{allowed}"
            do = (
                "ask for more at https://console.cloud.google.com/iam-admin/quotas; or look for machines that hold it, "
                f"also FAILED and SUSPENDED ones: gcloud compute tpus queued-resources list --zone={zone}"
            )
        case "zone":
            what, do = f"Zone {zone} does not have {kind}.", f"use another --zone: {others}"
        case "exists":
            what = f"There is already a machine with the name {gcloud.fields['name']}."
            do = "follow it with --step follow, remove it with --step delete, or use another --name"
        case "missing" | "lost":
            what = f"There is no machine with the name {gcloud.fields['name']} any more."
            do = "start again with the same command, without --step"
        case "account":
            what, do = "gcloud is not logged in.", "run `gcloud auth login`"
        case "project":
            what, do = "gcloud has no project.", "use --project ID, or run `gcloud config set project ID`"
        case "disabled":
            what = "The API of this machine is not enabled in the project."
            do = "run `gcloud services enable tpu.googleapis.com compute.googleapis.com`"
        case "denied":
            what = "This account may not do that in this project."
            do = "ask for the roles TPU Admin and Service Account User, or use another --project"
        case _:
            what = f"gcloud failed with exit code {refused.code}."
            do = "run the command shown above by hand to see all that it prints"
    return TrilloraError(what, where=where, do=do)


def said_by(text: str) -> str:
    """The last lines of an answer, safe to print."""
    return " ".join(visible(mask_message(text)).split())[-SHOWN:] or "no message"


def _environment() -> dict[str, str]:
    """Of gcloud: it asks no questions, and has no tokens of others."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return {**kept, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "PYTHONUNBUFFERED": "1"}
