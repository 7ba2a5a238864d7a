"""Published TPU training rates, and the shapes of the trained models.

tpu_anchors.py compiles and simulates each of them. All are for full training in bfloat16 with synthetic data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

RECIPES = "AI-Hypercomputer/tpu-recipes, training/trillium/"
MAXTEXT = "AI-Hypercomputer/maxtext, MaxText/configs/"
# The q, k, v and o projections hold a fifth of a layer's weights, and a full step uses them four times.
NO_OFFLOAD = "theirs keeps q, k, v, o in host RAM; ours recomputes them: 5 % more arithmetic"


@dataclass(frozen=True)
class Published:
    """One rate, and how its step is compiled here. Rows and rates are per device."""

    model: str
    slice_name: str
    rows: int  # sequences per device
    tokens: int  # per sequence
    source: str
    tokens_per_second: float | None = None  # as published; or:
    tflops: float | None = None  # model TFLOP/s, as published
    attention_counted: float = 0.5  # fraction of token pairs counted in `tflops`; half if the mask was causal
    remat: Literal["none", "dots", "full"] = "full"
    attention: Literal["splash", "xla"] = "splash"
    weights: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and moments in the optimizer
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    differs: str = ""  # how the compiled step differs from the measured one

    @property
    def name(self) -> str:
        return f"{self.model}@{self.slice_name}"

    @property
    def kind_shares(self) -> tuple[float, ...]:
        """Fractions of layers with and without a sliding window, if both share a loop body."""
        return (5 / 6, 1 / 6) if self.model.startswith("gemma-3") else ()

    @property
    def rate(self) -> str:
        if self.tokens_per_second is not None:
            return f"{self.tokens_per_second:,.0f} tokens/s"
        return f"{self.tflops:,.0f} TFLOP/s"

    def as_tokens_per_second(self, num_parameters: int) -> float:
        """Converts FLOP/s as MaxText counts them: 6 per parameter and token, plus attention."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        assert self.tflops is not None
        sizes = MODELS[self.model][1]
        width = sizes["num_attention_heads"] * sizes["head_dim"]
        attention = 12 * sizes["num_hidden_layers"] * width * self.tokens * self.attention_counted
        return self.tflops * 1e12 / (6 * num_parameters + attention)


PUBLISHED = (
    Published(
        "llama-3.1-8b",
        "v6e-8",
        rows=3,
        tokens=8192,
        tokens_per_second=7138.9,
        source=RECIPES + "Llama3.1-8B-MaxText/v6e-8 (MaxText tpu-recipes-v0.1.4, jax 0.6.1)",
        differs=NO_OFFLOAD,
    ),
    Published(
        "llama-3.1-8b",
        "v6e-16",
        rows=3,
        tokens=8192,
        tokens_per_second=7243.4,
        source=RECIPES + "Llama3.1-8B-MaxText/v6e-16 (MaxText tpu-recipes-v0.1.4, jax 0.6.1)",
        differs=NO_OFFLOAD,
    ),
    Published(
        "llama-3.1-8b",
        "v6e-32",
        rows=3,
        tokens=8192,
        tokens_per_second=7031.7,
        source=RECIPES + "Llama3.1-8B-MaxText/v6e-32 (MaxText tpu-recipes-v0.1.4, jax 0.6.1)",
        differs=NO_OFFLOAD,
    ),
    Published(
        "llama-3.1-8b",
        "v6e-256",
        rows=4,
        tokens=8192,
        tokens_per_second=7207.3,
        source=RECIPES + "Llama3.1-8B-MaxText/v6e-256 (MaxText tpu-recipes-v0.1.4, jax 0.6.1)",
        differs=NO_OFFLOAD + "; theirs uses collective matmul",
    ),
    Published(
        "mistral-7b",
        "v6e-8",
        rows=4,
        tokens=8192,
        tokens_per_second=7776.8,
        source=RECIPES + "Mistral-7B-MaxText (MaxText tpu-recipes-v0.1.2, jax 0.5.2)",
        differs="theirs has 6 sequences, which need host RAM; " + NO_OFFLOAD,
    ),
    Published(
        "gemma-3-12b",
        "v6e-256",
        rows=1,
        tokens=32768,
        tokens_per_second=4477.8,
        source=RECIPES + "Gemma3-12B-MaxText/v6e-256 (MaxText tpu-recipes-v0.1.5, jax 0.7.0)",
        differs="theirs uses other block sizes in the attention kernel",
    ),
    Published(
        "llama-3.1-8b",
        "v6e-4",
        rows=2,
        tokens=8192,
        tokens_per_second=2 * 8192 / 2.4068,  # the mean step of 428 test runs; 99.9 % confidence: ± 0.06 s
        weights="bfloat16",
        optimizer="adafactor",
        source="AI-Hypercomputer/torchprime, e2e_testing/step_time_bounds.yaml, llama-3_1-8b-sa (May and June 2025)",
        differs="theirs is torch_xla, layers not scanned, whole logits; its page says v6e, its tests only four chips",
    ),
    Published(
        "maxtext-16b",
        "v5e-256",
        rows=6,
        tokens=2048,
        tflops=120.4,
        source=MAXTEXT + "v5e/16b.sh and README.md (61.10 % of peak)",
        differs="MaxText's default model has changed its shape over the years; here 15.8 B parameters",
    ),
    Published(
        "maxtext-32b",
        "v5e-256",
        rows=4,
        tokens=2048,
        tflops=131.7,
        source=MAXTEXT + "v5e/32b.sh and README.md (66.86 % of peak)",
        differs="as for 16b; here 31.7 B parameters",
    ),
    Published(
        "maxtext-32b",
        "v5p-128",
        rows=5,
        tokens=2048,
        tflops=328.0,
        remat="dots",
        source=MAXTEXT + "v5p/32b.sh and README.md (71.47 % of peak)",
        differs="theirs has 7 sequences on fsdp 16 x tensor 4; ours is fsdp 64, where 7 do not fit",
    ),
    Published(
        "maxtext-22b",
        "v4-128",
        rows=12,
        tokens=2048,
        tflops=156.0,
        attention_counted=1.0,
        attention="xla",
        source=MAXTEXT + "v4/22b.sh and README.md (56.7 % of peak)",
        differs="theirs has 13 sequences; of 2023: taken to be without an attention kernel, all pairs counted",
    ),
)

# Configuration class in transformers and its arguments. MaxText's own models are its `default` at scale 16 and 32, and
# the options of 22b.sh, which give 22 B parameters with wide heads and an MLP without a gate.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
    ),
    "mistral-7b": ("MistralConfig", {"sliding_window": None, "max_position_embeddings": 32768}),
    "gemma-3-12b": (
        "Gemma3TextConfig",
        {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
    ),
    "maxtext-16b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 28672,
            "num_hidden_layers": 32,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "head_dim": 128,
            "vocab_size": 32000,
        },
    ),
    "maxtext-32b": (
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 32,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "head_dim": 128,
            "vocab_size": 32000,
        },
    ),
    "maxtext-22b": (
        "NemotronConfig",
        {
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 48,
            "num_attention_heads": 24,
            "num_key_value_heads": 24,
            "head_dim": 256,
            "hidden_act": "relu",
            "vocab_size": 32000,
        },
    ),
}
