"""Generation equals transformers, token for token: prompts of different lengths, with and without an adapter."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
from architecture_checks import attach_adapter
from chat_tokenizers import chat_tokenizer
from dose import full_dose_only, slow_case
from peft import PeftModel
from tiny_generators import NUM_LAYERS, num_layers, random_prompts, tiny_generator, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.sampling import GREEDY, Sampling, choose, token_keys
from trillora.errors import TrilloraError
from trillora.files.digests import json_digest
from trillora.generation import generator as generator_module
from trillora.generation.chat import GREETING, converse
from trillora.generation.generator import Generator, bucket_length, prompts_of
from trillora.generation.prompts import Prompts
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.decode import Decoder
from trillora.model.loading.source import find_model, load_config
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.runs.saved import find_adapter
from trillora.step.background import compiling_in_background
from trillora.step.shardings import weight_shardings
from trillora.training.trainer import train

NUM_NEW = 12
QUESTIONS = ["What is 3 plus 4?", "Say something long about plus and is, and then some more.", "It?"]


def generated_by_transformers(model: Any, prompts: Sequence[Sequence[int]], eos: int | None = None) -> np.ndarray:
    """Greedy tokens [prompts, new tokens] of a left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.config.use_cache = model.config.get_text_config().use_cache = True
    model.generation_config.eos_token_id = eos
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    return out[:, longest:].numpy()


@pytest.fixture
def llama() -> Generator:
    return tiny_generator("llama")[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a tiny Llama with a ChatML tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    tiny_run.write_model(folder / "model", tiny_run.wide_llama(num_layers=1))
    tiny_run.write_chats(folder / "chats.jsonl")
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 3})), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run: Path) -> Generator:
    return Generator.open(str(run))


# One cache of keys, one with sliding windows, one with attention and recurrent states in each layer.
# The last five are multimodal.
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma2", "falcon_h1"),
        *map(slow_case, ("mistral", "qwen3", "mixtral", "mamba2")),
        *map(slow_case, ("gemma3", "llama4", "mistral3", "qwen3_5", "qwen3_vl")),
    ],
)
def test_greedy_tokens_equal_transformers_with_and_without_an_adapter(name: str) -> None:
    reference = tiny_models.build(name, num_layers=num_layers(name))
    generator, adapter = tiny_generator(name)
    prompts = random_prompts()
    alone = generated_by_transformers(reference, prompts)
    attach_adapter(reference, adapter)
    adapted = generated_by_transformers(reference, prompts)
    assert len(np.unique(alone)) >= 5 and (alone != adapted).any()  # otherwise equality would prove little
    num_compiles = [generator.num_compiles]  # other tests share the generator
    for expected, is_adapted in ((alone, False), (adapted, True)):
        written = generator.continue_tokens(prompts, max_tokens=NUM_NEW, adapted=is_adapted)
        assert [tokens for tokens, _ in written] == expected.tolist()
        num_compiles.append(generator.num_compiles)
    assert num_compiles[1] <= num_compiles[0] + 2
    assert num_compiles[2] == num_compiles[1]  # shared by the base and the adapted model


def test_stacked_weights_generate_the_same(llama: Generator) -> None:
    prompts = random_prompts()
    scanned = CausalLM(tiny_models.configuration("llama", NUM_LAYERS), ModelOptions(remat="none"))
    assert any(leaf.stacked for leaf in scanned.layout.values())
    base = weights_of(tiny_models.build("llama", num_layers=NUM_LAYERS), scanned)
    starts = jnp.array([17 - len(p) for p in prompts])
    tokens = jnp.array([[0] * (17 - len(p)) + p for p in prompts])
    logits, _ = jax.jit(lambda base: Decoder(scanned).prefill(base, {}, tokens, starts, 32))(base)
    expected = [tokens[0] for tokens, _ in llama.continue_tokens(prompts, max_tokens=1, adapted=False)]
    assert np.argmax(logits, axis=-1).tolist() == expected


def test_a_sequence_ends_at_its_stop_token_and_the_others_continue(
    llama: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, reference = random_prompts(), tiny_models.build("llama", num_layers=NUM_LAYERS)
    free = generated_by_transformers(reference, prompts)
    eos = next(token for token in free[1].tolist() if token not in free[0] or token not in free[2])
    expected = generated_by_transformers(reference, prompts, eos)
    monkeypatch.setattr(llama.prompts, "stops", (eos,))
    written = llama.continue_tokens(prompts, max_tokens=NUM_NEW, adapted=False)
    for (tokens, stopped), row in zip(written, expected.tolist(), strict=True):
        end = row.index(eos) if eos in row else None
        assert tokens == row[:end] and stopped == (end is not None)
    assert {stopped for _, stopped in written} == {True, False}


def test_decoding_ends_when_every_sequence_has_stopped(llama: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts()
    first = [tokens[0] for tokens, _ in llama.continue_tokens(prompts, max_tokens=1)]
    monkeypatch.setattr(llama.prompts, "stops", tuple(first))
    assert llama.continue_tokens(prompts, max_tokens=NUM_NEW) == [([], True)] * 3
    assert len(list(llama.write(prompts, max_tokens=NUM_NEW))) == 1


def test_only_a_new_bucket_compiles_again(llama: Generator) -> None:
    prompts = random_prompts()
    llama.continue_tokens(prompts, max_tokens=4)
    before = llama.num_compiles
    llama.continue_tokens(prompts[:2] + prompts[:1], max_tokens=9, sampling=Sampling(0.5, 0.9, seed=3))
    llama.continue_tokens(prompts, max_tokens=50, adapted=False)
    assert llama.num_compiles == before
    llama.continue_tokens(random_prompts((40,) * 3), max_tokens=4)
    assert llama.num_compiles == before + 2


@pytest.mark.parametrize(
    ("is_tight", "lengths"), [(False, (9, 3, 17)), slow_case(True, (9, 40, 3, 17, 5, 33, 12, 20, 26, 8))]
)
def test_prepared_programs_are_those_that_answer(
    is_tight: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared with shapes only, in threads. Equal layers are traced once in each program. Ten prompts are two groups
    of one batch."""
    generator, _ = tiny_generator.__wrapped__("llama")
    generator.is_tight, generator.batch_size, arrays = is_tight, 16, (generator.base, generator.adapter)
    prompts = random_prompts(lengths)
    expected = generator.continue_tokens(prompts, max_tokens=6)
    generator._readers.clear()
    generator._writers.clear()
    calls, call = 0, torch.func.functional_call

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += module in generator.model.stack.layers
        return call(module, *args, **kwargs)

    monkeypatch.setattr(torch.func, "functional_call", counted)
    generator.base, generator.adapter = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), arrays
    )
    with compiling_in_background():
        generator.prepare(prompts, max_tokens=6)
        prepared = generator.num_compiles
        assert calls == prepared  # the layers of this model are equal
        generator.base, generator.adapter = arrays
        assert generator.continue_tokens(prompts, max_tokens=6) == expected
    assert generator.num_compiles == prepared == (3 if is_tight else 2) and len(generator.model.stack.layers) > 1


def test_buckets_waste_at_most_a_third() -> None:
    sizes = {length: bucket_length(length) for length in range(1, 3000)}
    assert all(size >= length for length, size in sizes.items())
    assert all(size <= max(32, 1.5 * length) for length, size in sizes.items())
    assert len(set(sizes.values())) < 16


def test_tight_lengths_waste_at_most_an_eighth_beyond_the_first_and_coarse_ones_are_among_them() -> None:
    sizes = {length: bucket_length(length, tight=True) for length in range(1, 3000)}
    assert all(length <= size <= max(length + 15, 1.125 * length) for length, size in sizes.items() if length > 32)
    assert {bucket_length(length) for length in sizes} <= {*sizes.values()}
    assert all(size <= bucket_length(length) for length, size in sizes.items())


@pytest.mark.parametrize("name", ["exaone4", *map(slow_case, ("gemma2", "falcon_h1"))])
def test_prompts_read_in_groups_of_their_own_length_give_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rings of 8 slots, and with recurrent states. Groups of two: lengths 32, 48 and 64."""
    monkeypatch.setattr(generator_module, "ROWS_PER_READ", 2)
    generator, _ = tiny_generator(name)
    prompts = random_prompts((60, 20, 33, 41, 5))
    expected = generator.continue_tokens(prompts, max_tokens=NUM_NEW)
    monkeypatch.setattr(generator, "is_tight", True)
    before = set(generator._readers)
    assert generator.continue_tokens(prompts, max_tokens=NUM_NEW) == expected
    assert sorted(b.num_prompt for b in set(generator._readers) - before) == [32, 48, 64]
    (streamed,) = [np.concatenate(list(generator.write(prompts[:1], max_tokens=4, at_once=1)), axis=1)[0].tolist()]
    assert streamed == expected[0][0][:4]


def test_sampling_repeats_for_a_seed_and_does_not_depend_on_the_batch(llama: Generator) -> None:
    prompts = random_prompts((9, 9, 9))
    same = [prompts[0]] * 3

    def drawn(prompts: list[list[int]], seed: int) -> list[list[int]]:
        warm = Sampling(temperature=3.0, seed=seed)
        return [tokens for tokens, _ in llama.continue_tokens(prompts, max_tokens=NUM_NEW, sampling=warm)]

    assert drawn(prompts, 1) == drawn(prompts, 1)
    assert drawn(prompts, 1) != drawn(prompts, 2)
    assert drawn(same, 1)[0] != drawn(same, 1)[1]  # equal prompts in a batch get different answers
    assert drawn(prompts, 1)[0] == drawn(same, 1)[0]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), 5),
        (Sampling(0.5), 5),
        (Sampling(1.0, top_p=0.75), 3),  # 0.4 + 0.3 is not enough, 0.4 + 0.3 + 0.15 is
        (Sampling(2.0, top_k=2), 2),
        (Sampling(1.0, top_p=0.01), 1),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling, kept: int) -> None:
    shares = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    num_draws = 20_000
    logits = jnp.broadcast_to(jnp.log(shares), (num_draws, 5))
    tokens = jax.jit(choose)(logits, token_keys(0, jnp.arange(num_draws), 0), sampling)
    expected = shares ** (1 / float(sampling.temperature))
    expected[np.argsort(-expected)[kept:]] = 0
    expected /= expected.sum()
    found = np.bincount(np.asarray(tokens), minlength=5) / num_draws
    assert (found[expected == 0] == 0).all()
    # Four standard deviations of a frequency over that many independent draws.
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / num_draws) + 1e-9).all()


