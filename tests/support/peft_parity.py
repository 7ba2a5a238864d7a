"""Compares an adapter in PEFT and here: logits, gradients, and the files in both directions."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from architecture_checks import distance, gradient_distance, logits_and_gradients, to_jax
from peft import LoraConfig, PeftModel, get_peft_model
from peft_reference import mean_loss
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from trillora.data.stage import read_stage
from trillora.devices.mesh import replicated
from trillora.events import ignore_events
from trillora.model.adapter_parameters import name_in_memory
from trillora.model.adapters import adapter_files, fit_adapter, load_adapter
from trillora.model.bridge import CausalLM
from trillora.model.layout import Tree, stack, unstack
from trillora.model.loading.source import OpenModel
from trillora.model.loading.weights import load_weights
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.whole_weights import sorted_rows
from trillora.recipe.schema import Recipe, stages_of
from trillora.step.adapter_spec import lora_spec

VOCABULARY = 40
SAME = 1e-5  # relative to the largest value: float32 sums in another order
DIFFERENT = 1e-2  # an adapter changes the logits by at least this, so that equality is meaningful
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
CONFIGS = {
    "tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "untied": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    # Its embedding multiplies the rows by a constant.
    "scaled": Gemma3TextConfig(**_SIZES, head_dim=8, tie_word_embeddings=True),
}


@functools.cache
def weights(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    return {**model.state_dict(), **dict(model.named_buffers())}


def build(name: str, num_new: int = 0) -> Any:
    """A small model, with `num_new` rows more than its config says."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    model.load_state_dict(weights(name), strict=False)
    if num_new:
        model.resize_token_embeddings(VOCABULARY + num_new)
    return model.eval()


def base_of(name: str, model: CausalLM) -> Tree:
    """The model's base as arrays. It never has the new rows."""
    flat = {key: to_jax(tensor) for key, tensor in weights(name).items()}
    return stack({n: flat[n] for leaf in model.layout.values() for n in leaf.names}, model.layout)


def quiet_peft(model: Any, **options: Any) -> Any:
    """A PEFT model whose trained parameters are random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on tied weights and embeddings, which are what we test
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted.eval()


def tokens_with(new: tuple[int, ...]) -> np.ndarray:
    """Two sequences in which the tokens `new` occur."""
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 12))
    for place, token in enumerate(new):
        tokens[:, 2 + 3 * place] = token
    return tokens


def torch_logits_and_gradients(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    ids = torch.tensor(tokens)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), {in_memory(name): gradient for name, gradient in gradients.items()}


def in_memory(name: str) -> str:
    """Our name for a parameter of a PEFT model."""
    for wrapper in (".modules_to_save.default", ".default"):
        name = name.replace(wrapper, "")
    ours = name_in_memory(name)
    assert ours is not None, name
    return ours


def check_both_ways(name: str, folder: Path, tokens: np.ndarray, num_new: int = 0, **options: Any) -> LoraSpec:
    """PEFT's adapter gives the same logits and gradients here, and our copy of it the same logits in PEFT."""
    plain = build(name, num_new)(input_ids=torch.tensor(tokens)).logits.detach().numpy()
    adapted = quiet_peft(build(name, num_new), **options)
    expected, gradients = torch_logits_and_gradients(adapted, tokens)
    assert distance(plain, expected) > DIFFERENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT cannot see whether the vocabulary has grown
        adapted.save_pretrained(folder / "theirs")

    spec, arrays = load_adapter(folder / "theirs")
    ours = CausalLM(CONFIGS[name], lora=spec)  # its config is the base's
    adapter = fit_adapter(arrays, ours.adapter_layout, str(folder))
    logits, ours_gradients = logits_and_gradients(
        ours, base_of(name, ours), jax.tree.map(jnp.asarray, adapter), tokens.astype(np.int32)
    )
    assert distance(logits, expected) < SAME
    gradients = sorted_rows(gradients, options.get("trainable_token_indices"), "the gradients")
    assert gradient_distance(unstack(ours_gradients, ours.adapter_layout), gradients) < 1e-4

    (folder / "ours").mkdir()
    for file, data in adapter_files(arrays, ours.module, ours.targets, spec, "some/base").items():
        (folder / "ours" / file).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(build(name, num_new), folder / "ours").eval()
    again = theirs(input_ids=torch.tensor(tokens), use_cache=False).logits.detach().numpy()
    assert distance(again, expected) < SAME
    reread, same = load_adapter(folder / "ours")
    assert same.keys() == arrays.keys() and all(np.array_equal(same[key], arrays[key]) for key in arrays)
    assert (reread.tokens, reread.whole) == (spec.tokens, spec.whole)
    return spec


def peft_losses(recipe: Recipe, num_steps: int) -> list[float]:
    """The losses of AdamW steps in PyTorch and PEFT with the recipe's data, from our initial adapter."""
    train, [stage] = recipe.train, stages_of(recipe)
    new = recipe.tokens or ()
    opened = OpenModel.open(recipe.model.name, revision=None, trust_remote_code=False, tokens=new)
    data = read_stage(stage, opened.tokenizer, ignore_events)
    spec = lora_spec(data.recipe.lora, len(new))
    ours = CausalLM(opened.config, lora=spec)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    base = load_weights(opened.folder, ours.module, ours.layout, {key: replicated(mesh) for key in ours.layout})
    start = unstack(ours.initial_adapter(base, train.seed), ours.adapter_layout)
    reference = AutoModelForCausalLM.from_pretrained(opened.folder, dtype=torch.float32)
    if new:
        reference.resize_token_embeddings(len(opened.tokenizer))
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.targets) if isinstance(spec.targets, tuple) else spec.targets,
        modules_to_save=ours.whole or None,
        trainable_token_indices=list(spec.tokens.ids) if spec.tokens else None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(reference, config).eval()
    trained = {in_memory(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.tensor(np.asarray(start[name])))
    decayed = [parameter for parameter in trained.values() if parameter.ndim > 1]
    others = [parameter for parameter in trained.values() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate)
    losses = []
    for step in range(num_steps):
        batch = {name: torch.tensor(array) for name, array in data.batches.batch(step).items()}
        logits = model(input_ids=batch["tokens"].long()).logits
        loss = mean_loss(logits, batch["targets"].long(), batch["weights"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), train.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses
