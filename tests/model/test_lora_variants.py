"""LoRA variants: each reads and writes PEFT's format, computes PEFT's logits, and trains like PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
from adapter_logits import (
    DIFFERENT,
    ROUNDING,
    TOKENS,
    error_ratio,
    our_logits,
    ours,
    random_adapter,
    save,
    torch_logits,
)
from architecture_checks import distance, to_jax
from dose import full_dose_only, slow_case
from peft_reference import load_start, train_model
from tiny_run import assert_same, checkpoints_of
from transformers import AutoModelForCausalLM

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.optim import make_optimizer
from trillora.errors import TrilloraError
from trillora.events import Alarm
from trillora.model.adapters import CONFIG_FILE, check_changes_something, fit_adapter, load_adapter
from trillora.model.bridge import CausalLM, ModelOptions, build_module
from trillora.model.layout import stack, unstack
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights
from trillora.model.lora import linear_layers, row_norms
from trillora.model.lora_spec import LoraSpec, adapted_layers
from trillora.recipe.load import load_recipe
from trillora.step.adapter_spec import lora_spec
from trillora.step.build import update_factors
from trillora.step.shardings import weight_shardings
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]

SAME = 1e-5  # relative to the largest logit: float32 sums in another order
PATTERNS = LoraSpec(
    rank=4,
    alpha=8,
    targets=("re:.*layers\\.[0-3]\\..*(q|v)_proj", "mlp.up_proj", "*.down_proj", "o_proj"),
    exclude=("model.layers.2.mlp.up_proj",),
    rank_pattern=(("*.layers.1.*", 2), ("re:.*\\.3\\.mlp\\..*", 6)),
    alpha_pattern=(("q_proj", 16.0),),
)
VARIANTS = {
    "patterns": ("llama", PATTERNS),
    "patterns-rslora": (
        "llama",
        LoraSpec(rank=4, alpha=2, rslora=True, rank_pattern=(("q_proj", 9),), alpha_pattern=(("*.0.*", 3.0),)),
    ),
    "dora": ("llama", LoraSpec(rank=4, alpha=8, dora=True, rank_pattern=(("v_proj", 2),))),
    "dora-with-biases": ("gpt2", LoraSpec(rank=4, alpha=8, dora=True)),  # Conv1D too
    "dora-on-a-tied-head": ("ernie4_5", LoraSpec(rank=2, alpha=3, dora=True, targets=("v_proj", "lm_head"))),
    "pissa": ("llama", LoraSpec(rank=3, alpha=8, init="pissa", rank_pattern=(("v_proj", 2),))),
    "pissa-rslora": ("gpt2", LoraSpec(rank=3, alpha=8, rslora=True, init="pissa_niter_4")),
}


MAIN = ("patterns", "dora-with-biases", "pissa")


# ---- the same logits


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's, on an adapter for a tied head
@pytest.mark.parametrize("variant", [*MAIN, *(slow_case(name) for name in VARIANTS if name not in MAIN)])
def test_peft_loads_our_adapter_and_both_compute_the_same(variant: str, tmp_path: Path) -> None:
    from peft import PeftModel

    name, spec = VARIANTS[variant]
    model, adapter = save(tmp_path, name, spec)
    theirs = PeftModel.from_pretrained(tiny_models.build(name), tmp_path)
    assert distance(torch_logits(tiny_models.build(name)), torch_logits(theirs)) > DIFFERENT
    assert error_ratio(our_logits(name, model, fit_adapter(adapter, model.adapter_layout, "here")), theirs) < ROUNDING
    # Read back, it is the same adapter.
    stored, loaded = load_adapter(tmp_path)
    again = ours(name, stored)
    assert again.targets == model.targets and loaded.keys() == adapter.keys()
    assert error_ratio(our_logits(name, again, fit_adapter(loaded, again.adapter_layout, "here")), theirs) < ROUNDING


THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "exclude_modules": r".*layers\.0\..*",
            "rank_pattern": {"q_proj": 2, r"model\.layers\.[12]\.mlp\.up_proj": 6, "mlp.up_proj": 3},  # first match
            "alpha_pattern": {"layers.3.mlp.down_proj": 5, "gate_proj": 1},
            "lora_alpha": 2,
            "use_rslora": True,
        },
    ),
    "some-layers": ("llama", {"target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [1, 3]}),
    "regex": ("llama", {"target_modules": r".*\.(0|2)\.self_attn\.[kv]_proj"}),
    "dora": ("llama", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
    "dora-with-biases": ("gpt2", {"target_modules": "all-linear", "use_dora": True}),
}


def peft_model(base: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it sets fan_in_fan_out for Conv1D
        return get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **options}))


def randomize(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(0, 0.2)


def save_peft(model: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT cannot check the vocabulary of a model without a folder
        model.save_pretrained(folder)


@pytest.mark.parametrize("variant", ["patterns", "dora-with-biases", *map(slow_case, ("some-layers", "regex", "dora"))])
def test_we_load_an_adapter_of_peft_and_both_compute_the_same(variant: str, tmp_path: Path) -> None:
    name, options = THEIRS[variant]
    torch.manual_seed(0)
    model = peft_model(tiny_models.build(name), **options)
    randomize(model)
    assert distance(torch_logits(tiny_models.build(name)), torch_logits(model)) > DIFFERENT
    save_peft(model, tmp_path)
    spec, adapter = load_adapter(tmp_path)
    loaded = ours(name, spec)
    assert error_ratio(our_logits(name, loaded, fit_adapter(adapter, loaded.adapter_layout, "here")), model) < ROUNDING


@pytest.mark.parametrize("variant", ["patterns", slow_case("dora"), slow_case("pissa")])
def test_scanned_layers_compute_the_same_as_unrolled_ones(variant: str) -> None:
    name, spec = VARIANTS[variant]
    config = tiny_models.build(name).config
    scanned, unrolled = ours(name, spec), CausalLM(config, ModelOptions(scan=False, remat="none"), lora=spec)
    # Layers of one segment have the same ranks: 0, 1, 2 and 3 all differ with the patterns.
    assert len(scanned.stack.segments) == (4 if variant == "patterns" else 1)
    adapter = random_adapter(scanned)
    expected = our_logits(name, unrolled, adapter)
    assert distance(our_logits(name, scanned, fit_adapter(adapter, scanned.adapter_layout, "here")), expected) < SAME


def test_row_norms_are_those_of_the_whole_matrix() -> None:
    generator = np.random.default_rng(0)
    w, a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((6, 9), (2, 9), (6, 2)))
    expected = np.linalg.norm(w.astype(np.float64) + 1.5 * b.astype(np.float64) @ a, axis=1)
    np.testing.assert_allclose(row_norms(*map(jnp.asarray, (w, a, b)), 1.5), expected, rtol=1e-6)
    many = jax.vmap(row_norms, in_axes=(None, 0, 0, None))(
        jnp.asarray(w), jnp.stack([a, 2 * a]), jnp.stack([b, b]), 1.5
    )
    np.testing.assert_allclose(many[0], expected, rtol=1e-6)


def test_many_dora_adapters_in_one_forward_pass_compute_the_same_as_one_by_one() -> None:
    name, spec = VARIANTS["dora"]
    model = ours(name, spec)
    base = base_tree(name, model)
    one = {key: jnp.asarray(a) for key, a in fit_adapter(random_adapter(model), model.adapter_layout, "here").items()}
    two = jax.tree.map(lambda array: 1.1 * array, one)
    tokens = {"tokens": jnp.asarray(TOKENS, jnp.int32)}
    both = jax.tree.map(lambda *arrays: jnp.stack(arrays), one, two)
    together = jax.jit(jax.vmap(model.logits, in_axes=(None, 0, None)))(base, both, tokens)
    for logits, adapter in zip(together, (one, two), strict=True):
        assert distance(logits, our_logits(name, model, adapter)) < SAME


@full_dose_only
def test_variants_on_eight_devices_equal_one(tmp_path: Path) -> None:
    folder = tiny_run.write_both(tmp_path, tiny_run.wide_llama())
    losses = []
    for hardware in ({"devices": 1}, {"devices": 8, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}}):
        settings = tiny_run.recipe(folder, lora=EVERYTHING, hardware=hardware)
        losses.append(train(load_recipe(settings), tmp_path / f"run{len(losses)}").losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)  # float32 sums over devices, four Adam steps


# ---- the same training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all its parts, chats, and an adapter that PEFT wrote in half precision."""
    folder = tiny_run.write_both(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(3)
    options = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 5}, "use_dora": True}
    model = peft_model(base_model(folder), target_modules=["q_proj", "up_proj"], **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    save_peft(model.to(torch.float16), folder / "theirs")
    return folder


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def recipe_of(folder: Path, lora: dict[str, Any], **train: Any) -> dict[str, Any]:
    settings = tiny_run.recipe(folder, data={"pack": False}, train={"weight_decay": 0.1, **train})
    return {**settings, "lora": lora}


def initial(folder: Path, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Our adapter before the first step, by parameter name."""
    recipe = load_recipe(settings)
    model = CausalLM(load_config(folder / "model"), ModelOptions(scan=False), lora=lora_spec(recipe.lora))
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    base = load_weights(folder / "model", model.module, model.layout, weight_shardings(model, mesh))
    return unstack(model.initial_adapter(base, recipe.train.seed), model.adapter_layout)


PATTERN_OPTIONS: dict[str, Any] = {
    "rank": 4,
    "alpha": 12,
    "exclude": ["o_proj"],
    "rank_pattern": {"*.layers.1.mlp.*": 3},
    "alpha_pattern": {"re:.*q_proj": 6},
    "rslora": True,
}
# Ours, and the same for PEFT.
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patterns-and-loraplus": (
        {**PATTERN_OPTIONS, "loraplus_ratio": 16},
        {
            "target_modules": "all-linear",
            "exclude_modules": ["o_proj"],
            "rank_pattern": {"layers.1.mlp.[a-z]+_proj": 3},
            "alpha_pattern": {"q_proj": 6},
            "use_rslora": True,
        },
    ),
    "dora": ({"rank": 4, "alpha": 12, "dora": True}, {"target_modules": "all-linear", "use_dora": True}),
    "pissa": (
        {"rank": 4, "alpha": 12, "init": "pissa"},
        {"target_modules": "all-linear", "init_lora_weights": "pissa"},
    ),
    "from": ({}, {}),
}


def theirs_before(folder: Path, variant: str, settings: dict[str, Any]) -> Any:
    """PEFT's model with our initial adapter. PiSSA's and DoRA's initial values are its own."""
    from peft import PeftModel

    if variant == "from":
        return PeftModel.from_pretrained(base_model(folder), folder / "theirs", is_trainable=True).float().eval()
    model = peft_model(base_model(folder), **TRAINED[variant][1]).eval()
    if variant == "pissa":
        return model
    start = initial(folder, settings)
    if variant == "dora":
        own = {name: p.detach().numpy().copy() for name, p in model.named_parameters() if "magnitude" in name}
        load_start(model, start)
        assert len(own) == 14
        for name, p in model.named_parameters():
            if name in own:
                np.testing.assert_allclose(p.detach().numpy(), own[name], rtol=1e-6)
        return model
    load_start(model, start)
    return model


def their_optimizer(model: Any, variant: str, settings: dict[str, Any]) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    rate, decay = settings["train"]["learning_rate"], settings["train"]["weight_decay"]
    if "loraplus" in variant:
        return create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=rate, loraplus_lr_ratio=16, loraplus_weight_decay=decay
        )
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=decay)


