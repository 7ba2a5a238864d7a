"""One LoRA trainer on one GPU, on work that all of them can do: `peers.py` runs this once for each.

    python benchmarks/peer_engines.py unsloth 1b-2048 1b-packed --model /dev/shm/models/llama-1b --steps 16

All start from the same folder with random weights and train on the same documents, with LoRA rank 16 on the same
layers, AdamW and bfloat16, without dropout or gradient checkpointing. A step has a fixed list of documents:

    engine              documents that are shorter than a row
    trillora            packed into rows
    unsloth             one document in a row; with different lengths as unsloth-packed
    unsloth-packed      one row with all documents, and their lengths
    trl, trl-liger      one document in a row; with different lengths in 8 parts sorted by length, each padded

TRL runs its SFTTrainer. Unsloth runs in a plain loop, without the overhead of a trainer. There and in our loop, as in
our training, the loss of a step is read when the next step has been started, so that the GPU does not wait for Python.
Every work starts with a new adapter, and prints its result as a line of JSON. Each process measures one engine, because
they patch transformers.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-4
FIRST_TOKEN = 3  # after padding, start and end
NUM_BATCHES = 4  # used in turn
NUM_PARTS = 8  # of a step with different lengths, for TRL
PACKAGES = (
    "torch",
    "transformers",
    "jax",
    "torchax",
    "accelerate",
    "peft",
    "trl",
    "liger-kernel",
    "unsloth",
    "xformers",
)
# Tokens of every 112th conversation of the package chitchat-dataset 0.9.0, sorted by length, with SmolLM2's tokenizer
# and template: those from 16 to 2048 tokens.
CHAT = (
    *(
        16,
        17,
        17,
        18,
        19,
        21,
        22,
        24,
        25,
        28,
        30,
        32,
        36,
        39,
        43,
        46,
        52,
        57,
        61,
        67,
        69,
        76,
        85,
        91,
        95,
        102,
        108,
        117,
    ),
    *(
        126,
        135,
        142,
        152,
        164,
        173,
        183,
        199,
        217,
        238,
        266,
        290,
        318,
        337,
        365,
        395,
        452,
        487,
        537,
        598,
        660,
        729,
        795,
    ),
    *(875, 941, 992, 1079, 1155, 1226, 1322, 1393, 1485, 1600, 1715, 1864, 1993),
)


@dataclass(frozen=True)
class Work:
    shape: str  # of random_model.SHAPES
    lengths: tuple[int, ...]  # of the documents of a step
    row: int = 2048  # tokens of a row, where documents are packed

    @property
    def is_uneven(self) -> bool:
        return len(set(self.lengths)) > 1


WORKS = {
    "1b-2048": Work("llama-1b", (2048,) * 8),
    "1b-packed": Work("llama-1b", (512,) * 32),
    "1b-8192": Work("llama-1b", (8192,) * 2, 8192),
    "1b-chat": Work("llama-1b", CHAT),
    "7b-2048": Work("mistral-7b", (2048,) * 4),
    "7b-packed": Work("mistral-7b", (512,) * 16),
    "7b-8192": Work("mistral-7b", (8192,), 8192),
    "7b-chat": Work("mistral-7b", CHAT[::2]),
    "mixture": Work("mixture-3b", (2048,) * 8),
    "tiny": Work("tiny", (64,) * 4, 64),
    "tiny-chat": Work("tiny", (5, 9, 17, 20, 33, 40, 50, 64), 64),
    "tiny-mixture": Work("tiny-mixture", (64,) * 4, 64),
}
ENGINES = ("trillora", "unsloth", "unsloth-packed", "trl", "trl-liger")


@dataclass
class Measured:
    step_ends: list[float]
    losses: list[float]
    num_trained: int
    peak_bytes: float
    notes: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("works", nargs="+", choices=WORKS, help="of one shape")
    parser.add_argument("--model", type=Path, required=True, help="folder written by peers.py")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--set", nargs="*", default=[], help="recipe overrides for trillora, as in engine.remat=linear")
    args = parser.parse_args()
    # Nothing here needs the network; Unsloth would otherwise wait for its usage statistics.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", UNSLOTH_DISABLE_STATISTICS="1")
    train = {"trillora": train_trillora, "unsloth": train_unsloth, "trl": train_trl}[args.engine.split("-")[0]]
    for name in args.works:
        try:
            with tempfile.TemporaryDirectory() as folder:
                measured = train(args, WORKS[name], Path(folder))
            found = report(args, WORKS[name], measured)
        except Exception as error:  # the next work may succeed
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        gc.collect()
        print(json.dumps({"engine": args.engine, "work": name} | found), flush=True)


def say(phase: str, started: float = time.perf_counter()) -> None:
    """What a process was doing when it was stopped."""
    print(f"{time.perf_counter() - started:.0f} s: {phase}", flush=True)


def documents_of_steps(work: Work, vocab_size: int) -> list[list[Any]]:
    """NUM_BATCHES lists of token arrays, the same for all engines."""
    import numpy as np

    generator = np.random.default_rng(0)
    return [
        [generator.integers(FIRST_TOKEN, vocab_size, length) for length in work.lengths] for _ in range(NUM_BATCHES)
    ]


def train_trillora(args: argparse.Namespace, work: Work, folder: Path) -> Measured:
    """The step of `trillora train` on one device, built by the same functions."""
    import jax
    from transformers import AutoConfig

    from trillora.devices.mesh import find_devices, put_batch
    from trillora.events import ignore_events
    from trillora.model.loading.weights import load_weights
    from trillora.preflight.predict import predictor_for
    from trillora.recipe.load import load_recipe
    from trillora.step.autotune import choose, step_bytes
    from trillora.training.entries.programs import place_state

    config = AutoConfig.from_pretrained(args.model)
    batches = [packed(documents, work.row) for documents in documents_of_steps(work, config.vocab_size)]
    mixture = getattr(config, "num_experts", 0)
    recipe = load_recipe(
        {
            "model": str(args.model),
            "data": {"path": "random.jsonl", "pack": bool((batches[0]["segments"] > 1).any())},
            "lora": {"rank": RANK, "alpha": ALPHA, "targets": [*ATTENTION, "experts"] if mixture else DENSE},
            "train": {
                "sequence_length": work.row,
                "batch_size": len(batches[0]["tokens"]),
                "steps": args.steps,
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
            },
        },
        args.set,
    )
    devices = find_devices("auto", 1)
    say("choosing and compiling the step")
    started = time.perf_counter()
    predictor, room = predictor_for(devices), room_for(work) if recipe.data.pack else None
    plan = choose(recipe, config, devices, args.steps, ignore_events, predictor=predictor, document_room=room)
    compile_seconds = time.perf_counter() - started
    assembly = plan.assembly
    say("loading weights")
    base = load_weights(args.model, assembly.model.module, assembly.model.layout, assembly.base_shardings)
    state = place_state(assembly, seed=0, base=base)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(state.adapter))
    say("steps")
    placed = [put_batch(batch, assembly.mesh) for batch in batches]
    step_ends, losses = [], []
    started_losses: list[Any] = []
    for step in range(args.steps):
        state, metrics = plan.compiled(state, base, placed[step % NUM_BATCHES])
        started_losses.append(metrics.loss)
        if step:
            losses.append(float(started_losses[step - 1]))
            step_ends.append(time.perf_counter())
    losses.append(float(started_losses[-1]))
    step_ends.append(time.perf_counter())
    # As planned by the compiler, because jax counts the peak of the whole process. `RESULTS.md`: they agree.
    peak = step_bytes(plan.compiled)
    notes = (
        f"remat {plan.settings.remat}, micro-batch {plan.settings.micro_batch_size}, compiled {compile_seconds:.0f} s"
    )
    return Measured(step_ends, losses, num_trained, peak, notes)


def room_for(work: Work) -> Any:
    """The room that the documents of a step need, as training finds it."""
    import numpy as np

    from trillora.data.pack import best_fit
    from trillora.data.stage import shortest_block
    from trillora.recipe.resolve import DocumentRoom

    lengths = np.array(work.lengths)
    block = shortest_block(int(lengths.max()), work.row)
    return DocumentRoom(block, best_fit(lengths, work.row).most_in(block, lengths, work.row))


def packed(documents: list[Any], row_length: int) -> dict[str, Any]:
    """Arrays [rows, tokens] as training builds them."""
    import numpy as np

    from trillora.data.pack import best_fit, fill_row
    from trillora.data.tokenizing.encode import TokenizedDocument

    rows = best_fit(np.array([len(document) for document in documents]), row_length)
    dtypes = {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "segments": np.int32,
        "positions": np.int32,
    }
    arrays: dict[str, Any] = {name: np.zeros((len(rows), row_length), dtype) for name, dtype in dtypes.items()}
    for number in range(len(rows)):
        chosen = [documents[index].astype(np.int32) for index in rows[number]]
        tokenized = (TokenizedDocument(tokens, np.ones(len(tokens), bool), 1.0) for tokens in chosen)
        fill_row(tokenized, {name: array[number] for name, array in arrays.items()})
    return arrays


def train_trl(args: argparse.Namespace, work: Work, folder: Path) -> Measured:
    """TRL's SFTTrainer with PEFT. Liger's kernels replace transformers' norm, rotary embedding and MLP."""
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    measured = Measured([], [], 0, 0.0)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            measured.step_ends.append(time_when_done())

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            measured.losses += [logs["loss"]] if logs and "loss" in logs else []

    say("loading the model")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda" if on_gpu else None
    )
    mixture = getattr(model.config, "num_experts", 0)
    if mixture:
        model.set_experts_implementation("grouped_mm")
    steps = documents_of_steps(work, model.config.vocab_size)
    # Enough rows for all steps: a new epoch would restart the loader during the measurement. Lengths are sorted.
    rows = [document.tolist() for step in range(args.steps) for document in steps[step % NUM_BATCHES]]
    num_parts = NUM_PARTS if work.is_uneven else 1
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(work.lengths) // num_parts,
            gradient_accumulation_steps=num_parts,
            max_steps=args.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=True,
            use_cpu=not on_gpu,
            max_length=None,
            gradient_checkpointing=False,
            use_liger_kernel=args.engine == "trl-liger",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            **({"router_aux_loss_coef": 0.0} if mixture else {}),
        ),
        # With a fingerprint: computing one pickles a class that pyarrow 26 hides.
        train_dataset=Dataset(InMemoryTable.from_pydict({"input_ids": rows, "labels": rows}), fingerprint="documents"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules=ATTENTION if mixture else DENSE,
            target_parameters=EXPERTS if mixture else None,
            task_type="CAUSAL_LM",
        ),
        callbacks=[Clock()],
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)  # type: ignore[method-assign]
    say("steps")
    trainer.train()
    measured.num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    measured.peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 0
    measured.notes = f"{num_parts} parts" if num_parts > 1 else ""
    return measured


