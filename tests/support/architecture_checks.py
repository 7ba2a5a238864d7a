"""Checks that our engine computes the same as plain PyTorch, for one architecture.

Used by `test_architectures.py` for a suite that covers every mechanism, and by `make architectures` for all tiny
models. The reference applies its adapters with forward hooks, so it uses none of our code.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models
import torch

from trillora.engine.loss import chunked_loss, token_losses
from trillora.model.adapter_parameters import name_in_memory
from trillora.model.adapters import adapter_files, fit_adapter
from trillora.model.bridge import CausalLM
from trillora.model.layout import Tree, stack, unstack
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.expert_parameters import expert_parameters

ROWS, TOKENS = 2, 24
DOCUMENTS = (13, 11)  # lengths of two documents packed into one sequence
LORA = LoraSpec(rank=4, alpha=8)
LOGITS = 1e-4  # relative to the largest logit: float32 sums in another order
GRADIENTS = 1e-3  # relative to the largest gradient of the matrix: forward and backward pass
LEAK = 50 * LOGITS  # packing without segment ids must be wrong by much more than rounding
# Both errors are random samples of the same rounding. Where rounding often routes tokens to other experts, over 16
# sequences they differ by up to 20 percent (PhiMoE: 0.88 to 1.19 for six samples); over this many, by a few.
BFLOAT16_ROWS, BFLOAT16_LUCK = 128, 1.1


@dataclass
class Answer:
    passed: bool
    detail: str


class Subject:
    """One tiny model with random adapters: PyTorch's results, and our model with the same weights."""

    def __init__(self, name: str, num_layers: int | None = None, bfloat16_rows: int = BFLOAT16_ROWS) -> None:
        self.name, self.num_layers, self.bfloat16_rows = name, num_layers, bfloat16_rows
        self.torch_model = tiny_models.build(name, num_layers=num_layers)
        self.config = tiny_models.configuration(name, num_layers)
        self.tokens = np.random.default_rng(0).integers(3, 256, (ROWS, TOKENS)).astype(np.int32)
        self.adapter = self._random_adapter()
        self.logits, self.gradients = self._reference(self.torch_model)

    def ours(self, **options: Any) -> CausalLM:
        return CausalLM(self.config, lora=LORA, **options)

    def _random_adapter(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(1)
        layout = self.ours(scan=False).adapter_layout
        return {name: generator.normal(0, 0.2, leaf.shape).astype(np.float32) for name, leaf in layout.items()}

    def _reference(self, model: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Whole logits and the gradients of the mean loss, by autograd."""
        parameters = attach_adapter(model, self.adapter)
        ids = torch.tensor(self.tokens, dtype=torch.int64)
        logits = model(input_ids=ids, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        losses.backward()
        gradients = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
        return logits.detach().float().numpy(), gradients

    def weights(self, ours: CausalLM, model: Any | None = None) -> tuple[Tree, Tree]:
        """The reference's weights and adapter in our layout."""
        base = base_weights(ours, self.torch_model if model is None else model)
        return base, stack(self.adapter, ours.adapter_layout)


def base_weights(ours: CausalLM, source: Any) -> Tree:
    """The weights of a PyTorch model in our layout."""
    flat = {name: to_jax(t) for name, t in (*source.named_parameters(), *source.named_buffers())}
    return stack({n: flat[n] for leaf in ours.layout.values() for n in leaf.names}, ours.layout)


def attach_adapter(model: Any, adapter: dict[str, np.ndarray]) -> dict[str, torch.nn.Parameter]:
    """LoRA in plain PyTorch: a forward hook on every target."""
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in adapter.items()}

    def hook(name: str) -> Callable[..., torch.Tensor]:
        a, b = parameters[f"{name}.lora_a"], parameters[f"{name}.lora_b"]
        return lambda module, args, out: out + (args[0] @ a.to(out.dtype).T) @ b.to(out.dtype).T * LORA.scale

    for name in {key.rsplit(".", 1)[0] for key in adapter}:
        model.get_submodule(name).register_forward_hook(hook(name))
    return parameters


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy. `jnp.asarray` would compile a program for every shape."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.bfloat16:
        return jax.device_put(tensor.view(torch.int16).numpy().view(jnp.bfloat16))
    return jax.device_put(tensor.numpy())


def distance(ours: Any, reference: np.ndarray) -> float:
    """The largest difference, relative to the reference's largest value."""
    ours = np.asarray(ours, np.float64)
    if ours.shape != reference.shape or not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def gradient_distance(ours: dict[str, Any], reference: dict[str, np.ndarray]) -> float:
    """The worst relative difference of any matrix. For a matrix with very small gradients it is relative to a
    thousandth of the largest gradient."""
    floor = 1e-3 * max(np.abs(g).max() for g in reference.values())
    worst = 0.0
    for name, gradient in ours.items():
        expected = reference.get(name, np.zeros(gradient.shape))  # unused parameters: None in PyTorch, zeros in JAX
        error = np.abs(np.asarray(gradient, np.float64) - expected).max()
        worst = max(worst, float(error / max(np.abs(expected).max(), floor)))
    assert set(reference) <= set(ours)
    return worst


def logits_and_gradients(ours: CausalLM, base: Tree, adapter: Tree, tokens: np.ndarray) -> tuple[jax.Array, Tree]:
    """Computed as in training: hidden states, then the loss in chunks. The logits come from the head on all tokens."""

    def loss(adapter: Tree, base: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        targets = jnp.roll(tokens, -1, axis=1)
        weights = jnp.ones(tokens.shape).at[:, -1].set(0)
        if not ours.has_separate_head:
            logits = ours.logits(base, adapter, {"tokens": tokens})
            return (token_losses(logits, targets) * weights).sum() / weights.sum(), logits
        hidden = ours.hidden(base, adapter, {"tokens": tokens})
        head_adapter = ours.head_adapter(adapter)
        total = chunked_loss(ours.head, base, head_adapter, hidden, targets, weights, chunk=7)
        return total / weights.sum(), ours.head(base, head_adapter, hidden)

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter, base, jnp.asarray(tokens))
    return logits, jax.device_get(gradients)  # slices of arrays on a device would be compiled


def packed_logits(subject: Subject, ours: CausalLM, *, segments: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two documents packed into one sequence, and PyTorch's for each of them alone."""
    documents = [subject.tokens[i, :length] for i, length in enumerate(DOCUMENTS)]
    inputs = {
        "tokens": np.concatenate(documents)[None],
        "positions": np.concatenate([np.arange(n) for n in DOCUMENTS])[None],
        "segments": np.repeat([1, 2], DOCUMENTS)[None],
    }
    if not segments:
        del inputs["segments"]
    base, adapter = subject.weights(ours)
    arrays = {name: jnp.asarray(a, jnp.int32) for name, a in inputs.items()}
    packed = jax.jit(ours.logits)(base, adapter, arrays)
    with torch.no_grad():
        separate = [
            subject.torch_model(input_ids=torch.tensor(d, dtype=torch.int64)[None], use_cache=False).logits[0]
            for d in documents
        ]
    return np.asarray(packed)[0], torch.cat(separate).numpy()


def check_logits_and_gradients(subject: Subject, *, scan: bool) -> Answer:
    ours = subject.ours(scan=scan)
    base, adapter = subject.weights(ours)
    logits, gradients = logits_and_gradients(ours, base, adapter, subject.tokens)
    off = distance(logits, subject.logits)
    gradient_off = gradient_distance(unstack(gradients, ours.adapter_layout), subject.gradients)
    segments = " ".join(f"{s.start}+{s.period}x{s.repetitions}" for s in ours.stack.segments) if scan else ""
    return Answer(off <= LOGITS and gradient_off <= GRADIENTS, f"{off:.0e} {gradient_off:.0e} {segments}".strip())


def check_packing(subject: Subject) -> Answer:
    packed, separate = packed_logits(subject, subject.ours(), segments=True)
    off = distance(packed, separate)
    return Answer(off <= LOGITS, f"{off:.0e}")


def check_leak_without_segments(subject: Subject) -> Answer:
    """The control: if packing without segment ids gave the same result, the check above would prove nothing."""
    packed, separate = packed_logits(subject, subject.ours(), segments=False)
    off = distance(packed, separate)
    return Answer(off > LEAK, f"{off:.0e}")


def check_bfloat16(subject: Subject) -> Answer:
    """Hidden states have the same dtype as in PyTorch (bfloat16, except in a few models), and the error relative to
    float32 is no larger than PyTorch's in bfloat16."""
    ours = subject.ours(dtype="bfloat16")
    rounded = tiny_models.build(subject.name, dtype=torch.bfloat16, num_layers=subject.num_layers)
    attach_adapter(rounded, subject.adapter)
    kinds = []
    if ours.decoder is not None:
        name = next(name for name, module in ours.module.named_modules() if module is ours.decoder)
        rounded.get_submodule(name).register_forward_hook(lambda module, args, out: kinds.append(out[0].dtype))
    tokens = np.random.default_rng(2).integers(3, 256, (subject.bfloat16_rows, TOKENS))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)  # once, on CPUs without bfloat16
        exact = subject.torch_model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
        try:
            reference = rounded(input_ids=torch.tensor(tokens), use_cache=False).logits
        except RuntimeError as error:
            return Answer(False, f"no reference: PyTorch's own code fails ({str(error).splitlines()[0]})")
    base, adapter = subject.weights(ours, rounded)
    inputs = {"tokens": jnp.asarray(tokens, jnp.int32)}
    if ours.has_separate_head:
        hidden = jax.jit(ours.hidden)(base, adapter, inputs)
        kind = hidden.dtype
        logits = jax.jit(ours.head)(base, ours.head_adapter(adapter), hidden)
    else:
        logits = jax.jit(ours.logits)(base, adapter, inputs)
        kind = logits.dtype
    our_error = typical_error(np.asarray(logits, np.float64), exact)
    torch_error = typical_error(reference.float().numpy(), exact)
    kinds.append(reference.dtype)
    same_type = str(logits.dtype) == torch_name(reference.dtype) and str(kind) == torch_name(kinds[0])
    passed = same_type and our_error <= torch_error * BFLOAT16_LUCK
    return Answer(passed, f"{our_error / torch_error:.2f} of PyTorch's {torch_error:.0e}, {kind}")


def read_by_peft(original: Any, files: dict[str, bytes]) -> Any:
    """The original model with the adapter of these files, loaded by PEFT."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return PeftModel.from_pretrained(original, folder, is_trainable=True).eval()


def check_peft(subject: Subject) -> Answer:
    """PEFT reads the adapter from our files, puts it on the original model and gives the same logits."""
    ours = subject.ours(scan=False)
    files = adapter_files(subject.adapter, ours.module, ours.targets, LORA, "some/base")
    theirs = read_by_peft(tiny_models.build(subject.name, num_layers=subject.num_layers), files)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(subject.tokens, dtype=torch.int64), use_cache=False).logits
    off = distance(logits.float().numpy(), subject.logits)
    return Answer(off <= LOGITS, f"{off:.0e}")


def check_experts(subject: Subject) -> Answer:
    """An adapter of experts and linear layers: logits and gradients equal PEFT's, which reads it from our files."""
    spec = dataclasses.replace(LORA, targets=("all-linear", "experts"))
    ours = CausalLM(subject.config, lora=LORA)
    if not expert_parameters(ours.module):
        return Answer(True, "none")
    ours = ours.with_lora(spec)
    generator = np.random.default_rng(1)
    names = [(name, leaf.part_shape) for leaf in ours.adapter_layout.values() for name in leaf.names]
    adapter = {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in sorted(names)}
    files = adapter_files(adapter, ours.module, ours.targets, spec, "some/base")
    original = tiny_models.build(subject.name, num_layers=subject.num_layers)
    base = base_weights(ours, original)
    expected, expected_gradients = peft_logits_and_gradients(read_by_peft(original, files), subject.tokens)
    stacked = fit_adapter(adapter, ours.adapter_layout, "here")
    logits, gradients = logits_and_gradients(ours, base, stacked, subject.tokens)
    off = distance(logits, expected)
    gradient_off = gradient_distance(unstack(gradients, ours.adapter_layout), expected_gradients)
    return Answer(off <= LOGITS and gradient_off <= GRADIENTS, f"{off:.0e} {gradient_off:.0e}")


def peft_logits_and_gradients(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    ids = torch.tensor(tokens, dtype=torch.int64)
    logits = model(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            ours = name_in_memory(name.replace(".default.", "."))
            assert ours is not None
            gradients[ours] = parameter.grad.numpy()
    return logits.detach().float().numpy(), gradients


def torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def typical_error(logits: np.ndarray, reference: np.ndarray) -> float:
    """The error of the median token: if rounding routes a token to another expert, its error is much larger."""
    per_token = np.sqrt(np.mean((logits - reference) ** 2, axis=-1))
    return float(np.median(per_token) / np.sqrt(np.mean(reference**2)))


CHECKS: dict[str, Callable[[Subject], Answer]] = {
    "scanned": lambda subject: check_logits_and_gradients(subject, scan=True),
    "unrolled": lambda subject: check_logits_and_gradients(subject, scan=False),
    "packed": check_packing,
    "leak seen": check_leak_without_segments,
    "bfloat16": check_bfloat16,
    "peft": check_peft,
    "experts": check_experts,
}
