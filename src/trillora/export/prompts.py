"""The chat template that an adapter was trained with, and the prompts that it makes."""

from __future__ import annotations

from trillora.data.rendering.chat_templates import find_template
from trillora.export.source import ExportSource
from trillora.generation.prompts import Prompts, configured_stops
from trillora.model.adapters import TEMPLATE_FILE
from trillora.recipe.schema import stages_of


def template_of(source: ExportSource) -> str | None:
    """The run's own chat template, or else the tokenizer's."""
    own = source.adapter / TEMPLATE_FILE
    if own.is_file():
        return find_template(str(own), (), None)
    tokenizer = source.base.tokenizer
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def prompts_of(source: ExportSource) -> Prompts:
    """Prompts as in training. Templates are untrusted: they are rendered in a process with limits."""
    date = stages_of(source.recipe)[-1].recipe.data.template_date if source.recipe is not None else None
    stops = configured_stops(source.base.folder, source.base.config)
    return Prompts(source.base.tokenizer, template=template_of(source), template_date=date, stops=stops)