@pytest.mark.parametrize("variant", [n if n in ("dora", "pissa") else slow_case(n) for n in TRAINED])
def test_the_first_steps_equal_those_of_peft(variant: str, folder: Path, tmp_path: Path) -> None:
    num_steps = 4
    lora = {"from": str(folder / "theirs")} if variant == "from" else TRAINED[variant][0]
    settings = recipe_of(folder, lora, steps=num_steps, learning_rate=1e-3)
    ours = train(load_recipe(settings), tmp_path / "run").losses
    model = theirs_before(folder, variant, settings)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    recipe = load_recipe(settings)
    batches = tiny_run.batches_of(recipe, folder / "model")
    optimizer = their_optimizer(model, variant, settings)
    theirs = train_model(
        model, optimizer, [batches.batch(step) for step in range(num_steps)], recipe.train.max_grad_norm
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)  # float32 sums in another order
    assert ours[-1] < ours[0]

    adapter = load_adapter(tmp_path / "run" / "adapter")[1]
    if variant == "pissa":
        adapter = trained_half(adapter)
    kinds = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "lora_magnitude"}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(adapter)
    for name, parameter in trained.items():
        layer, kind = name.removeprefix("base_model.model.").removesuffix(".default.weight").rsplit(".", 1)
        change = float((parameter.detach() - before[name]).norm())
        error = np.linalg.norm(adapter[f"{layer}.{kinds[kind]}"] - parameter.detach().numpy())
        # Of the change. Adam divides by the gradient's size, so rounding errors of tiny gradients become visible.
        assert error < 0.01 * change, name