def test_greedy_takes_the_most_likely_token() -> None:
    logits = jax.random.normal(jax.random.key(0), (7, 50))
    assert (choose(logits, token_keys(0, jnp.arange(7), 0), GREEDY) == jnp.argmax(logits, -1)).all()


def test_prompts_that_do_not_fit_are_refused_with_the_limit(llama: Generator) -> None:
    assert llama.longest == 128
    with pytest.raises(TrilloraError, match="120 tokens and 9 new ones") as error:
        llama.continue_tokens([[5] * 10, [5] * 120], max_tokens=9)
    assert error.value.where == "prompt 2 of 2"
    assert "at most 8 new tokens, or shorten the prompt to at most 119 tokens" in error.value.do
    with pytest.raises(TrilloraError, match="200 tokens"):
        llama.continue_tokens([[5] * 200], max_tokens=1)
    small, _ = tiny_generator("llama", longest=20)
    with pytest.raises(TrilloraError, match="exceed the limit of 20"):
        small.continue_tokens([[5] * 15], max_tokens=6)
    with pytest.raises(TrilloraError, match="leaves no room for an answer in a cache of 16"):
        Decoder(CausalLM(tiny_models.configuration("llama"))).prefill({}, {}, jnp.zeros((1, 16)), jnp.zeros(1), 16)
    for options in ({"max_tokens": 0}, {"sampling": Sampling(-1.0)}, {"sampling": Sampling(1.0, 0.0)}):
        with pytest.raises(TrilloraError):
            llama.continue_tokens([[5]], **{"max_tokens": 1, **options})
    with pytest.raises(TrilloraError, match="empty"):
        llama.continue_tokens([[]], max_tokens=1)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "recurrent_gemma", "minimax", "rwkv", "bloom"])
