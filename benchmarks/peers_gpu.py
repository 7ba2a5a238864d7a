"""Speed and memory of other LoRA trainers on one GPU, on the same work as `gpu_step.py`.

    python benchmarks/peers_gpu.py trl|trl-liger|unsloth --rows 8 --tokens 2048 --steps 30

Random weights of a 1.2B Llama shape, LoRA rank 16 on the seven linear layers of a block, fused AdamW, bfloat16, no
gradient checkpointing, no dropout, full sequences without padding. TRL runs its own SFTTrainer; Unsloth runs its model
in a bare loop, without the overhead of a trainer. The step time is the median of the last half of the steps, from the
end of one step to the end of the next. The last line of output is the result as JSON. `--shape tiny` tests the TRL path
without a GPU; Unsloth needs one. Each process measures one engine, because they all patch transformers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECIAL_TOKENS = {"<pad>": 0, "<s>": 1, "</s>": 2}  # random tokens start after these
NUM_BATCHES = 4  # used in turn
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "unsloth", "unsloth_zoo")


class Measured(NamedTuple):
    """The end time of each step, and the loss that the engine reports (TRL: the mean, Unsloth: the last)."""

    step_ends: list[float]
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("trl", "trl-liger", "unsloth"))
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    # Nothing here needs the network; Unsloth would otherwise wait for its usage statistics.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", UNSLOTH_DISABLE_STATISTICS="1")
    with tempfile.TemporaryDirectory() as folder:
        if args.engine == "unsloth":
            measured = train_unsloth(args, Path(folder))
        else:
            measured = train_trl(args, Path(folder), use_liger=args.engine == "trl-liger")
    print(json.dumps(report(args, measured)), flush=True)


def train_trl(args: argparse.Namespace, folder: Path, use_liger: bool) -> Measured:
    """TRL's SFTTrainer with PEFT. Liger's kernels replace transformers' norm, rotary embedding and MLP."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    step_ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(time_when_done())

    # Enough rows for all steps: a new epoch would restart the loader during the measurement.
    num_rounds = -(-args.steps // NUM_BATCHES)
    rows = [row for batch in token_batches(args) * num_rounds for row in batch.tolist()]
    trainer = SFTTrainer(
        model=random_model(args),
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=args.rows,
            max_steps=args.steps,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            max_length=args.tokens,
            gradient_checkpointing=False,
            use_liger_kernel=use_liger,
            logging_steps=args.steps,
            save_strategy="no",
            report_to=[],
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    )
    return Measured(step_ends, trainer.train().training_loss)


def train_unsloth(args: argparse.Namespace, folder: Path) -> Measured:
    """Unsloth's patched model and fused loss, in a loop of forward, backward and AdamW."""
    # Unsloth must be imported before transformers, so another process writes the checkpoint that it reads.
    writer = multiprocessing.get_context("spawn").Process(target=save_random_model, args=(args, folder))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"writing the random model failed with exit code {writer.exitcode}")
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder / "compiled")

    from unsloth import FastLanguageModel  # isort: skip  (first: it patches the others)
    import torch

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=args.tokens, dtype=torch.bfloat16, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        lora_dropout=0,
        target_modules=LORA_TARGETS,
        use_gradient_checkpointing=False,
        random_state=0,
    )
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
    batches = [torch.from_numpy(batch).cuda() for batch in token_batches(args)]

    step_ends = []
    for step in range(args.steps):
        ids = batches[step % NUM_BATCHES]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_ends.append(time_when_done())
    return Measured(step_ends, loss.item())


def save_random_model(args: argparse.Namespace, folder: Path) -> None:
    """Saves a checkpoint like one from the hub: weights, configuration and tokenizer."""
    random_model(args).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def random_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SHAPES[args.shape], max_position_embeddings=args.tokens, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def tokenizer() -> Any:
    """A tokenizer with special tokens only: the trainers require one, but the data is already tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({**SPECIAL_TOKENS, "a": len(SPECIAL_TOKENS)}, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<pad>",
    )


def token_batches(args: argparse.Namespace) -> list[Any]:
    """The same tokens as in `gpu_step.py`: NUM_BATCHES arrays of [rows, tokens]."""
    import numpy as np

    generator = np.random.default_rng(0)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    return [generator.integers(len(SPECIAL_TOKENS), vocab_size, (args.rows, args.tokens)) for _ in range(NUM_BATCHES)]


def time_when_done() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def report(args: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    seconds = [after - before for before, after in zip(measured.step_ends, measured.step_ends[1:], strict=False)]
    step_seconds = statistics.median(seconds[-(args.steps // 2) :])
    return {
        "engine": args.engine,
        "tokens_per_second": round(args.rows * args.tokens / step_seconds),
        "step_ms": round(step_seconds * 1e3, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else 0.0,
        "loss": round(measured.loss, 3),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {name: found for name in PACKAGES if (found := installed_version(name))},
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