def trained_half(adapter: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: array[: len(array) // 2] if name.endswith("lora_a") else array[:, : array.shape[1] // 2]
        for name, array in adapter.items()
    }


# ---- a run with everything at once


EVERYTHING = {**PATTERN_OPTIONS, "rslora": False, "dora": True, "init": "pissa_niter_4", "loraplus_ratio": 4}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    settings = recipe_of(folder, EVERYTHING, checkpoint_every=2, keep_checkpoints=100)
    train(load_recipe(settings), run)
    return run


def test_a_resumed_run_ends_the_same(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "adapter")
    checkpoints_of(run).remove_after(2)
    (run / "saved.json").unlink()
    train(load_recipe(recipe_of(folder, EVERYTHING, checkpoint_every=2, keep_checkpoints=100)), run)
    assert_same(run, whole)


def test_half_of_a_pissa_adapter_never_changes(folder: Path, whole: Path) -> None:
    start = initial(folder, recipe_of(folder, EVERYTHING))
    _, trained = load_adapter(whole / "adapter")
    num_changed = 0
    for name, array in trained.items():
        if name.endswith("magnitude"):
            continue
        axis = 0 if name.endswith("lora_a") else 1
        (moved, frozen), (first, same) = np.split(array, 2, axis), np.split(start[name], 2, axis)
        assert np.array_equal(frozen, same), name
        assert np.array_equal(same, first if axis == 0 else -first)
        num_changed += not np.array_equal(moved, first)
    assert num_changed == 2 * 12


def test_a_run_answers_like_peft(folder: Path, whole: Path) -> None:
    from peft import PeftModel

    from trillora.generation.generator import Generator

    generator = Generator.open(str(whole))
    prompts = [list(range(5, 12)), list(range(9, 14))]
    written = generator.continue_tokens(prompts, max_tokens=6)
    model = PeftModel.from_pretrained(base_model(folder), whole / "adapter").eval()
    for prompt, (tokens, _) in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(input_ids=ids, max_new_tokens=len(tokens), do_sample=False, pad_token_id=0)
        assert tokens == expected[0, len(prompt) :].tolist()[: len(tokens)] and tokens


# ---- PiSSA


def with_start(name: str, spec: LoraSpec) -> tuple[CausalLM, dict[str, Any]]:
    model = ours(name, spec)
    return model, model.initial_adapter(base_tree(name, model), seed=0)


def base_tree(name: str, model: CausalLM) -> dict[str, Any]:
    reference = tiny_models.build(name)
    flat = {n: to_jax(t) for n, t in (*reference.named_parameters(), *reference.named_buffers())}
    return stack({n: flat[n] for leaf in model.layout.values() for n in leaf.names}, model.layout)


@pytest.mark.parametrize(
    "variant", ["pissa", "dora-on-a-tied-head", *map(slow_case, ("pissa-rslora", "dora", "dora-with-biases"))]
)
def test_a_variant_starts_equal_to_the_base(variant: str) -> None:
    name, spec = VARIANTS[variant]
    model, start = with_start(name, spec)
    assert distance(our_logits(name, model, start), torch_logits(tiny_models.build(name))) < SAME
    with pytest.raises(TrilloraError, match="changes nothing"):
        check_changes_something(unstack(start, model.adapter_layout), "here")


def test_subspace_iteration_finds_the_largest_singular_vectors() -> None:
    """Compared by the product B A, which does not depend on signs."""
    products = []
    for init in ("pissa", "pissa_niter_16", "pissa_niter_16"):
        model, start = with_start("llama", LoraSpec(rank=3, alpha=6, init=init, targets=("down_proj",)))
        flat = unstack(start, model.adapter_layout)
        layer = "model.layers.2.mlp.down_proj"
        products.append(flat[f"{layer}.lora_b"][:, :3] @ flat[f"{layer}.lora_a"][:3])
    assert np.array_equal(products[1], products[2])
    # The singular values of a random matrix are close together, so 16 iterations do not separate them completely.
    assert np.linalg.norm(products[0] - products[1]) < 0.2 * np.linalg.norm(products[0])


@pytest.mark.parametrize("name", ["adamw", *map(slow_case, ("lion", "lion-8bit", "adafactor"))])
def test_no_optimizer_moves_the_frozen_half(name: Any) -> None:
    model = ours("llama", LoraSpec(rank=3, alpha=6, init="pissa", targets=("q_proj",)))
    factors = update_factors(model.adapter_layout, 2.0, pissa=True)
    optimizer = make_optimizer(name, 0.1, None, factors)
    params = {key: jnp.ones(leaf.shape) for key, leaf in model.adapter_layout.items()}
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for key, pull in direction.items():
        axis = -2 if key.endswith("lora_a") else -1
        moved, frozen = np.split(np.asarray(pull), 2, axis)
        assert not frozen.any()
        np.testing.assert_allclose(moved, 0.1 if key.endswith("lora_a") else 0.2, rtol=1e-6)


@full_dose_only
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_variants_start_from_the_quantized_base(quantize: str, folder: Path, tmp_path: Path) -> None:
    losses = []
    for lora in ({"rank": 4}, EVERYTHING):
        settings = {**recipe_of(folder, lora, steps=2), "model": {"name": str(folder / "model"), "quantize": quantize}}
        losses.append(train(load_recipe(settings), tmp_path / f"run{len(losses)}").losses)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)  # both start equal to the base
    assert losses[1][1] < losses[1][0]