def test_a_model_with_an_unsupported_cache_is_refused(name: str) -> None:
    with pytest.raises(TrilloraError, match=r"cache|cannot generate"):
        Decoder(CausalLM(tiny_models.configuration(name), ModelOptions(remat="none")))


def test_several_devices_generate_the_same_as_one(run: Path, trained: Generator) -> None:
    folder = run.parent / "model"
    mesh = make_mesh(jax.devices()[:8], MeshShape(data=2, fsdp=2, tensor=2))
    model = CausalLM(load_config(folder), ModelOptions(scan=False, remat="none", mesh=mesh))
    base = load_weights(folder, model.module, model.layout, weight_shardings(model, mesh))
    assert any(not array.sharding.is_fully_replicated for array in base.values())
    spread = Generator(model, base, {}, trained.prompts, mesh)
    ours = spread.generate(QUESTIONS, max_tokens=NUM_NEW)
    assert ours == trained.generate(QUESTIONS, max_tokens=NUM_NEW, adapted=False)


def test_a_run_answers_like_peft(run: Path, trained: Generator) -> None:
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    assert [trained.prompts.encode(question) for question in QUESTIONS] == prompts
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop in trained.prompts.stops
    expected = generated_by_transformers(PeftModel.from_pretrained(base, run / "adapter"), prompts, eos=stop)
    answers = trained.generate(QUESTIONS, max_tokens=NUM_NEW)
    for answer, row in zip(answers, expected.tolist(), strict=True):
        assert list(answer.tokens) == (row[: row.index(stop)] if stop in row else row)
        assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)


def test_streamed_text_is_the_generated_text(trained: Generator) -> None:
    before = trained.num_compiles
    pieces = list(trained.stream(QUESTIONS[0], max_tokens=NUM_NEW))
    (answer,) = trained.generate(QUESTIONS[:1], max_tokens=NUM_NEW)
    assert "".join(pieces) == answer.text
    assert len(pieces) >= len(answer.tokens)
    assert trained.num_compiles <= before + 2


def test_a_character_of_several_tokens_is_streamed_whole() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = tokenizer("A → ț 漢")["input_ids"]
    pieces = list(Prompts(tokenizer, template=None).decode_stream(tokens))
    assert "".join(pieces) == "A → ț 漢"
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_spaces_are_not_cleaned_up_later() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.clean_up_tokenization_spaces = True
    text = "I 'm sure , it is n't ."
    pieces = Prompts(tokenizer, template=None).decode_stream(tokenizer(text)["input_ids"])
    assert "".join(pieces) == text


