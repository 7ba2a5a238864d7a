"""Weights & Biases and trackio, through their own libraries: asked for by name, imported only then.

What a person can mend before the run (no library, no login) is an error; a service that is away is `ServiceAway`, and
the run goes on without it. A run keeps one id in its folder, so that a resumed run continues its curves; steps trained
a second time come out the same, bit for bit, and are left out or drawn over themselves.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trillora.errors import TrilloraError, nearest
from trillora.secrets import mask_secrets, mask_values, secrets_of_environment

ID_FILE = "tracking_id"
OPEN_SECONDS = 20  # to reach a service before the run goes on without it
CLOSE_SECONDS = 5  # a machine that is taken away gives 30 seconds; checkpoints come first


class ServiceAway(Exception):
    """The service did not answer; its library is there, and nothing is wrong with the recipe."""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


def open_tracker(name: str, project: str, run_name: str, config: dict[str, Any], folder: Path) -> Tracker:
    """A run at the service `name`: "wandb" or "trackio". `folder` keeps what must outlive the process."""
    if name not in _OPENERS:
        near = nearest(name, _OPENERS)
        did_you_mean = f"did you mean '{near}'? " if near else ""
        raise TrilloraError(f"Unknown tracker '{name}'.", do=f"{did_you_mean}trackers: {', '.join(_OPENERS)}")
    known = secrets_of_environment()
    try:
        return _OPENERS[name](project, run_name, mask_values(config, known), _own_id(folder), folder)
    except (TrilloraError, ServiceAway):
        raise
    except Exception as error:  # each library and its network code raise their own
        raise ServiceAway(mask_secrets(f"{type(error).__name__}: {error}", known)) from None


def _open_wandb(project: str, run_name: str, config: dict[str, Any], run_id: str, folder: Path) -> Tracker:
    try:
        import wandb
    except ImportError:
        raise _missing("wandb") from None
    settings = wandb.Settings(
        silent=True,
        console="off",  # the terminal is the run's own
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,  # the command line, where a token may stand
        init_timeout=OPEN_SECONDS,
        finish_timeout=CLOSE_SECONDS,
        finish_timeout_raises=False,
    )
    try:
        run = wandb.init(
            project=project, name=run_name, config=config, dir=folder, id=run_id, resume="allow", settings=settings
        )
    except wandb.errors.UsageError:
        raise TrilloraError(
            "Weights & Biases does not know who you are.",
            do="run `wandb login`, or set WANDB_MODE=offline and send the run later with `wandb sync`",
        ) from None
    return _Wandb(run)


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._run.step:  # the service takes steps in order only; what it has, it keeps
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def _open_trackio(project: str, run_name: str, config: dict[str, Any], run_id: str, folder: Path) -> Tracker:
    try:
        import trackio
    except ImportError:
        raise _missing("trackio") from None
    with contextlib.redirect_stdout(sys.stderr):  # it greets; our standard output may be JSON
        run = trackio.init(
            project=project,
            name=f"{run_name}-{run_id}",  # runs are told apart by name alone
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    return _Trackio(run, trackio.finish)


class _Trackio:
    def __init__(self, run: Any, finish: Callable[[], None]) -> None:
        self._run, self._finish = run, finish  # of the module: it finishes at exit what was not finished through it

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._finish()


_OPENERS: dict[str, Callable[[str, str, dict[str, Any], str, Path], Tracker]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}


def _missing(package: str) -> TrilloraError:
    return TrilloraError(
        f"The run is to be followed by {package}, which is not installed.",
        do=f"pip install {package}   (or take it out of the recipe)",
    )


def _own_id(folder: Path) -> str:
    """The id the services know this run by: made once, then read."""
    file = folder / ID_FILE
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = file.read_text("ascii").strip()
        if found.isalnum() and len(found) <= 32:
            return found
    made = uuid.uuid4().hex[:8]
    folder.mkdir(parents=True, exist_ok=True)
    making = file.with_name(f".{file.name}.{os.getpid()}")
    making.write_text(made, "ascii")
    os.replace(making, file)
    return made
