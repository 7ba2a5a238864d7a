"""What TRL computes on the CPU: loss, logged metrics, gradients and tokens of its trainers for preferences.

    start = write_start(folder)                               # its parts: base, a tiny Llama; adapter, a random LoRA
    run = trl_run(start, "dpo", pairs(4), loss_type=["ipo"])  # one step that changes nothing
    run.losses[0], run.metrics[0]["rewards/margins"]
    run.gradients["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    run.batches[0].tokens, run.batches[0].masks               # of each row: first the chosen answers, then the rejected

Both matrices of the LoRA are random: with B = 0, as usual, policy and reference are equal, and most defects hide. The
reference is the base model; with `continued=True` it is the adapter at the start, as TRL has it for an adapter that is
trained further.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from chat_tokenizers import chat_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PrinterCallback, TrainerCallback
from transformers.utils import logging

Kind = Literal["dpo", "kto", "orpo", "cpo"]
Row = dict[str, Any]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ANSWERS = ("chosen", "rejected")
_QUIET = {"CI": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def write_start(folder: Path) -> Path:
    """A folder with a base model and an adapter that changes every answer's probability much."""
    tokenizer = chat_tokenizer("llama3")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with _quiet():
        base.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        adapted = get_peft_model(base, _lora())
        with torch.no_grad():
            for _, parameter in _lora_parameters(adapted):
                parameter.copy_(0.15 * torch.randn(parameter.shape))
        adapted.save_pretrained(folder / "adapter")
    return folder


def _lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")


# ---- rows

_WORDS = "the quick brown fox jumps over a lazy dog and answers 42 in Paris; 1 + 2 = 3!".split()  # noqa: SIM905


def pairs(count: int, seed: int = 0) -> list[Row]:
    """Rows of chats: one or two questions, some with a system message. The answers of a pair have different lengths; in
    every fourth row the rejected one begins as the chosen one."""
    return [_pair(number, random.Random(1000 * seed + number)) for number in range(count)]


def _pair(number: int, rng: random.Random) -> Row:
    def turn(role: str, num_words: int = 3, first: str = "") -> dict[str, str]:
        return {"role": role, "content": first + " ".join(rng.choices(_WORDS, k=num_words))}

    earlier = [turn("system")] * (number % 3 == 0) + [turn("user"), turn("assistant")] * (number % 2)
    chosen = turn("assistant", 1 + 3 * (number % 2))
    first = chosen["content"] + " " if number % 4 == 2 else ""
    rejected = turn("assistant", 7 - (2 * number) % 7, first)
    return {"prompt": [*earlier, turn("user")], "chosen": [chosen], "rejected": [rejected]}


def text_pairs(count: int, *, prompts: bool = True) -> list[Row]:
    """Rows of texts. Answers begin with a space: no token has the end of a prompt and the beginning of an answer."""
    return [
        {
            "prompt": row["prompt"][-1]["content"] if prompts else "",
            **{name: " " + row[name][0]["content"] for name in ANSWERS},
        }
        for row in pairs(count)
    ]


def labelled(count: int, of: Callable[[int], list[Row]] = pairs) -> list[Row]:
    """One answer of each pair, with its label: chosen, rejected, rejected, chosen, and so on."""
    return [
        {"prompt": row["prompt"], "completion": row[ANSWERS[number % 3 > 0]], "label": number % 3 == 0}
        for number, row in enumerate(of(count))
    ]


# ---- runs


@dataclass(frozen=True)
class Batch:
    """The rows of a batch without padding: their tokens, and for each token whether it belongs to the answer. For pairs
    first all chosen ones, then all rejected ones. KTO has labels, and `others`: each prompt with the answer of the row
    before, labelled true."""

    tokens: list[list[int]]
    masks: list[list[int]]
    labels: tuple[bool, ...] = ()
    others: Batch | None = None


@dataclass(frozen=True)
class TrlRun:
    losses: list[float]  # of each step
    metrics: list[dict[str, float]]  # that TRL logs after each step, by its names
    batches: list[Batch]
    gradients: dict[str, np.ndarray]  # of the first step, by the names in an adapter's file
    adapter: dict[str, np.ndarray]  # after the last step