def test_the_template_a_run_was_trained_with_is_used(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "recipe.json", tmp_path)
    (tmp_path / "adapter").mkdir()
    for file in (run / "adapter").iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter" / "checksums.json").unlink()  # the adapter is changed on purpose
    (tmp_path / "adapter" / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    generator = Generator.open(str(tmp_path))
    assert generator.prompts.decode(generator.prompts.encode("what?")) == "Q: what? A:"


def test_an_adapter_is_asked_with_the_template_arguments_of_its_own_run(
    run: Path, trained: Generator, tmp_path: Path
) -> None:
    """Next to another run's or the base's; as the adapter that was named first, or as a further one of a server."""
    for folder, tone in (("other", "kind"), ("named", "rude")):
        recipe = json.loads((run / "recipe.json").read_text())
        recipe["recipe"]["data"]["template_arguments"] = {"tone": tone}
        if folder == "other":  # the code of its base is not needed here
            recipe["recipe"]["model"]["trust_remote_code"] = True
        recipe["sha256"] = json_digest({"withheld": recipe["withheld"], "recipe": recipe["recipe"]})
        adapter = shutil.copytree(run / "adapter", tmp_path / folder / "adapter")
        (tmp_path / folder / "recipe.json").write_text(json.dumps(recipe))
        (adapter / "checksums.json").unlink()  # the adapter is changed on purpose
        (adapter / "chat_template.jinja").write_text("{{ tone }}: {{ messages[0].content }}")
    named = str(tmp_path / "named")
    for name, options, expected in (
        (named, {}, "rude: what?"),
        (named, {"adapter": tmp_path / "other"}, "kind: what?"),
        (str(run.parent / "model"), {"adapter": tmp_path / "other"}, "kind: what?"),
        (named, {"overrides": ["data.template_arguments={tone: calm}"]}, "calm: what?"),
        (named, {"overrides": ["data.template_arguments={tone: calm}"], "adapter": f"{named}/adapter"}, "calm: what?"),
    ):
        prompts = Generator.open(name, **options).prompts  # type: ignore[arg-type]
        assert prompts.decode(prompts.encode("what?")) == expected
    further = prompts_of(find_adapter(tmp_path / "other"), prompts)
    assert further.decode(further.encode("what?")) == "kind: what?"


def test_an_unfinished_run_is_reported(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "recipe.json", tmp_path)
    with pytest.raises(TrilloraError, match="not finished: it has no adapter yet") as error:
        Generator.open(str(tmp_path))
    assert "--base" in error.value.do


def test_the_verb_prints_answers_and_json(run: Path, trained: Generator) -> None:
    (answer,) = trained.generate(QUESTIONS[:1], max_tokens=4)
    arguments = ["generate", str(run), "--prompt", QUESTIONS[0], "--max-tokens", "4", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout)
    assert line["text"] == answer.text and line["prompt"] == QUESTIONS[0]
    assert line["num_tokens"] == len(answer.tokens) and line["stopped"] == answer.stopped


def test_a_conversation_has_memory_until_reset_and_ends(trained: Generator) -> None:
    lines = iter(["What is 3 plus 4?", "", "And 4 plus 5?", "/reset", "What is 3 plus 4?", "word " * 300, "/quit"])
    said: list[str] = []
    converse(trained, lambda: next(lines), said.append, max_tokens=6, sampling=GREEDY)
    text = "".join(said)
    first, second = (trained.prompts.encode(q) for q in ("What is 3 plus 4?", "And 4 plus 5?"))
    assert text.startswith(GREETING) and text.endswith("Bye.\n") and "Conversation cleared." in text
    answer = "".join(trained.stream("What is 3 plus 4?", max_tokens=6))
    before, after = text.split("Conversation cleared.")
    assert f"\n{answer}\n" in before and f"\n{answer}\n" in after  # the same question has the same answer
    assert "the model's limit, with the answer, is 256." in text  # reported, and the conversation continues to /quit
    assert first != second


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_conversation_ends_cleanly_at_end_of_input_or_interrupt(trained: Generator, end: type[BaseException]) -> None:
    said: list[str] = []

    def leave() -> str:
        raise end

    converse(trained, leave, said.append, max_tokens=6, sampling=GREEDY)
    assert said[-1] == "Bye.\n"


@full_dose_only  # of the real model, `make test` has logits and training (test_smollm2.py)
def test_smollm2_answers_like_transformers() -> None:
    generator = Generator.open("smollm2")
    tokens = generator.prompts.encode("Name three colours.")
    (answer,) = generator.generate(["Name three colours."], max_tokens=NUM_NEW)
    reference = AutoModelForCausalLM.from_pretrained(find_model("smollm2"), dtype=torch.float32)
    expected = generated_by_transformers(reference, [tokens])[0].tolist()
    assert list(answer.tokens) == expected[: len(answer.tokens)]
    assert len(answer.tokens) == NUM_NEW or expected[len(answer.tokens)] in generator.prompts.stops


def test_a_base_that_has_changed_is_refused_unless_it_is_named(run: Path, tmp_path: Path) -> None:
    """One flipped bit of the weights; every other file is as it was."""
    model, other = run.parent / "model", tmp_path / "model"
    shutil.copytree(model, other)
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    try:
        weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        for with_adapter in (True, False):
            with pytest.raises(TrilloraError, match="not the one that this run was trained on"):
                Generator.open(str(run), with_adapter=with_adapter)
        Generator.open(str(run), overrides=[f"model.name={model}"])
    finally:
        weights.write_bytes(original)
    Generator.open(str(run), overrides=[f"model.name={other}"])