def train_unsloth(args: argparse.Namespace, work: Work, folder: Path) -> Measured:
    """Unsloth's patched model and fused loss, in a loop of forward, backward and AdamW."""
    import unsloth  # isort: skip  # noqa: F401  (first: it patches the others)
    import torch

    say("loading the model")
    is_packed = args.engine == "unsloth-packed" or work.is_uneven
    model = unsloth_model(args.model, max(sum(WORKS[name].lengths) for name in args.works))
    trainable = new_adapter(model)
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=True)
    batches = [in_one_row(d) if is_packed else in_rows(d) for d in documents_of_steps(work, model.config.vocab_size)]
    torch.cuda.reset_peak_memory_stats()

    say("steps")
    measured = Measured([], [], sum(p.numel() for p in trainable), 0.0)
    started_losses: list[Any] = []
    for step in range(args.steps):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batches[step % NUM_BATCHES]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        started_losses.append(loss.detach())
        if step:
            measured.losses.append(started_losses[step - 1].item())
            measured.step_ends.append(time.perf_counter())
    measured.losses.append(started_losses[-1].item())
    measured.step_ends.append(time_when_done())
    measured.peak_bytes = torch.cuda.max_memory_allocated()
    return measured


@functools.cache
def unsloth_model(folder: Path, num_tokens: int) -> Any:
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=num_tokens, dtype=torch.bfloat16, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0,
        target_modules=DENSE,  # in a mixture, Unsloth adapts its experts for the last three
        use_gradient_checkpointing=False,
        random_state=0,
    )
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    return model


