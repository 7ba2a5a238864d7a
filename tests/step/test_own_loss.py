"""`train.loss: my_loss.py`: examples equal the built-in losses, and what cannot be trained with is refused before."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run

from trillora.engine.preference.answers import Pairs, counts_of_pairs
from trillora.engine.preference.losses import PAIR_LOSSES, LossNumbers, sum_of_pairs
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe
from trillora.step.loss.own_loss import _random_pairs, load_loss
from trillora.training.trainer import train

EXAMPLES = Path(__file__).parents[2] / "recipes" / "losses"
DPO = """
import jax

def loss(policy, reference, pairs, options):
    chosen, rejected = pairs.sums(policy - reference)
    return -jax.nn.log_sigmoid(options.beta * (chosen - rejected))
"""


def written(folder: Path, body: str, name: str = "mine.py") -> str:
    (folder / name).write_text(body, "utf-8")
    return str(folder / name)


def values(loss: object) -> np.ndarray:
    batch, policy, reference = _random_pairs((0, 1, 2, 3), 40)
    pairs = Pairs.of(batch, counts_of_pairs(batch))

    def total(policy: jax.Array) -> jax.Array:
        return sum_of_pairs([(1.0, loss)], policy, reference, pairs, LossNumbers(beta=0.7))[0]  # type: ignore[list-item]

    value, gradient = jax.value_and_grad(total)(policy)
    return np.append(np.asarray(gradient).ravel(), value)


@pytest.mark.parametrize(("file", "name"), [("ipo.py", "ipo"), ("slic.py", "hinge")])
def test_losses_of_papers_equal_the_built_in_ones(file: str, name: str) -> None:
    np.testing.assert_allclose(values(load_loss(str(EXAMPLES / file))), values(PAIR_LOSSES[name]), rtol=1e-6)


def test_dpo_positive_is_dpo_where_no_chosen_answer_loses(tmp_path: Path) -> None:
    assert len((EXAMPLES / "dpop.py").read_text("utf-8").splitlines()) <= 10
    assert (values(load_loss(str(EXAMPLES / "dpop.py"))) != values(PAIR_LOSSES["sigmoid"])).any()
    np.testing.assert_allclose(values(load_loss(written(tmp_path, DPO))), values(PAIR_LOSSES["sigmoid"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = 1", "no function `loss`"),
        ("def loss(:", "This is not Python"),
        ("import socket\ndef loss(*_): ...", "cannot import socket"),
        ("from urllib import request\ndef loss(*_): ...", "cannot import urllib"),
        ("raise ValueError('too early')", "The file cannot be run: ValueError: too early"),
        ("def loss(policy, reference, pairs, options):\n    return policy[99, 99, 99]", "fails on random pairs"),
        ("def loss(policy, reference, pairs, options):\n    return 1.0", "returns float"),
        (
            "def loss(policy, reference, pairs, options):\n    return pairs.sums(policy)[0].sum()",
            "not one number for each",
        ),
        (
            "def loss(policy, reference, pairs, options):\n    return pairs.sums(reference)[0]",
            "gradient of the loss is zero",
        ),
        (
            "import jax.numpy as jnp\ndef loss(policy, reference, pairs, options):\n"
            "    return jnp.log(pairs.sums(policy)[0])",
            "not finite",
        ),
        (
            "import jax.numpy as jnp\ndef loss(policy, reference, pairs, options):\n"
            "    return pairs.sums(policy)[0] * jnp.arange(pairs.lengths[0].shape[1])",
            "depends on the order of the pairs",
        ),
        (
            "def loss(policy, reference, pairs, options):\n    return pairs.sums(policy)[0] * policy.shape[1]",
            "depends on the padding",
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(TrilloraError) as error:
        load_loss(written(tmp_path, body))
    assert words in str(error.value) and "mine.py" in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))
    tiny_run.write_pairs(folder / "pairs.jsonl")
    return folder


def test_a_run_with_a_file_is_the_run_with_the_name_and_knows_when_the_file_changes(
    folder: Path, tmp_path: Path
) -> None:
    options = {"sequence_length": 96, "batch_size": 4, "steps": 3, "checkpoint_every": 2}
    values = tiny_run.recipe(folder, train={**options, "loss": "dpo"}, data={"path": str(folder / "pairs.jsonl")})
    named = train(load_recipe(values), tmp_path / "named")
    file = written(tmp_path, DPO)
    values["train"]["loss"] = file
    own = train(load_recipe(values), tmp_path / "own")
    assert own.losses == pytest.approx(named.losses, rel=1e-5)
    assert any("mine.py" in name for name in json.loads((tmp_path / "own" / "run.json").read_text("utf-8"))["identity"])
    (tmp_path / "moved").mkdir()
    values["train"] |= {"loss": written(tmp_path / "moved", DPO), "steps": 4}
    assert len(train(load_recipe(values), tmp_path / "own").losses) == 4  # only its content counts
    written(tmp_path / "moved", DPO + "# another\n")
    values["train"]["steps"] = 5
    with pytest.raises(TrilloraError, match=r"train loss mine\.py has changed"):
        train(load_recipe(values), tmp_path / "own")


def test_the_recipe_of_a_run_does_not_bring_code(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, DPO)
    values = tiny_run.recipe(folder, train={"sequence_length": 96, "steps": 1, "loss": file})
    values["data"]["path"] = str(folder / "pairs.jsonl")
    train(load_recipe(values), tmp_path / "run")
    with pytest.raises(TrilloraError, match="asks to run the code of a loss"):
        load_recipe(tmp_path / "run" / "recipe.json")
    assert load_recipe(tmp_path / "run" / "recipe.json", [f"train.loss={file}"]).train.losses == (file,)
