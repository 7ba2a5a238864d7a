"""What a recipe changes about the model: the section `lora`, the adapter, and `model.rope`, its rotary positions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from trillora.recipe.section import Rank, Rate, Section, conflict

TokenText = Annotated[str, Field(pattern=r"\S", max_length=200)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**24)]
Names = tuple[Annotated[str, Field(min_length=1)], ...]
Patterns = tuple[Annotated[str, Field(min_length=1)], ...]
_VARIANTS = (
    "exclude",
    "rank_pattern",
    "alpha_pattern",
    "dora",
    "init",
    "loraplus_ratio",
    "train_tokens",
    "modules_to_save",
)
# Rope types of transformers that a recipe cannot have, and why.
_OTHER_ROPE = {
    "default": "scales nothing",
    "dynamic": "changes with the longest text, so training and generation would differ",
    "ntk": "changes with the longest text, so training and generation would differ",
    "longrope": "needs a list of factors that belongs to one model",
    "proportional": "belongs to the models that were trained with it",
    "axial": "belongs to the models that were trained with it",
}
RopeType = Literal["yarn", "linear", "llama3"]


class RopeSection(Section):
    """Rotary positions for rows that are longer than the model was trained for."""

    type: RopeType = Field(
        default="yarn",
        description="How frequencies are scaled. yarn: the usual choice. linear: positions divided by the factor. "
        "llama3: as in Llama 3.1.",
    )
    factor: float = Field(
        gt=1, le=1024, description="Longest rows divided by the model's own limit: 4 means four times as many tokens."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_a_known_type(cls, value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and (why := _OTHER_ROPE.get(kind)):
            raise conflict("type", f"The rope type {kind} {why}.", "use yarn, linear or llama3, or remove model.rope")
        return value

    def __str__(self) -> str:
        return f"{self.type}, factor {self.factor:g}"


class LoraSection(Section):
    """The adapter."""

    rank: Rank = Field(
        default=16, description="Rank of the adapter. A higher rank can learn more and needs more memory."
    )
    alpha: Rate = Field(default=32.0, description="Scaling: the adapter's output is multiplied by alpha / rank.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) instead, better for high ranks.")
    dropout: float = Field(default=0.0, ge=0, le=0.99, description="Dropout probability on the adapter's inputs.")
    targets: Literal["all-linear"] | Annotated[Patterns, Field(min_length=1)] = Field(
        default="all-linear",
        description="Layers that get an adapter: all-linear, or a list of names or patterns. A pattern is the end of a "
        "name, a glob, or a regular expression after re:. In a list, experts means the weights of all experts.",
    )
    exclude: Patterns = Field(default=(), description="Names or patterns of targets that get no adapter.")
    rank_pattern: dict[str, Rank] = Field(
        default_factory=dict, description="Other ranks for some targets, by name or pattern."
    )
    alpha_pattern: dict[str, Rate] = Field(
        default_factory=dict, description="Other alphas for some targets, by name or pattern."
    )
    dora: bool = Field(
        default=False, description="DoRA: also train the length of each weight row. Slower, better for low ranks."
    )
    init: Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16"] = Field(
        default="default",
        description="Initial values. pissa: the largest singular vectors of each weight, which learns faster; "
        "pissa_niter_16 computes them approximately, in a fraction of the time.",
    )
    loraplus_ratio: Rate = Field(
        default=1.0, description="LoRA+: ratio of the learning rates of the B and A matrices, e.g. 16."
    )
    train_tokens: tuple[TokenId | TokenText, ...] = Field(
        default=(),
        max_length=2**16,
        description="Existing tokens, by text or number, whose embeddings are trained too.",
    )
    modules_to_save: Names = Field(
        default=(), description="Modules that are trained as a whole and saved, such as lm_head or norm."
    )
    from_: str | None = Field(
        default=None,
        alias="from",
        min_length=1,
        description="An adapter to start from: a folder, or a Hugging Face id. Its rank, alpha, targets and variant "
        "are used.",
    )

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def _no_booleans(cls, value: object) -> Any:
        if isinstance(value, dict) and any(isinstance(number, bool) for number in value.values()):
            raise ValueError("yes and no are not numbers")
        return value

    @model_validator(mode="after")
    def _starts_once(self) -> LoraSection:
        if self.from_ is not None and self.init != "default":
            raise conflict("init", f"Both lora.from and lora.init: {self.init} are given.", "remove one of them")
        return self

    @model_validator(mode="after")
    def _trains_once(self) -> LoraSection:
        targets = () if isinstance(self.targets, str) else self.targets
        if both := sorted({*self.modules_to_save} & {*targets}):
            raise conflict(
                "modules_to_save",
                f"{both[0]} is both in lora.targets and in lora.modules_to_save.",
                "remove it from one of them: a module that is trained as a whole needs no LoRA",
            )
        return self

    @model_serializer(mode="wrap")
    def _only_used_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With `from`, the options that were given; the file has the others. Else without the variants that are not
        used."""
        values = handler(self)
        fields = type(self).model_fields
        if self.from_ is not None:
            given = {name: values[name] for name in fields if name in self.model_fields_set and name != "from_"}
            return {"from": self.from_, **given}
        unused = {
            name for name in _VARIANTS if getattr(self, name) == fields[name].get_default(call_default_factory=True)
        }
        return {name: value for name, value in values.items() if name not in unused and name != "from_"}
