"""The recipe: every option of a run, declared once with its default, its unit and its effect.

A recipe has either `data` or a list of `stages`. `stages_of` turns both into the same thing, a list of stages that each
carry a whole `StageRecipe`:

    recipe = load_recipe({"model": "smollm2", "data": "chats.jsonl", "train": {"steps": 60}})
    [stage] = stages_of(recipe)
    stage.name, stage.recipe.train.steps      # ("train", 60)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from trillora.errors import TrilloraError
from trillora.recipe.data_section import DataSection
from trillora.recipe.group_section import MAX_ADAPTERS, MergeSection, SweepSection
from trillora.recipe.lora import LoraSection, RopeSection, TokenText
from trillora.recipe.losses import LossOptions, check_group, check_losses, with_preference_rate
from trillora.recipe.section import Auto, Count, Devices, Rate, Section, Sequences, Tokens, as_mapping, conflict, merged

_DURATION = r"^([0-9]{1,6}h([0-9]{1,6}m)?|[0-9]{1,6}m([0-9]{1,6}s)?|[0-9]{1,6}s)$"
EMBEDDED = "smollm2"  # the model that needs no hub
MAX_STEPS = 10**9  # of a stage
MAX_NEW_TOKENS = 1000
MAX_TOKENS_PER_STEP = 2**31 - 1
Backend = Literal["cpu", "gpu", "tpu"]
Dtype = Literal["float32", "bfloat16"]
Quantize = Literal["none", "int8", "int4", "nf4", "fp8"]
Matmul = Literal["full", "int8", "fp8"]  # see engine/quantize.py
Layers = Literal["scan", "unroll"]
Remat = Literal["none", "linear", "wide", "half", "gate", "attention", "full", "dots", "offload"]  # see model/remat.py
Attention = Literal["xla", "splash", "cudnn"]
Kernels = Literal["xla", "fused"]  # see model/trace.py
LISTS = ("stages", "phases")  # sections that are lists, whose items have data
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$"  # of a stage or phase


class ModelSection(Section):
    """The base model."""

    shorthand = "name"
    name: str = Field(min_length=1, description="smollm2 (embedded), a Hugging Face model id, or a local folder.")
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of a Hugging Face model (default: main)."
    )
    dtype: Auto | Dtype = Field(
        default="auto", description="Number format of the frozen base. auto: the fastest format of the chip."
    )
    quantize: Auto | Quantize = Field(
        default="none",
        description="Store the frozen linear layers in 8 or 4 bits. auto: only if the model does not fit otherwise.",
    )
    rope: RopeSection | None = Field(
        default=None, description="Scaled rotary positions, for rows longer than the model was trained for."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code from the model's repository. Enable only for code you have read."
    )

    @field_validator("name")
    @classmethod
    def _is_no_url(cls, name: str) -> str:
        if "://" in name:
            raise ValueError("a model is not opened by its URL")
        return name


class PhaseOptions(Section):
    """Training options that each stage or phase may override."""

    learning_rate: Auto | Rate = Field(
        default=2e-4,
        description="Peak learning rate (default for losses that compare answers: 2e-5). auto: eight rates are tried "
        "on the first steps, and the best one continues.",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="How the learning rate decays from its peak to zero. constant: no decay. wsd: constant, then decay "
        "at the end.",
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Final fraction of the steps in which schedule wsd decays (default: 0.2)."
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=MAX_STEPS, description="Steps in which the learning rate rises to its peak."
    )
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12, description="Gradients are clipped to this norm.")
    steps: Count | None = Field(default=None, description="Number of optimizer steps; give this or epochs.")
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        default=None, description="Number of passes over the data; give this or steps (default: 1 epoch)."
    )

    @property
    def rate(self) -> float:
        """The learning rate of a stage or phase, where it cannot be `auto`."""
        assert self.learning_rate != "auto"
        return self.learning_rate

    def num_steps(self, steps_per_epoch: int) -> int:
        """The length of the training, once the data is known."""
        num_steps = self.steps or math.ceil((self.epochs or 1) * steps_per_epoch)
        if num_steps > MAX_STEPS:
            raise TrilloraError(
                f"{self.epochs:g} epochs of this data are {num_steps:,} steps; the limit is {MAX_STEPS:,}.",
                where="train.epochs",
                do="use fewer epochs, or set train.steps instead",
            )
        return num_steps


class StageOptions(PhaseOptions, LossOptions):
    """Training options that each stage may override."""

    sequence_length: int = Field(default=512, ge=2, le=2**24, description="Tokens per sequence.")
    batch_size: Sequences = Field(default=8, description="Sequences per optimizer step, over all devices.")
    micro_batch_size: Auto | Sequences = Field(
        default="auto", description="Sequences processed at once, over all devices. Smaller needs less memory."
    )


class TrainSection(StageOptions):
    """How to train."""

    adapters_at_once: Auto | Count = Field(
        default="auto",
        description="Adapters in one call of the step, in a run that trains several together. Fewer need less memory.",
    )

    optimizer: Literal["adamw", "lion", "lion-8bit", "adafactor"] = Field(
        default="adamw",
        description="Optimizer. State per parameter: adamw 8 bytes, lion 4, lion-8bit 1, adafactor almost none. Both "
        "lions need a learning rate 3 to 10 times smaller.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, le=1000, description="Weight decay of the adapter, except whole norms and biases."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of all random choices: same seed, same run.")
    max_bad_steps: Count = Field(
        default=10,
        description="Stop at the last good state after this many consecutive steps that were skipped, had no gradient, "
        "or had a loss far above the usual ones.",
    )
    checkpoint_every: Auto | Count = Field(
        default="auto", description="Steps between checkpoints. auto: at most 2 % of the time is spent on saving."
    )
    keep_checkpoints: int = Field(
        default=2, ge=2, le=10**9, description="Newest checkpoints kept. Each has the best weights so far."
    )
    checkpoint_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or URL (gs://bucket/run) for checkpoints (default: inside the run's folder).",
    )
    time_limit: Annotated[str, Field(pattern=_DURATION)] | None = Field(
        default=None, description="Save and stop after this time, e.g. 8h30m. The same command resumes the run."
    )

    @model_validator(mode="before")
    @classmethod
    def _default_length_and_rate(cls, value: object) -> Any:
        if isinstance(value, Mapping) and value.get("steps") is None and value.get("epochs") is None:
            value = {**value, "epochs": 1.0}
        return with_preference_rate(value)

    @model_validator(mode="before")
    @classmethod
    def _default_decay_of_wsd(cls, value: object) -> Any:
        if isinstance(value, Mapping) and value.get("schedule") == "wsd" and value.get("decay_fraction") is None:
            return {**value, "decay_fraction": 0.2}
        return value

    @model_validator(mode="after")
    def _options_are_compatible(self) -> TrainSection:
        check_losses(self)
        if self.decay_fraction is not None and self.schedule != "wsd":
            raise conflict(
                "decay_fraction",
                f"train.decay_fraction applies only to train.schedule: wsd, which is {self.schedule}.",
                "set train.schedule to wsd, or remove train.decay_fraction",
            )
        if self.steps is not None and self.epochs is not None:
            raise conflict("epochs", "Both train.steps and train.epochs are given.", "remove one of them")
        if self.micro_batch_size != "auto" and self.batch_size % self.micro_batch_size:
            fitting = ", ".join(map(str, _divisors_near(self.micro_batch_size, self.batch_size)))
            raise conflict(
                "micro_batch_size",
                f"train.micro_batch_size {self.micro_batch_size} does not divide train.batch_size {self.batch_size}.",
                f"use auto, or one of {fitting}",
            )
        if self.batch_size * self.sequence_length > MAX_TOKENS_PER_STEP:
            raise conflict(
                "batch_size",
                f"train.batch_size {self.batch_size} x train.sequence_length {self.sequence_length} is more than "
                f"{MAX_TOKENS_PER_STEP:,} tokens per step.",
                "use a smaller batch_size or sequence_length",
            )
        if self.learning_rate != "auto" and self.learning_rate * self.weight_decay > 1:
            raise conflict(
                "weight_decay",
                f"train.learning_rate {self.learning_rate:g} x train.weight_decay {self.weight_decay:g} is more than "
                "1: each step would remove more than the whole weight.",
                "use a smaller weight_decay, such as 0.01",
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            raise conflict(
                "warmup_steps",
                f"train.warmup_steps is {self.warmup_steps}, more than the {self.steps} steps of the run.",
                f"use at most {self.steps}, or the learning rate never reaches its peak",
            )
        return self


class StageSection(StageOptions):
    """One of several stages: its own data, and the training options that differ from `train`. A stage with a `loss` of
    its own takes none of the loss options of `train`; if that loss compares answers, its learning rate is 2e-5 unless
    the stage gives one."""

    name: str = Field(pattern=NAME, description="Name of the stage.")
    data: DataSection = Field(description="The stage's training data: a path, or a mapping.")
    optimizer_state: Literal["carry", "restart"] = Field(
        default="carry",
        description="Keep the optimizer state of the previous stage (carry), or reset it (restart). The default is "
        "restart for a stage with a loss of its own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_loss(cls, value: object) -> Any:
        if isinstance(value, Mapping) and value.get("loss") is not None and value.get("optimizer_state") is None:
            value = {**value, "optimizer_state": "restart"}  # gradients of another loss have another size
        return with_preference_rate(value)

    @model_serializer(mode="wrap")
    def _only_given_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _given(self, handler(self), ("name", "data", "optimizer_state"))


class PhaseSection(PhaseOptions):
    """One of several phases: its own data and adapter, and the training options that differ from `train`."""

    name: str = Field(pattern=NAME, description="Name of the phase, and of its adapter's folder.")
    data: DataSection = Field(description="The phase's training data: a path, or a mapping.")

    @model_serializer(mode="wrap")
    def _only_given_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _given(self, handler(self), ("name", "data"))


class EvaluateSection(Section):
    """Evaluation during training, on rows kept out of training."""

    every_steps: Auto | Count = Field(
        default="auto", description="Steps between evaluations. auto: ten evaluations per run."
    )
    max_documents: Count = Field(
        default=256, description="Size of the evaluation set. It is the same at every evaluation."
    )
    num_samples: int = Field(
        default=3, ge=0, le=64, description="Prompts of the evaluation set answered at every evaluation."
    )
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="Your own prompts to answer instead."
    )
    max_tokens: Tokens = Field(default=128, description="Maximum length of these answers, in tokens.")
    patience: Count | None = Field(
        default=None, description="End a stage after this many evaluations without a lower loss (default: never)."
    )
    keep_best: bool = Field(
        default=True,
        description="Keep the adapter of the best evaluation in the last stage, not the adapter of the last step.",
    )


class TrackSection(Section):
    """Experiment trackers, in addition to the files in the run's folder."""

    services: tuple[Literal["wandb", "trackio"], ...] = Field(
        default=(), description="Services to log to, through their own libraries."
    )
    project: str = Field(default="trillora", min_length=1, description="Project name in these services.")
    every_steps: Count | None = Field(
        default=None,
        description="Steps between logged steps (default: about 100 lines in a log, 20 in a notebook, all steps in "
        "trackers). metrics.jsonl has all steps.",
    )


