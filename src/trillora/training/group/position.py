"""How far each adapter of a group is: everything a checkpoint stores about it except arrays.

All adapters start together and take every step together, each until it ends: after its last step, early because it no
longer improves, dropped because another learning rate is better, or because it diverged. So the step of a running
adapter is the step of the group.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trillora.training.divergence import DivergenceMonitor

Status = Literal["running", "finished", "stopped early", "dropped", "diverged"]


@dataclass
class MemberPosition:
    """The progress of one adapter."""

    health: DivergenceMonitor
    step: int = 0  # completed steps
    status: Status = "running"
    reason: str = ""  # why it ended
    measured_at: int | None = None  # step that was last evaluated
    best_loss: float | None = None  # lowest evaluation loss
    best_step: int | None = None
    num_worse: int = 0  # evaluations since the last better one
    trial: list[float] = field(default_factory=list)  # training losses since the last selection of learning rates

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    def end(self, status: Status, reason: str) -> None:
        self.status, self.reason, self.trial = status, reason, []


@dataclass
class GroupPosition:
    """The progress of all adapters."""

    members: list[MemberPosition]
    lanes: list[int]  # members in the calls of the step. One that diverges stays until the next evaluation, idle
    step: int = 0  # completed steps of the run

    @classmethod
    def start(cls, members: list[MemberPosition]) -> GroupPosition:
        return cls(members, list(range(len(members))))

    @property
    def running(self) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.is_running]

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "lanes": self.lanes,
            "members": [{**asdict(member), "health": member.health.to_dict()} for member in self.members],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GroupPosition:
        members = [
            MemberPosition(**{**member, "health": DivergenceMonitor.from_dict(member["health"])})
            for member in values["members"]
        ]
        return cls(members, values["lanes"], values["step"])