# ---- bad input


@pytest.mark.parametrize(
    ("lora", "what", "where", "do"),
    [
        ({"targets": ["q_prj"]}, "'q_prj' matches no linear layer", "lora.targets[0]", "did you mean 'q_proj'?"),
        ({"targets": ["re:.*q_prj"]}, "matches no linear layer", "lora.targets[0]", "'q_proj'"),
        ({"exclude": ["o_proj", "dwn_proj"]}, "'dwn_proj' matches no", "lora.exclude[1]", "did you mean 'down_proj'?"),
        ({"rank_pattern": {"q_prj": 2}}, "'q_prj' matches no adapted layer", "lora.rank_pattern", "'q_proj'"),
        (
            {"targets": ["v_proj"], "alpha_pattern": {"q_proj": 2}},
            "'q_proj' matches no adapted layer",
            "lora.alpha_pattern",
            "v_proj",
        ),
        ({"rank_pattern": {"q_proj": 0}}, "lora.rank_pattern cannot be 0", "lora.rank_pattern", "at least 1"),
        ({"rank_pattern": {"q_proj": True}}, "lora.rank_pattern cannot be", "lora.rank_pattern", "whole number"),
        ({"rank": 0}, "lora.rank cannot be 0", "lora.rank", "at least 1"),
        (
            {"rank": 33},
            "model.layers.0.self_attn.k_proj, which has 64 inputs and 32 outputs",
            "lora.rank",
            "at most 32",
        ),
        (
            {"rank_pattern": {"q_proj": 2, "*.layers.1.*": 3}},
            "for model.layers.1.self_attn.q_proj: 'q_proj' gives 2, '*.layers.1.*' gives 3",
            "lora.rank_pattern",
            "each layer matches one",
        ),
        ({"targets": ["q_proj"], "exclude": ["*"]}, "leaves no layer", "lora.exclude", "remove one of *"),
        ({"targets": ["re:("]}, "cannot be used", "lora.targets[0]", "simpler"),
        ({"exclude": ["re:([a-z._0-9]+)+!"]}, "it repeats a group", "lora.exclude[0]", "simpler"),
        ({"targets": ["re:.*.*.*.*q"]}, "more than 3 repetitions", "lora.targets[0]", "simpler"),
        ({"from": "some/adapter", "init": "pissa"}, "Both lora.from and lora.init", "lora.init", "remove one"),
        ({"from": "./nothing"}, "There is no adapter", "lora.from", "a hub id"),
    ],
)
def test_bad_options_say_what_where_and_what_to_do(
    lora: dict[str, Any], what: str, where: str, do: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe({**tiny_run.recipe(folder), "lora": lora}), tmp_path / "run")
    error = caught.value
    assert what in error.what and where in str(error.where) and do in error.do and error.exit_code == 2
    assert not list(tmp_path.glob("run/adapter*")) and not list(tmp_path.glob("run/checkpoints/[!.]*"))


