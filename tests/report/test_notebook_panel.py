"""How a run is shown in a notebook: one panel that is updated in place, and few lines."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import IPython.display
import pytest
from console_panels import step
from executed_notebooks import execute_cells
from rich.console import Console

import trillora
from trillora.events import Event, Note, Progress, Sample, Sampled
from trillora.report import console as console_module
from trillora.report.console import console_listener

pytestmark = pytest.mark.filterwarnings("default")  # of Jupyter's libraries

SOURCE = Path(trillora.__file__).parent.parent
TRAINING = f"""
import sys
sys.path[:0] = [{str(SOURCE)!r}, {str(Path(__file__).parents[1] / "support")!r}]
from console_panels import step
from trillora.events import Note, Progress
from trillora.report import console
console.QUIET_SECONDS = 0
publish, sent = get_ipython().display_pub.publish, []
get_ipython().display_pub.publish = lambda *a, **k: (sent.append(k.get("update")), publish(*a, **k))
with console.console_listener() as listener:
    listener(Progress("Loading weights", 1, 2))
    import time; time.sleep(0.5)  # a thread shows it
    listener(Progress("Loading weights", 2, 2))
    for number in range(1, 10_001):
        listener(step(number, 10_000))
    listener(Note("Adapter written"))
"""
LINES = """
print(sent)
from trillora.report.safe_console import SafeConsole
with SafeConsole() as shown:
    for number in range(20):
        shown.print(f"line {number}")
"""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a kernel would send to the browser, and an output that is replaced."""
    sent: list[dict[str, Any]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw and update == bool(sent) and all(display_id == other["id"] for other in sent)
        sent.append({"id": display_id, **data})

    monkeypatch.setattr(IPython.display, "display", display)
    return sent


def in_a_cell(events: list[Event]) -> list[str]:
    """Gives events to the listener, and returns the lines."""
    inside = Console(force_jupyter=True)
    inside.file = out = io.StringIO()
    with console_listener(inside) as listener:
        for event in events:
            listener(event)
    return out.getvalue().splitlines()


def test_a_kernel_has_one_panel_that_changes_and_few_lines(tmp_path: Path) -> None:
    training, lines = execute_cells([TRAINING, LINES], tmp_path)
    [panel] = [output for output in training if output.output_type == "display_data"]
    assert "step 10000/10000 ━" in panel.data["text/plain"] and "100%" in panel.data["text/plain"]
    assert "<b" not in panel.data["text/html"] and "step 10000/10000" in panel.data["text/html"]
    assert "Loading weights" not in panel.data["text/plain"]
    text = "".join(output.text for output in training if output.output_type == "stream")
    assert 20 <= text.count("step ") <= 22 and text.endswith("Adapter written\n") and "Loading" not in text
    [sent, together] = lines  # what is printed together is one output
    assert together.data["text/plain"].count("line ") == 20
    assert sent.text.startswith("[False, True, ") and sent.text.count("True") < 30  # of 10,000 steps


def test_the_panel_changes_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch, shown: list[dict[str, Any]]) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def steps() -> Any:
        for number in range(1, 1001):
            clock[0] += 0.01
            yield step(number, 1000)

    in_a_cell(steps())
    assert 10 <= len(shown) <= 12 and "step 1000/1000" in shown[-1]["text/plain"]  # ten seconds


def test_bars_of_other_work_disappear(monkeypatch: pytest.MonkeyPatch, shown: list[dict[str, Any]]) -> None:
    assert in_a_cell([Note("Model m"), Progress("short", 0, 2), Progress("short", 2, 2)]) == ["Model m"]
    assert shown == []  # it is shown after two seconds
    monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.01)
    with console_listener(Console(force_jupyter=True)) as listener:
        listener(Progress("long", 1, 2))
        deadline = time.monotonic() + 30
        while not shown and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "long ━" in shown[0]["text/plain"] and "1/2" in shown[0]["text/html"]
    assert (shown[-1]["text/plain"].strip(), shown[-1]["text/html"]) == ("", "")


def test_untrusted_text_is_text(shown: list[dict[str, Any]]) -> None:
    hostile = "<script>x</script>\x1b[2J\u202e"
    lines = in_a_cell([Sampled(1, "a", (Sample(hostile, hostile),)), step(1, stage=hostile)])
    assert len(lines) == 4 and "<script>" not in shown[-1]["text/html"] and "&lt;script&gt;" in shown[-1]["text/html"]
    for text in (*lines, *shown[-1].values()):
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