def new_adapter(model: Any) -> list[Any]:
    """The adapter's parameters, with B set to zero."""
    import torch

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for name, parameter in named:
            if "lora_B" in name:
                parameter.zero_()
    return [parameter for _, parameter in named]


def in_rows(documents: list[Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    ids = torch.from_numpy(np.stack(documents)).cuda()
    return {"input_ids": ids, "labels": ids}


def in_one_row(documents: list[Any]) -> dict[str, Any]:
    """All documents one after another. The first token of each is no target."""
    import numpy as np
    import torch

    labels = [np.where(np.arange(len(document)) == 0, -100, document) for document in documents]
    positions = [np.arange(len(document)) for document in documents]
    ids, labels, positions = (torch.from_numpy(np.concatenate(x))[None].cuda() for x in (documents, labels, positions))
    lengths = torch.tensor([len(document) for document in documents], dtype=torch.int32, device="cuda")
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "packed_seq_lengths": lengths}


def time_when_done() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def report(args: argparse.Namespace, work: Work, measured: Measured) -> dict[str, Any]:
    seconds = [after - before for before, after in zip(measured.step_ends, measured.step_ends[1:], strict=False)]
    step_seconds = statistics.median(seconds[-(args.steps // 2) :])
    return {
        "tokens_per_second": round(sum(work.lengths) / step_seconds),  # padding is not counted
        "step_ms": round(step_seconds * 1e3, 1),
        "peak_gib": round(measured.peak_bytes / 2**30, 1),
        "first_loss": round(measured.losses[0], 4),
        "last_loss": round(measured.losses[-1], 4),
        "trained": measured.num_trained,
        "notes": measured.notes,
        "versions": {name: found for name in PACKAGES if (found := installed_version(name))},
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