def test_patterns_that_agree_may_overlap(folder: Path) -> None:
    module = build_module(load_config(folder / "model"), "float32")
    spec = LoraSpec(rank=4, targets=("q_proj",), rank_pattern=(("q_proj", 2), ("*.layers.1.*", 2)))
    assert {layer.rank for layer in adapted_layers(module, list(linear_layers(module)), spec).values()} == {2}


# ---- starting from an adapter


def from_theirs(folder: Path, **lora: Any) -> dict[str, Any]:
    return recipe_of(folder, {"from": str(folder / "theirs"), **lora}, steps=2)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, ("lora.rank is 8", "has 4")),
        ({"alpha": 8}, ("lora.alpha is 8", "has 12")),
        ({"dora": False}, ("lora.dora is False", "has True")),
        ({"targets": ["q_proj"]}, ("layers.0.mlp.up_proj no adapter", "has rank 2 and alpha 12")),
        ({"rank_pattern": {"up_proj": 3}}, ("up_proj rank 3 and alpha 12", "has rank 2 and alpha 12")),
    ],
)
def test_options_that_contradict_the_adapter_are_refused_with_both_values(
    lora: dict[str, Any], words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(from_theirs(folder, **lora)), tmp_path / "run")
    assert all(word in caught.value.what for word in words), caught.value.what
    assert str(folder / "theirs") in str(caught.value.where)


