"""Names of the files that transformers' `save_pretrained` writes."""

from __future__ import annotations

from typing import Any

WEIGHTS = {
    "model.safetensors": "model.safetensors.index.json",
    "pytorch_model.bin": "pytorch_model.bin.index.json",
}
"""A model's weights in one file, and the index of the same in several."""


def saved_names(tokenizer_class: str | None) -> frozenset[str]:
    """Return the names of a saved checkpoint's files, but for shards of its weights and for code.

    Touches `transformers.models.auto.tokenization_auto.tokenizer_class_from_name` and the names of files in
    `transformers.utils` and `transformers.tokenization_utils_base` (transformers 5.14 to 5.24). Without it the files
    that a class of tokenizers writes cannot be told from files of the user.

    Args:
        tokenizer_class: as tokenizer_config.json names it; None or an unknown one: only what every tokenizer writes.
    """
    from transformers import tokenization_utils_base as tokenizers
    from transformers import utils
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    tokenizer: Any = None if tokenizer_class is None else tokenizer_class_from_name(tokenizer_class)
    vocabulary = getattr(tokenizer, "vocab_files_names", {}).values()
    return frozenset(
        {
            utils.CONFIG_NAME, utils.GENERATION_CONFIG_NAME, utils.SAFE_WEIGHTS_NAME, utils.WEIGHTS_NAME,
            utils.FEATURE_EXTRACTOR_NAME, utils.IMAGE_PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME, utils.PROCESSOR_NAME,
            utils.CHAT_TEMPLATE_FILE, utils.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, tokenizers.TOKENIZER_CONFIG_FILE,
            tokenizers.FULL_TOKENIZER_FILE, tokenizers.SPECIAL_TOKENS_MAP_FILE, tokenizers.ADDED_TOKENS_FILE,
            *vocabulary,
        }
    )  # fmt: skip
