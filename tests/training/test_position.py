"""The progress of a run: what a checkpoint says about it, and what it may not say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trillora.training.state.position import Position

POSITION = TypeAdapter(Position)


def started(*names: str) -> Position:
    return Position.start(names, guessing=math.log(400))


def test_all_adapters_of_an_entry_take_every_step() -> None:
    position = started("a", "b", "c")
    position.advance()
    position.members[1].end("diverged", "too high a rate")
    position.advance()
    assert position.running == [0, 2] and position.lanes == [0, 1, 2]
    assert (position.step, position.global_step) == (2, 2)
    assert [member.step for member in position.members] == [2, 1, 2]


def test_the_next_stage_counts_its_own_steps_and_has_no_best_evaluation_yet() -> None:
    position = started("first")
    for _ in range(3):
        position.advance()
    position.members[0].best_loss, position.members[0].best_step = 1.5, 2
    health = position.members[0].health
    health.observe(3, 1.0, 1.0, skipped=True)
    position.members[0].end("finished", "")
    position.next_entry(["second"])
    [member] = position.members
    assert (position.entry, position.step, position.global_step, member.step) == (1, 0, 3, 3)
    assert member.is_running and member.best_step is None and member.health.num_bad == 1
    position.next_entry(None)
    assert position.entry == 2 and position.members == [member], "the last entry keeps how it ended"


def test_what_is_written_is_read_back() -> None:
    position = started("a", "b")
    position.advance()
    position.members[0].trial = [2.0, None]
    position.members[0].measured_at = 1
    assert POSITION.validate_python(position.to_dict()) == position
    assert POSITION.validate_json(POSITION.dump_json(position), strict=True) == position


def change(position: dict[str, Any], **values: Any) -> None:
    position["members"][0] |= values


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: change(p, best_step=3, best_loss=1.0), "after its last one"),
        (lambda p: change(p, measured_at=3), "after its last one"),
        (lambda p: change(p, best_loss=1.0), "both be set"),
        (lambda p: change(p, step=1), "not at the step of the run"),
        (lambda p: change(p, step=3, status="finished"), "not at the step of the run"),
        (lambda p: p.update(step=3), "after global_step"),
        (lambda p: p.update(lanes=[1]), "lanes are not"),
        (lambda p: p.update(lanes=[0, 1, 2]), "lanes are not"),
        (lambda p: p.update(lanes=[1, 0]), "lanes are not"),
        (lambda p: change(p, status="asleep"), "status"),
        (lambda p: change(p, step=-1), "greater than or equal to 0"),
    ],
)
def test_a_position_that_cannot_be_is_refused(damage: Callable[[dict[str, Any]], None], reason: str) -> None:
    position = started("a", "b")
    position.advance()
    position.advance()
    values = position.to_dict()
    damage(values)
    with pytest.raises(ValidationError, match=reason):
        POSITION.validate_python(values)