def test_a_run_that_starts_from_an_adapter_names_another_base_and_resumes_only_with_the_same_one(
    folder: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(folder / "theirs", tmp_path / "source")
    config = json.loads((source / CONFIG_FILE).read_text())
    (source / CONFIG_FILE).write_text(json.dumps({**config, "base_model_name_or_path": "some/base"}))
    settings = recipe_of(folder, {"from": str(source), "rank": 4, "dropout": 0.1}, steps=2, checkpoint_every=1)
    events: list[Any] = []
    train(load_recipe(settings), tmp_path / "run", listener=events.append)
    (alarm,) = [event.text for event in events if isinstance(event, Alarm)]
    assert "some/base" in alarm and str(folder / "model") in alarm
    spec, _ = load_adapter(tmp_path / "run" / "adapter")
    assert (spec.rank, spec.alpha, spec.dora, spec.dropout) == (4, 12, True, 0.1)
    resolved = load_recipe(tmp_path / "run" / "resolved.yaml").lora
    assert resolved.from_ == str(source) and resolved.model_fields_set == {"from_", "rank", "dropout"}

    shutil.rmtree(tmp_path / "run" / "adapter")
    checkpoints_of(tmp_path / "run").remove_after(1)
    (tmp_path / "run" / "saved.json").unlink()
    (source / CONFIG_FILE).write_text(json.dumps({**config, "base_model_name_or_path": "other/base"}))
    with pytest.raises(TrilloraError, match=r"lora\.from has changed"):
        train(load_recipe(settings), tmp_path / "run")


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for config, word in ((tiny_run.llama(width=32), "(2, 64)"), (tiny_run.llama(num_layers=1), "layers.1.mlp.up_proj")):
        other = tiny_run.write_both(tmp_path / word.strip("()"), config)
        settings = {**tiny_run.recipe(other), "lora": {"from": str(folder / "theirs")}}
        with pytest.raises(TrilloraError) as caught:
            train(load_recipe(settings), tmp_path / "run")
        assert word in caught.value.what and str(folder / "theirs") in str(caught.value.where)
        assert "base model" in caught.value.do


@full_dose_only
def test_a_run_is_an_adapter_to_start_from(folder: Path, whole: Path, tmp_path: Path) -> None:
    """The last step of a run and the first step of a run from its adapter have the same weights before them."""
    settings = recipe_of(folder, {"from": str(whole)}, steps=1)
    (loss,) = train(load_recipe(settings), tmp_path / "run").losses
    model = torch_model_of(folder, whole / "adapter")
    batch = tiny_run.batches_of(load_recipe(settings), folder / "model").batch(0)
    from peft_reference import mean_loss

    with torch.no_grad():
        logits = model(input_ids=torch.tensor(batch["tokens"]).long()).logits
        expected = mean_loss(logits, torch.tensor(batch["targets"]).long(), torch.tensor(batch["weights"]))
    assert loss == pytest.approx(float(expected), rel=2e-5)
    spec, _ = load_adapter(tmp_path / "run" / "adapter")
    assert spec.rank == 8 and not spec.pissa  # both halves of the PiSSA adapter are trained now


def torch_model_of(folder: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(folder), adapter).eval()