class MeshSection(Section):
    """Arrangement of the devices. The product of the axes is the number of devices."""

    data: Devices = Field(default=1, description="Copies of the base, each with its own sequences.")
    fsdp: Devices = Field(
        default=1, description="Shards of the base, gathered layer by layer; sequences are sharded too."
    )
    tensor: Devices = Field(default=1, description="Shards of each matmul (tensor parallelism).")
    adapter: Devices = Field(
        default=1, description="Groups of devices that train different adapters, in a run that trains several together."
    )

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor * self.adapter

    @model_serializer(mode="wrap")
    def _without_unused_axis(self, handler: SerializerFunctionWrapHandler) -> dict[str, int]:
        return {axis: size for axis, size in handler(self).items() if axis != "adapter" or size > 1}


class HardwareSection(Section):
    """Where to run."""

    backend: Auto | Backend = Field(
        default="auto", description="Kind of device. If the named kind is missing, the run stops; it never falls back."
    )
    devices: Auto | Devices = Field(default="auto", description="Number of devices to use. auto: all of them.")
    mesh: Auto | MeshSection = Field(
        default="auto", description="Arrangement of the devices. auto: chosen for the model's size."
    )

    @model_validator(mode="after")
    def _mesh_holds_the_devices(self) -> HardwareSection:
        if self.mesh != "auto" and self.devices != "auto" and (size := self.mesh.size) != self.devices:
            raise conflict(
                "mesh",
                f"hardware.mesh has {size} devices (the product of its axes), but hardware.devices is {self.devices}.",
                "make them equal, or leave one of them on auto",
            )
        return self


