"""What a model's configuration forbids, known before anything is loaded."""

from __future__ import annotations

from typing import Any

from trillora.errors import TrilloraError

# Models that carry state from one document of a row into the next by code of their own, which is not told apart yet.
# The only place where the engine knows an architecture by name: nothing in a module's structure shows this.
CANNOT_PACK = {
    "minimax": "lightning attention keeps a running state",
    "openai-gpt": "its attention builds a causal mask of its own",
    "recurrent_gemma": "its recurrent blocks keep a state of their own",
    "rwkv": "its time mixing keeps a running state",
    "xlstm": "its cells keep a state of their own",
}

# Models that keep what they remember outside transformers' cache: decoding would start every token from nothing.
CANNOT_DECODE = {
    "minimax": "lightning attention keeps a running state of its own",
    "recurrent_gemma": "its recurrent blocks keep their state inside the module",
    "rwkv": "its state is no cache",
    "xlstm": "its state is no cache",
}


def why_not_decode(config: Any) -> str | None:
    """Why the model cannot answer prompts here, if it cannot."""
    return CANNOT_DECODE.get(config.get_text_config().model_type)


def check_rows(config: Any, sequence_length: int, pack: bool) -> None:
    """Refuse rows the model cannot take: longer than its positions, or shared by documents it would mix."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise TrilloraError(
            f"Rows of {sequence_length} tokens are longer than the {longest} positions this model was made for.",
            where="train.sequence_length",
            do=f"use at most {longest}",
        )
    reason = CANNOT_PACK.get(text.model_type)
    if pack and reason:
        raise TrilloraError(
            f"Documents packed into one row would see each other in this model: {reason}.",
            where="data.pack",
            do="set data.pack to false: one document in a row",
        )
