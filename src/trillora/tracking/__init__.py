"""Experiment trackers: TensorBoard always, services such as wandb when `track.services` names them.

Trackers are listeners of the run's events. A tracker that fails is reported once and never stops the run. In a run that
trains several adapters together, each has its own series: `adapters/NAME/loss`, `adapters/NAME/eval_loss`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from trillora.events import AdaptersStarted, AdapterStep, Alarm, Evaluated, Event, Listener, Scored, Step
from trillora.runs.files import TENSORBOARD
from trillora.secrets import mask_secrets, secrets_of_environment
from trillora.tracking.services import ServiceUnavailable, Tracker, open_tracker
from trillora.tracking.tensorboard import EventFile


@contextmanager
def tracking_listener(
    run: Path,
    first_step: int,
    services: tuple[str, ...],
    project: str,
    config: Mapping[str, object],
    inner: Listener,
    every_steps: int = 1,
) -> Iterator[Listener]:
    """A listener that passes every event to `inner` and logs the metrics of steps and evaluations.

    `first_step` is the first step of this process; it and later steps replace what the trackers already have.
    `every_steps` is the number of steps between two that are logged; evaluations are all logged.
    """
    trackers: dict[str, Tracker] = {}
    adapters: set[str] = set()  # those that are trained together

    def open_event_file() -> None:
        trackers["TensorBoard"] = _EventFileTracker(run / TENSORBOARD, first_step)

    def listen(event: Event) -> None:
        inner(event)
        if isinstance(event, AdaptersStarted):
            adapters.update(event.adapters)
        if isinstance(event, AdapterStep):
            adapters.add(event.adapter)
        if isinstance(event, Step | AdapterStep) and event.step % every_steps:
            return
        if isinstance(event, Step | Evaluated | AdapterStep | Scored):
            values = numbers_of(event, adapters)
            for name, tracker in list(trackers.items()):
                if not _try(name, inner, partial(tracker.log, event.step, values)):
                    del trackers[name]
                    with suppress(Exception):  # it is already reported
                        tracker.finish()

    try:
        _try("TensorBoard", inner, open_event_file)
        for service in services:
            try:
                trackers[service] = open_tracker(service, project, run.resolve().name, config, run / "trackers")
            except ServiceUnavailable as error:
                inner(Alarm(f"{service} cannot be reached; the run continues without it. {error}"))
        yield listen
    finally:
        for name, tracker in trackers.items():
            _try(name, inner, tracker.finish)


def numbers_of(event: Step | Evaluated | AdapterStep | Scored, adapters: Collection[str] = ()) -> dict[str, float]:
    """The logged values, by tag. `adapters` are those that are trained together."""
    match event:
        case Evaluated():
            prefix = f"adapters/{event.stage}/eval_" if event.stage in adapters else "eval/"
            values = {name: getattr(event, name) for name in ("loss", "perplexity", "accuracy")}
            return {f"{prefix}{name}": value for name, value in {**values, **_logged(event)}.items()}
        case AdapterStep():
            names = ("loss", "learning_rate", "grad_norm")
            return {f"adapters/{event.adapter}/{name}": getattr(event, name) for name in names}
        case Scored():
            return {
                f"scores/{score.adapter}/{score.phase}/{name}": getattr(score, name)
                for score in event.scores
                for name in ("loss", "accuracy")
            }
        case Step() if adapters:  # the mean loss; each adapter has its own learning rate and gradient
            return {"train/loss": event.loss, "train/tokens_per_second": event.tokens_per_second}
        case Step():
            whole = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
            values = {name: getattr(event, name) for name in whole}
            return {f"train/{name}": value for name, value in {**values, **_logged(event)}.items()}


def _logged(event: Step | Evaluated) -> dict[str, float]:
    return {} if event.preferences is None else event.preferences.as_logged()


class _EventFileTracker:
    """An event file with the interface of a tracker."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._file = EventFile(folder, first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._file.scalar(tag, step, value)
        if any(tag.endswith(("eval/loss", "/eval_loss")) for tag in values):
            self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _try(name: str, listener: Listener, work: Callable[[], object]) -> bool:
    try:
        work()
    except Exception as error:  # a full disk, a broken service, any error of a library: training must not stop
        what = mask_secrets(f"{type(error).__name__}: {error}", secrets_of_environment())
        listener(Alarm(f"{name} failed; the run continues without it. {what}"))
        return False
    return True