class EngineSection(Section):
    """How the step is computed: speed and memory. Only matmul changes the results by more than rounding."""

    layers: Auto | Layers = Field(
        default="auto", description="scan: compile one layer and loop over it. unroll: compile all, slower to compile."
    )
    remat: Auto | Remat = Field(
        default="auto",
        description="Activations recomputed in the backward pass. More recomputation saves memory and costs time. From "
        "least to most: none, linear, wide, half, gate, attention, full.",
    )
    attention: Auto | Attention = Field(
        default="auto", description="Attention kernel: xla runs anywhere, splash on TPU, cudnn on NVIDIA GPUs."
    )
    loss_chunk: Auto | Count = Field(
        default="auto", description="Tokens per chunk of the loss. Smaller needs less memory."
    )
    matmul: Matmul = Field(
        default="full",
        description="Matmuls with the frozen linear layers. full: in model.dtype. int8 (TPU v5e, v5p, v6e) and fp8 "
        "(NVIDIA since Ada and Hopper): activations and their gradients are rounded to 8 bits too, which is faster "
        "and less exact. Both set model.quantize to the same format.",
    )
    kernels: Auto | Kernels = Field(
        default="auto",
        description="Kernels for everything except the matmuls. xla: the compiler. fused (one NVIDIA GPU): Triton "
        "kernels for RMSNorm, the loss and the gated MLP with LoRA; on Hopper also fused matmul + LoRA + residual. "
        "auto: fused for dense models in bfloat16 on one GPU, Ampere or newer, else xla.",
    )


