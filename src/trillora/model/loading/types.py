"""transformers' classes under one name, for signatures everywhere. At run time nothing is imported.

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig, Tokenizer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig as PretrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

    __all__ = ["PreTrainedModel", "PretrainedConfig", "Tokenizer"]