def trl_run(
    start: Path, kind: Kind, rows: Sequence[Row], steps: int = 1, *, continued: bool = False, **options: Any
) -> TrlRun:
    """Trains with TRL's trainer: batches of four rows in their order, AdamW with a constant learning rate, by default
    zero. `options` are TRL's own."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        import datasets

        trainer_class, config_class = _classes(kind)
        base = AutoModelForCausalLM.from_pretrained(start / "base", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(start / "base")
        tokenizer.pad_token = tokenizer.eos_token  # as DPOTrainer sets it; the older trainers do not
        recorder = _Recorder()
        trainer = _recording(trainer_class, recorder)(
            model=PeftModel.from_pretrained(base, start / "adapter", is_trainable=True) if continued else base,
            peft_config=None if continued else _lora(),
            args=config_class(**{**_OPTIONS, "output_dir": folder, "max_steps": steps, **options}),
            train_dataset=datasets.Dataset.from_list(list(rows)),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        if not continued:
            set_peft_model_state_dict(trainer.model, load_peft_weights(str(start / "adapter"), device="cpu"))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        metrics = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(metrics) == len(recorder.losses) == steps
        adapter = {name: parameter.detach().numpy().copy() for name, parameter in _lora_parameters(trainer.model)}
        return TrlRun(recorder.losses, metrics, recorder.batches, recorder.gradients, adapter)


_OPTIONS: dict[str, Any] = {
    "learning_rate": 0.0,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,  # gradients are not clipped
    "per_device_train_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "max_length": 200,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def _classes(kind: Kind) -> tuple[Any, Any]:
    if kind in ("dpo", "kto"):
        from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

        return (DPOTrainer, DPOConfig) if kind == "dpo" else (KTOTrainer, KTOConfig)
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return (ORPOTrainer, ORPOConfig) if kind == "orpo" else (CPOTrainer, CPOConfig)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, messages and connections. Afterwards the environment is as before."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with unittest.mock.patch.dict(os.environ, _QUIET), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets

        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps what a trainer computes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batches: list[Batch] = []
        self.gradients: dict[str, np.ndarray] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not self.gradients:
            parameters = _lora_parameters(given["model"])
            self.gradients = {name: parameter.grad.numpy().copy() for name, parameter in parameters}


def _recording(trainer_class: Any, recorder: _Recorder) -> Any:
    class Recording(trainer_class):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **named)
            recorder.losses.append(loss.item())
            recorder.batches.append(_batch(inputs))
            return loss

    return Recording


def _lora_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Of the trained adapter, with their names in its file."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and ".default." in name:
            yield name.replace(".default.", "."), parameter


def _batch(inputs: Any) -> Batch:
    if "chosen_labels" in inputs:  # ORPO and CPO
        masks = [inputs[f"{answer}_labels"] != -100 for answer in ANSWERS]
        parts = [
            _unpadded(inputs[f"{answer}_input_ids"], inputs[f"{answer}_attention_mask"], mask)
            for answer, mask in zip(ANSWERS, masks, strict=True)
        ]
        return Batch(*(chosen + rejected for chosen, rejected in zip(*parts, strict=True)))
    rows = Batch(*_unpadded(*(inputs[name] for name in _ARRAYS)))
    if "label" not in inputs:
        return rows
    labels, others = tuple(inputs["label"].tolist()), None
    if "KL_input_ids" in inputs:
        others = Batch(*_unpadded(*(inputs[f"KL_{name}"] for name in _ARRAYS)), labels=(True,) * len(labels))
    return dataclasses.replace(rows, labels=labels, others=others)


_ARRAYS = ("input_ids", "attention_mask", "completion_mask")


def _unpadded(tokens: torch.Tensor, attention: torch.Tensor, masks: torch.Tensor) -> tuple[list[Any], list[Any]]:
    kept = [row.bool() for row in attention]
    return tuple([row[keep].int().tolist() for row, keep in zip(array, kept, strict=True)] for array in (tokens, masks))
