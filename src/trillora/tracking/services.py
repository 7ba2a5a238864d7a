"""Weights & Biases and trackio, through their own libraries, which are imported only if the recipe names them.

A missing library or login is an error, because the user can fix it before the run. A service that cannot be reached is
`ServiceUnavailable`, and the run continues without it. The run's folder stores one id, so a resumed run continues its
curves. Steps that are trained again have identical values: wandb ignores them, trackio overwrites them.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trillora.errors import TrilloraError, nearest
from trillora.files.atomic import write_file
from trillora.secrets import mask_secrets, mask_values, secrets_of_environment

ID_FILE = "tracking_id"
OPEN_SECONDS = 20  # to reach a service before the run continues without it
CLOSE_SECONDS = 5  # a preempted machine has 30 seconds left, and checkpoints come first


class ServiceUnavailable(Exception):
    """The service did not answer, although its library is installed."""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


def open_tracker(name: str, project: str, run_name: str, config: Mapping[str, object], folder: Path) -> Tracker:
    """Open a run at the service `name`, "wandb" or "trackio". `folder` stores the id of the run."""
    if name not in _OPENERS:
        near = nearest(name, _OPENERS)
        did_you_mean = f"did you mean '{near}'? " if near else ""
        raise TrilloraError(f"Unknown tracker '{name}'.", do=f"{did_you_mean}trackers: {', '.join(_OPENERS)}")
    known = secrets_of_environment()
    try:
        return _OPENERS[name](project, run_name, mask_values(config, known), _run_id(folder), folder)
    except (TrilloraError, ServiceUnavailable):
        raise
    except Exception as error:  # the libraries and their network code raise many types
        raise ServiceUnavailable(mask_secrets(f"{type(error).__name__}: {error}", known)) from None


def _open_wandb(project: str, run_name: str, config: Mapping[str, object], run_id: str, folder: Path) -> Tracker:
    try:
        import wandb
    except ImportError:
        raise _missing("wandb") from None
    settings = wandb.Settings(
        silent=True,
        console="off",  # do not capture the terminal
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,  # includes the command line, which may contain a token
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
            "You are not logged in to Weights & Biases.",
            do="run `wandb login`, or set WANDB_MODE=offline and upload the run later with `wandb sync`",
        ) from None
    return _Wandb(run)


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._run.step:  # wandb accepts only ascending steps
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def _open_trackio(project: str, run_name: str, config: Mapping[str, object], run_id: str, folder: Path) -> Tracker:
    try:
        import trackio
    except ImportError:
        raise _missing("trackio") from None
    with contextlib.redirect_stdout(sys.stderr):  # it prints a greeting, and our stdout may be JSON
        run = trackio.init(
            project=project,
            name=f"{run_name}-{run_id}",  # trackio identifies runs by name
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    return _Trackio(run, trackio.finish)


class _Trackio:
    def __init__(self, run: Any, finish: Callable[[], None]) -> None:
        self._run, self._finish = run, finish  # the function of the module: otherwise it finishes again at exit

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
        f"track.services names {package}, which is not installed.",
        do=f"pip install {package}   (or remove it from track.services)",
    )


def _run_id(folder: Path) -> str:
    """The run's id at the services: created once, then read from the folder."""
    file = folder / ID_FILE
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = file.read_text("ascii").strip()
        if found.isalnum() and len(found) <= 32:
            return found
    new = uuid.uuid4().hex[:8]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, new)
    return new
