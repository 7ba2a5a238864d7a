"""Data as seen from a run: packing does not change the loss, shapes are announced, batches are built ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from chat_tokenizers import chat_tokenizer

from trillora.data.batches import Batches
from trillora.devices.mesh import MeshShape, local_rows, make_mesh, put_batch, replicated
from trillora.engine.loss import token_losses
from trillora.errors import TrilloraError
from trillora.events import Note
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.training.entries.stepper import NUM_AHEAD, placed_batches
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))


def batches_of(folder: Path, sequence_length: int = 64, **data: Any) -> Batches:
    recipe = load_recipe(tiny_run.recipe(folder, data=data, train={"sequence_length": sequence_length}))
    return tiny_run.batches_of(recipe, folder / "model")


def losses_by_document(batches: Batches, folder: Path) -> dict[tuple[int, ...], list[float]]:
    """Tokens of a document -> the loss of each of its trained tokens."""
    model = CausalLM(load_config(folder / "model"), dtype="float32", lora=None)
    one_device = replicated(make_mesh(jax.devices()[:1], MeshShape()))
    base = load_weights(folder / "model", model.module, model.layout, dict.fromkeys(model.layout, one_device))
    logits = jax.jit(model.logits)
    found = {}
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        inputs = {name: jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments")}
        losses = np.asarray(token_losses(logits(base, {}, inputs), jnp.asarray(batch["targets"])))
        for row in range(len(batch["tokens"])):
            for segment in range(1, int(batch["segments"][row].max()) + 1):
                slots = batch["segments"][row] == segment
                trained = slots & (batch["weights"][row] > 0)
                found[tuple(batch["tokens"][row][slots].tolist())] = losses[row][trained].tolist()
    return found


def test_packed_and_bucketed_losses_equal_those_of_single_documents(folder: Path) -> None:
    packed = batches_of(folder, 192, pack=True)
    alone = batches_of(folder, 192, pack=False)
    bucketed = batches_of(folder, 192, pack=False, num_length_buckets=4)
    assert packed.num_rows < alone.num_rows == bucketed.num_rows == 21
    assert len(bucketed.lengths) > 1
    expected = losses_by_document(alone, folder)
    assert len(expected) == 21 and sum(map(len, expected.values())) == alone.summary()["supervised"]
    for other in (packed, bucketed):
        found = losses_by_document(other, folder)
        assert found.keys() == expected.keys()
        for document, losses in expected.items():
            np.testing.assert_allclose(found[document], losses, atol=1e-5)  # float32 sums in a different order


def test_bucketed_run_compiles_and_announces_one_program_per_length(folder: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    settings = tiny_run.recipe(
        folder, data={"pack": False, "num_length_buckets": 4}, train={"steps": None, "epochs": 2}
    )
    lengths = batches_of(folder, pack=False, num_length_buckets=4).lengths
    result = train(load_recipe(settings), tmp_path / "run", listener=events.append)
    assert result.num_compiles == len({*lengths, 64})
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any(f"{len(lengths)} programs, for sequences of {', '.join(map(str, lengths))} tokens" in t for t in notes)
    assert all(np.isfinite(result.losses))


def test_rows_kept_for_validation_and_test_are_never_trained(folder: Path) -> None:
    split = {"validation": 0.3, "test": 0.2}
    everything = batches_of(folder)
    trained = batches_of(folder, split=split)
    assert 0 < len(trained.documents) < len(everything.documents) == 21
    kept = {tuple(trained.documents[i].tokens.tolist()) for i in range(len(trained.documents))}
    found = set()
    for step in range(trained.steps_per_epoch):
        batch = trained.batch(step)
        for row in range(len(batch["tokens"])):
            for segment in range(1, int(batch["segments"][row].max()) + 1):
                found.add(tuple(batch["tokens"][row][batch["segments"][row] == segment].tolist()))
    assert found == kept


def test_named_chat_template_is_saved_with_the_adapter(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, data={"chat_template": "instruct"}, train={"steps": 1, "sequence_length": 128})
    result = train(load_recipe(settings), tmp_path / "run")
    template = (result.adapter / "chat_template.jinja").read_text()
    messages = [{"role": "user", "content": "One?"}]
    assert chat_tokenizer("chatml").apply_chat_template(messages, tokenize=False, chat_template=template) == (
        "### Instruction:\nOne?\n\n### Response:\n"
    )


def test_arbitrary_json_trains_with_a_template(folder: Path, tmp_path: Path) -> None:
    rows = [{"finding": {"title": f"Port {n}"}, "risk": n % 3} for n in range(12)]
    (tmp_path / "rows.json").write_text(json.dumps({"found": {"net": rows}}))
    data = {
        "path": str(tmp_path / "rows.json"),
        "row_path": "found.*",
        "template": {"prompt": "{{ finding | tojson }}\n", "completion": "{{ {'risk': risk} | tojson }}"},
    }
    result = train(load_recipe(tiny_run.recipe(folder, data=data, train={"steps": 8})), tmp_path / "run")
    assert result.losses[-1] < result.losses[0]


def test_data_with_only_bad_rows_is_an_error_at_the_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n{"messages": 3}\n')
    settings = tiny_run.recipe(folder, data={"path": str(tmp_path / "bad.jsonl"), "on_bad_row": "skip"})
    with pytest.raises(TrilloraError, match="No row can be trained on") as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert caught.value.where == f"{tmp_path / 'bad.jsonl'}:1"


def test_batches_are_built_ahead_and_arrive_in_order(folder: Path) -> None:
    batches = batches_of(folder, pack=False)
    mesh = make_mesh(jax.devices()[:4], MeshShape(data=4))
    built: list[int] = []

    class Watched(Batches):
        def __init__(self) -> None:
            self.__dict__ = batches.__dict__

        def batch(self, step: int, places: Any = None) -> Any:
            built.append(step)
            return super().batch(step, places)

    arriving = placed_batches(Watched(), range(6), mesh)
    first = next(arriving)
    assert (np.asarray(first["tokens"]) == batches.batch(0)["tokens"]).all()
    for step, batch in enumerate(arriving, start=1):
        assert (np.asarray(batch["tokens"]) == batches.batch(step)["tokens"]).all()
    assert built == list(range(6))
    assert NUM_AHEAD >= 1


def test_a_process_needs_only_its_own_sequences() -> None:
    mesh = make_mesh(jax.devices()[:4], MeshShape(data=4))
    assert local_rows(8, mesh) == list(range(8))
    whole = {"tokens": np.arange(16).reshape(8, 2)}
    placed = put_batch(whole, mesh, num_rows=8)
    assert (np.asarray(placed["tokens"]) == whole["tokens"]).all()
    assert placed["tokens"].sharding.is_equivalent_to(put_batch(whole, mesh)["tokens"].sharding, 2)
