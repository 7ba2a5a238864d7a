"""The prompts that an adapter was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trillora.export.source import ExportSource
from trillora.generation.prompts import Prompts, configured_stops
from trillora.recipe.schema import stages_of

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer


def prompts_of(source: ExportSource) -> Prompts:
    """Prompts as in training. Templates are untrusted: they are rendered in a process with limits."""
    data = stages_of(source.recipe)[-1].recipe.data if source.recipe is not None else None
    return Prompts(
        source.base.tokenizer,
        template=source.template,
        template_date=data.template_date if data is not None else None,
        arguments=data.template_arguments if data is not None else None,
        stops=configured_stops(source.base.folder, source.base.config),
    )


def adds_bos(tokenizer: Tokenizer, prompts: Prompts) -> bool:
    """Whether llama.cpp should add BOS to every text, chats too: it does both or neither. Where the tokenizer adds it
    and the chat template does not, chats count."""
    bos = [tokenizer.bos_token_id]
    if tokenizer.bos_token_id is None or tokenizer("a")["input_ids"][:1] != bos:
        return False
    return not prompts.has_template or prompts.encode([{"role": "user", "content": "a"}])[:1] == bos
