"""How far a run is: everything that a checkpoint stores except arrays.

A run is a list of entries, one after the other (`entries.timeline`). A stage is an entry with one adapter; phases, the
combinations of a sweep and learning rates are adapters that share one entry. They start together and take every step
together, each until it ends. So the step of an adapter that is still trained is the step of the run.

    position = Position.start(["train"], guessing=math.log(vocabulary_size))
    position.members[0].best_loss                   # None: not evaluated yet
    position.next_entry(["second"])                 # the first entry is over
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from trillora.training.divergence import DivergenceMonitor

Status = Literal["running", "finished", "stopped early", "dropped", "diverged"]


@dataclass
class MemberPosition:
    """The progress of one adapter in the current entry. Steps are counted from the start of the run."""

    name: str
    health: DivergenceMonitor
    step: NonNegativeInt = 0  # completed steps
    status: Status = "running"
    reason: str = ""  # why it ended
    measured_at: NonNegativeInt | None = None  # step that was last evaluated
    best_loss: float | None = None  # lowest evaluation loss
    best_accuracy: float | None = None  # of the same evaluation; of preferences, the share of pairs that are right
    best_step: PositiveInt | None = None
    num_worse: NonNegativeInt = 0  # evaluations since the last better one
    trial: list[float | None] = field(default_factory=list)  # losses since the last selection; None: not finite

    def __post_init__(self) -> None:
        """Refuses a checkpoint in which a part is ahead of the whole."""
        if (self.best_step or 0) > self.step or (self.measured_at or 0) > self.step:
            raise ValueError("it has a step after its last one")
        if (self.best_loss is None) != (self.best_step is None):
            raise ValueError("best_loss and best_step must both be set, or none of them")

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    def end(self, status: Status, reason: str) -> None:
        self.status, self.reason, self.trial = status, reason, []


@dataclass
class Position:
    """The progress of a run."""

    members: list[MemberPosition]
    lanes: list[NonNegativeInt]  # members in the step. One that diverges stays until the next evaluation, idle
    entry: NonNegativeInt = 0
    step: NonNegativeInt = 0  # completed steps of the entry
    global_step: NonNegativeInt = 0  # completed steps of the run

    def __post_init__(self) -> None:
        if self.step > self.global_step:
            raise ValueError("step is after global_step")
        if not {*self.running} <= {*self.lanes} <= {*range(len(self.members))} or sorted({*self.lanes}) != self.lanes:
            raise ValueError("lanes are not the numbers of the adapters that are trained")
        for member in self.members:
            if member.step > self.global_step or (member.is_running and member.step != self.global_step):
                raise ValueError("an adapter is not at the step of the run")

    @classmethod
    def start(cls, names: Sequence[str], guessing: float) -> Position:
        """`guessing`: the loss of uniform guessing."""
        return cls([MemberPosition(name, DivergenceMonitor(guessing)) for name in names], list(range(len(names))))

    @property
    def running(self) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.is_running]

    def has_state(self, member: MemberPosition) -> bool:
        """Whether its arrays are in a checkpoint. The only adapter's always are: the run may be trained longer."""
        return member.is_running or len(self.members) == 1

    def advance(self) -> None:
        """One more step."""
        self.step += 1
        self.global_step += 1
        for number in self.running:
            self.members[number].step = self.global_step

    def next_entry(self, names: Sequence[str] | None) -> None:
        """To the first step of the next entry; None after the last one, whose members keep how they ended."""
        self.entry += 1
        if names is None:
            return
        [before] = self.members
        before.health.new_stage()
        self.step, self.lanes = 0, list(range(len(names)))
        self.members = [MemberPosition(name, before.health, self.global_step) for name in names]

    def reopen(self) -> None:
        """Back into the last entry, which has become longer."""
        [member] = self.members
        self.entry, self.lanes = self.entry - 1, [0]
        member.status, member.reason = "running", ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