class Recipe(Section):
    """One training run."""

    model: ModelSection = Field(description="The base model: a name, or a mapping.")
    data: DataSection | None = Field(default=None, description="The training data: a path, or a mapping.")
    tokens: tuple[TokenText, ...] | None = Field(
        default=None, description="New tokens for the tokenizer. Their embeddings are trained with the adapter."
    )
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter.")
    train: TrainSection = Field(default_factory=TrainSection, description="How to train.")
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection, description="Evaluation during training.")
    track: TrackSection = Field(default_factory=TrackSection, description="Experiment trackers.")
    hardware: HardwareSection = Field(default_factory=HardwareSection, description="Where to run.")
    engine: EngineSection = Field(default_factory=EngineSection, description="How the step is computed.")

    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)] | None = Field(
        default=None, description="Several stages that train the same adapter one after the other. Replaces data."
    )
    phases: Annotated[tuple[PhaseSection, ...], Field(min_length=2, max_length=MAX_ADAPTERS)] | None = Field(
        default=None, description="Several phases that each train an adapter, all together. Replaces data."
    )
    sweep: SweepSection | None = Field(default=None, description="Several values of an option, trained together.")
    merge: MergeSection | None = Field(default=None, description="Merge the adapters of all phases at the end.")
    tiny: Literal["applied"] | dict[str, Any] | None = Field(
        default=None,
        description="Options of this recipe that only --tiny sets, after its built-in ones. applied: in the recipe of "
        "a run that was started with --tiny.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_the_format_of_products(cls, value: Any) -> Any:
        sections = value if isinstance(value, Mapping) else {}
        engine = as_mapping(EngineSection, sections.get("engine"))
        model = as_mapping(ModelSection, sections.get("model"))
        if not isinstance(engine, Mapping) or not isinstance(model, Mapping):
            return value
        if engine.get("matmul") not in ("int8", "fp8") or model.get("quantize") not in (None, "auto"):
            return value
        return {**value, "model": {**model, "quantize": engine["matmul"]}}

    @model_validator(mode="after")
    def _base_has_the_format_of_products(self) -> Recipe:
        matmul, quantize = self.engine.matmul, self.model.quantize
        if matmul not in ("full", quantize):
            raise conflict(
                "engine.matmul",
                f"engine.matmul: {matmul} multiplies the codes of an {matmul} base, but model.quantize is {quantize}.",
                f"set model.quantize to {matmul}, or engine.matmul to full",
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_different(self) -> Recipe:
        tokens = self.tokens or ()
        if len(tokens) > MAX_NEW_TOKENS:
            what = f"The recipe has {len(tokens):,} new tokens; the limit is {MAX_NEW_TOKENS:,}."
            raise conflict("tokens", what, "keep those that no short sequence of existing tokens can replace")
        for number, token in enumerate(tokens):
            if token in tokens[:number]:
                raise conflict(f"tokens[{number}]", f"The token {token!r} is given twice.", "remove one of them")
        return self

    @model_validator(mode="after")
    def _has_data(self) -> Recipe:
        given = [name for name in ("data", "stages", "phases") if getattr(self, name) is not None]
        if len(given) > 1:
            both = f"Both {given[0]} and {given[1]} are given."
            raise conflict(given[1], both, f"move {given[0]} into {given[1]}, or remove {given[1]}")
        if not given:
            expected = "give text (the path) or a mapping: the training data"
            raise conflict("data", "The recipe has no 'data'.", f"{expected}; or give a list of stages or phases")
        for field in ("stages", "phases"):
            self._check_parts(field, getattr(self, field) or ())
        if self.data is not None:
            self.data.check_rows(self.train.rows, "data")
        return self

    def _check_parts(self, field: str, parts: Sequence[StageSection | PhaseSection]) -> None:
        names: set[str] = set()
        for number, part in enumerate(parts):
            if part.name in names:
                raise conflict(f"{field}[{number}].name", f"Two {field} are called {part.name}.", "rename one")
            names.add(part.name)
            try:
                part.data.check_rows(_train_of(self.train, part).rows, f"{field}[{number}].data")
            except ValidationError as error:
                found = error.errors(include_url=False)[0]
                what, do = (found["ctx"][key].replace("train.", f"{field}[{number}].") for key in ("what", "do"))
                raise conflict(f"{field}[{number}].{found['ctx']['key']}", what, do) from None

    @model_validator(mode="after")
    def _trains_one_kind_of_group(self) -> Recipe:
        """Phases, a sweep and `learning_rate: auto` each train several adapters in their own way."""
        parts = (*(self.stages or ()), *(self.phases or ()))
        own_rates = {part.learning_rate for part in parts if "learning_rate" in part.model_fields_set}
        has_auto = "auto" in {self.train.learning_rate, *own_rates}
        kinds = {"phases": self.phases, "sweep": self.sweep, "train.learning_rate: auto": has_auto or None}
        used = [name for name, value in kinds.items() if value is not None]
        if len(used) > 1:
            what = f"A recipe cannot have both {used[0]} and {used[1]}."
            raise conflict(used[1].partition(":")[0], what, "use one of them")
        if used and self.stages is not None:
            what = f"A recipe with stages cannot have {used[0]}."
            raise conflict("stages", what, "train each stage in a run of its own, and start from the one before")
        if used and self.data is not None and self.data.num_length_buckets > 1:
            what = f"data.num_length_buckets is for runs with one adapter, not for {used[0]}."
            raise conflict("data.num_length_buckets", what, "remove it: all adapters have sequences of one length")
        if used and (self.tokens or self.lora.train_tokens):
            option = "tokens" if self.tokens else "lora.train_tokens"
            what = f"{option} is for runs with one adapter, not for {used[0]}."
            raise conflict(option, what, "train one adapter, or remove it")
        if used and self.train.precompute_ref_log_probs:
            what = f"train.precompute_ref_log_probs is for runs with one adapter, not for {used[0]}."
            raise conflict("train.precompute_ref_log_probs", what, "remove it")
        has_axis = self.hardware.mesh != "auto" and self.hardware.mesh.adapter > 1
        if not used and (self.train.adapters_at_once != "auto" or has_axis):
            option = "hardware.mesh.adapter" if has_axis else "train.adapters_at_once"
            what = f"{option} applies only to a run that trains several adapters together."
            raise conflict(option, what, "remove it, or give phases or a sweep")
        return self

    @model_validator(mode="after")
    def _compares_answers_where_it_can(self) -> Recipe:
        betas = () if self.sweep is None else self.sweep.beta or ()
        check_group(self.train, has_phases=self.phases is not None, sweeps_beta=bool(betas))
        return self

    @model_validator(mode="after")
    def _merges_phases(self) -> Recipe:
        if self.merge is not None and self.phases is None:
            raise conflict("merge", "merge applies only to a recipe with phases.", "remove merge, or give phases")
        if self.merge is not None and (self.lora.dora or self.lora.modules_to_save):
            option = "lora.dora" if self.lora.dora else "lora.modules_to_save"
            what = f"Adapters with {option} cannot be merged: they are not only a sum of changes."
            raise conflict("merge", what, f"remove merge or {option}")
        weights = self.merge.weights if self.merge is not None else None
        if weights is not None and len(weights) != len(self.phases or ()):
            what = f"merge.weights has {len(weights)} values for {len(self.phases or ())} phases."
            raise conflict("merge.weights", what, "give one weight per phase, in their order")
        return self

    @property
    def keeps_reference(self) -> bool:
        """Whether the state has the adapter that preferences are compared with."""
        return self.train.has_reference


class StageRecipe(Recipe):
    """A recipe with one stage: what the parts of a run are built from."""

    data: DataSection = Field(description="The training data: a path, or a mapping.")
    run_has_reference: bool = Field(
        default=False, description="The state of the run has the adapter that preferences are compared with."
    )

    @property
    def keeps_reference(self) -> bool:
        return self.run_has_reference or self.train.has_reference

    @model_validator(mode="after")
    def _trains_one_kind_of_group(self) -> StageRecipe:
        return self  # it may be one adapter of a group


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    name: str
    recipe: StageRecipe
    restarts_optimizer: bool = False


_PARTS = (*LISTS, "sweep", "merge", "tiny")  # sections that `stages_of` and `group_of` take apart


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The run as a list of stages, each with a whole recipe. Most recipes have one stage. Phases are listed too, though
    they are trained together: each with the recipe that would train it alone."""
    sections = {name: getattr(recipe, name) for name in Recipe.model_fields if name not in _PARTS}
    parts = recipe.stages or recipe.phases
    losses = [recipe.train] if parts is None else [_train_of(recipe.train, part) for part in parts]
    sections["run_has_reference"] = any(train.has_reference for train in losses)
    if parts is None:
        return (Stage("train", StageRecipe(**sections)),)
    return tuple(
        Stage(
            part.name,
            StageRecipe(**{**sections, "data": part.data, "train": _train_of(recipe.train, part)}),
            isinstance(part, StageSection) and part.optimizer_state == "restart",
        )
        for part in parts
    )


def seconds_of(time_limit: str) -> int:
    """`8h30m` in seconds."""
    return sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)([hms])", time_limit))


def _train_of(train: TrainSection, part: StageSection | PhaseSection) -> TrainSection:
    values = {name: getattr(part, name) for name in StageOptions.model_fields if name in part.model_fields_set}
    own = {name: value for name, value in values.items() if value is not None}
    general = train.model_dump(mode="json")
    if "loss" in own:
        general = {name: value for name, value in general.items() if name not in LossOptions.model_fields}
    if "schedule" in own:
        general.pop("decay_fraction")  # it belongs to the schedule that is replaced
    return TrainSection.model_validate(merged(general, own))


def _given(part: Section, values: Mapping[str, object], own: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given; `train` has all others."""
    return {key: values[key] for key in (*own, *values) if key in own or key in part.model_fields_set}


def _divisors_near(wanted: int, number: int) -> list[int]:
    """Up to eight divisors of `number`, those closest to `wanted`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:8])
