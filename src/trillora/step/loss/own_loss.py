"""A loss of pairs that a person wrote: `train.loss: my_loss.py`.

    import jax

    def loss(policy, reference, pairs, options):
        chosen, rejected = pairs.sums(policy - reference)
        return -jax.nn.log_sigmoid(options.beta * (chosen - rejected))

`engine.preference.losses` says what the arguments are. The file is run like any program of the person at the keyboard,
so it is only read if the recipe that was given on the command line names it, and never from the recipe of a run. It may
import jax and mathematics only: a step is traced once, and everything else would happen once too. Before training, it
is tried on random numbers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.engine.preference.answers import Pairs, counts_of_pairs
from trillora.engine.preference.losses import LossNumbers, PairLoss, sum_of_pairs
from trillora.errors import TrilloraError

NAME = "loss"
MAX_BYTES = 100_000
IMPORTS = ("__future__", "collections", "dataclasses", "functools", "jax", "math", "numpy", "typing")
FORM = "def loss(policy, reference, pairs, options): …"
TOLERANCE = 1e-4  # between the same pairs in another order: float32


@functools.cache
def load_loss(file: str) -> PairLoss:
    """The function `loss` of a file, which has passed its tests."""
    source = read_loss(file)
    values: dict[str, Any] = {"__name__": "trillora_loss", "__file__": file}
    try:
        exec(compile(source, file, "exec"), values)  # noqa: S102  (the person at the keyboard names the file)
    except Exception as error:
        raise _broken(file, error, "The file cannot be run") from None
    function = values.get(NAME)
    if not callable(function):
        what = f"This file has no function `{NAME}`."
        raise TrilloraError(what, where=file, do=f"write {FORM}; docs/preferences.md has examples")
    check_loss(function, file)
    chosen: PairLoss = function
    return chosen


def read_loss(file: str) -> str:
    """The text of the file. It must be Python, and import nothing but mathematics."""
    try:
        data = Path(file).read_bytes()[: MAX_BYTES + 1]
        source = data.decode("utf-8")
    except FileNotFoundError:
        raise TrilloraError("There is no such file.", where=f"train.loss: {file}", do="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TrilloraError(f"The file cannot be read: {error}.", where=file, do="give a Python file") from None
    if len(data) > MAX_BYTES:
        what = f"The file is larger than {MAX_BYTES:,} bytes."
        raise TrilloraError(what, where=file, do="a loss is a short function")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        where = f"{file}:{getattr(error, 'lineno', None) or 1}"
        raise TrilloraError(f"This is not Python: {error}.", where=where, do="correct this line") from None
    for line, name in _imported(tree):
        if name.partition(".")[0] not in IMPORTS:
            what = f"A loss cannot import {name}: it is traced once, before the first step."
            do = f"compute with jax; a loss may import {', '.join(IMPORTS[1:])}"
            raise TrilloraError(what, where=f"{file}:{line}", do=do)
    return source


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "."


def check_loss(function: PairLoss, file: str) -> None:
    """Tries a loss on random log-probabilities: its shape, its values, its gradient, and that neither the order of the
    pairs nor the padding matters."""
    value, gradient = _tried(function, file, order=(0, 1, 2, 3), length=40)
    if not np.isfinite(value) or not np.isfinite(gradient).all():
        what = f"The loss of random pairs is {value}, or its gradient is not finite."
        do = "guard logarithms and divisions; jnp.where needs a safe argument in the branch that is not used"
        raise TrilloraError(what, where=file, do=do)
    if not gradient.any():
        what = "The gradient of the loss is zero, so nothing would be learned."
        raise TrilloraError(what, where=file, do="use `policy` in the result; stop_gradient only on the reference")
    for order, length, what in (((2, 0, 3, 1), 40, "order of the pairs"), ((0, 1, 2, 3), 56, "padding")):
        again = _tried(function, file, order, length)[0]
        if abs(again - value) > TOLERANCE * max(abs(value), 1):
            text = f"The loss depends on the {what}: {value:.6g} and {again:.6g} for the same pairs."
            raise TrilloraError(text, where=file, do="use pairs.sums and pairs.means; return one number per pair")


def _tried(function: PairLoss, file: str, order: tuple[int, ...], length: int) -> tuple[float, np.ndarray]:
    batch, policy, reference = _random_pairs(order, length)

    def total(policy: jax.Array) -> jax.Array:
        pairs = Pairs.of(batch, counts_of_pairs(batch))
        try:
            found = function(policy, reference, pairs, LossNumbers(beta=0.3))
        except Exception as error:
            raise _broken(file, error, "The loss fails on random pairs") from None
        expected = pairs.pair_weight_BP.shape
        if getattr(found, "shape", None) != expected or not jnp.issubdtype(found.dtype, jnp.floating):
            shown = f"{found.dtype}{list(found.shape)}" if hasattr(found, "shape") else type(found).__name__
            text = f"The loss returns {shown}, and not one number for each pair, float32{list(expected)}."
            raise TrilloraError(text, where=file, do="return an array like pairs.sums(policy)[0]")
        return sum_of_pairs([(1.0, lambda *_: found)], policy, reference, pairs, LossNumbers())[0]

    value, gradient = jax.value_and_grad(total)(policy)
    return float(value), np.asarray(gradient)


def _random_pairs(order: tuple[int, ...], length: int) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Two sequences with two pairs each, in this order."""
    names = {"segments": np.int32, "weights": np.float32, "policy": np.float32, "reference": np.float32}
    arrays = {name: np.zeros((2, length), dtype) for name, dtype in names.items()}
    for place, pair in enumerate(order):
        random = np.random.default_rng(pair)
        row, half = divmod(place, 2)
        start = 0 if half == 0 else int((arrays["segments"][row] > 0).sum())
        for side, sign in enumerate((1, -1)):
            prompt, answer = int(random.integers(1, 4)), int(random.integers(1, 6))
            end = start + prompt + answer
            arrays["segments"][row, start:end] = 2 * half + side + 1
            arrays["weights"][row, end - answer : end] = sign
            for name in ("policy", "reference"):
                arrays[name][row, end - answer : end] = random.uniform(-4, -0.05, answer)
            start = end
    batch = {name: jnp.asarray(array) for name, array in arrays.items()}
    return batch, batch["policy"], batch["reference"]


def _broken(file: str, error: Exception, what: str) -> TrilloraError:
    line = 0
    trace = error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    text = f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return TrilloraError(f"{text}.", where=f"{file}:{line}" if line else file, do=f"the form is {FORM}")
