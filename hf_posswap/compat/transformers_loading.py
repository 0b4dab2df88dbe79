"""Models of a config, by transformers' Auto classes; the files of a model; and the private methods that load it.

The methods, by which transformers and torch fill and load models, have public names here. All are alike in transformers
5.14 to 5.23 and torch 2.6 to 2.13.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    _Mixin = nn.Module  # what it is mixed into
else:
    _Mixin = object


def auto_mapping(auto: object) -> Any:
    """Return the mapping of an Auto class from config classes to model classes; None: `auto` is not an Auto class.

    Touches `_model_mapping` of the Auto classes. Without it nobody can tell which class a config alone stands for.
    """
    return getattr(auto, "_model_mapping", None)


def auto_mappings() -> Iterator[Any]:
    """Yield the mapping of every Auto class for models.

    Touches `models.auto.modeling_auto.__all__` and `_model_mapping`. Without it swapped configs cannot be made known to
    the Auto classes.
    """
    from transformers.models.auto import modeling_auto

    for name in modeling_auto.__all__:
        mapping = auto_mapping(getattr(modeling_auto, name, None))
        if mapping is not None and hasattr(mapping, "register"):
            yield mapping


def class_names(task: str) -> dict[str, str]:
    """Return the name of the model class of each model type for a task: "CAUSAL_LM", "MASKED_LM", ...

    Touches `models.auto.modeling_auto.MODEL_FOR_<task>_MAPPING_NAMES`. Without it there is no list of the classes to be
    measured.
    """
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))


_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
    "SPEECH_SEQ_2_SEQ": "AutoModelForSpeechSeq2Seq",
    "SEQUENCE_CLASSIFICATION": "AutoModelForSequenceClassification",
    "TOKEN_CLASSIFICATION": "AutoModelForTokenClassification",
    "QUESTION_ANSWERING": "AutoModelForQuestionAnswering",
    "MULTIPLE_CHOICE": "AutoModelForMultipleChoice",
    "IMAGE_CLASSIFICATION": "AutoModelForImageClassification",
    "PRETRAINING": "AutoModelForPreTraining",
}


def auto_class_name(architecture: str) -> str:
    """Return the name of the Auto class that gives the model class `architecture`; "AutoModel" for a bare model.

    A class of another package goes by the end of its name, where that is ForCausalLM.

    Touches `models.auto.modeling_auto.MODEL_FOR_<task>_MAPPING_NAMES`. Without it cards and commands name an Auto class
    that does not load the checkpoint.

    Example:
        >>> auto_class_name("GPT2LMHeadModel"), auto_class_name("BertModel")
        ('AutoModelForCausalLM', 'AutoModel')
    """
    names = (auto for task, auto in _AUTO_CLASSES.items() if architecture in class_names(task).values())
    return next(names, "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else "AutoModel")


def language_classes(model_type: str) -> dict[str, tuple[type[PreTrainedConfig], Any]]:
    """Return the classes of a model type for language modelling: by task, the config class and the model class.

    Touches `CONFIG_MAPPING` and `_model_mapping` of the Auto classes, which hold what other packages register too.
    Without it the classes of a family outside transformers cannot be found.

    Example:
        >>> [(task, model.__name__) for task, (_, model) in language_classes("gpt2").items()]
        [('CAUSAL_LM', 'GPT2LMHeadModel')]
    """
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return {}
    config = transformers.CONFIG_MAPPING[model_type]
    by_task = {}
    for task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        mapping = auto_mapping(getattr(transformers, _AUTO_CLASSES[task]))
        if mapping is not None and config in mapping:
            by_task[task] = config, mapping[config]
    return by_task


def build_model(cls: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: object) -> PreTrainedModel:
    """Return a new model of the class `cls`, which the Auto classes would make for its `config`.

    Touches `PreTrainedModel._from_config`; the public `from_config` is that of the Auto classes, which choose the class
    themselves. Without it the dtype and the attention implementation of a new model are not what a load would give.

    Args:
        cls: of transformers.
        config: for it.
        kwargs: for `_from_config`: dtype, attn_implementation, and arguments of the constructor.
    """
    return cls._from_config(config, **kwargs)


def file_of(source: str | Path, name: str, *, certain: bool = True, **hub: object) -> Path | None:
    """Return where the file `name` of a folder or Hub id is, downloaded if need be; None where there is no such file.

    Touches `transformers.utils.cached_file` and its arguments `_raise_exceptions_for_missing_entries`,
    `..._for_gated_repo` and `..._for_connection_errors` (transformers 5.14 to 5.23). Without it a file that is not
    there cannot be told from one that cannot be reached.

    Args:
        source: a folder or a Hub id.
        name: of the file.
        certain: raise where the Hub does not tell whether there is such a file; otherwise that counts as none.
        hub: arguments for the Hub: revision, token, cache_dir, ...

    Raises:
        OSError: it cannot be told.
    """
    from transformers.utils import cached_file

    path = cached_file(
        str(source),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=certain,
        _raise_exceptions_for_connection_errors=certain,
        **hub,
    )
    return None if path is None else Path(path)


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

    tokenizer: type | None = None if tokenizer_class is None else tokenizer_class_from_name(tokenizer_class)
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


class LoadingHooks(_Mixin):
    """Mixin before a transformers model class that changes how its weights are initialized and loaded."""

    def posswap_fill(self, module: nn.Module) -> bool:
        """Initialize `module`, a submodule of the model; return whether it was initialized.

        Touches `PreTrainedModel._init_weights`, which the stock class gets where this returns False. Without it
        modules that a swap adds would be uninitialized, or initialized as tables.
        """
        return False

    def posswap_read(self, state: dict[str, Tensor], prefix: str, metadata: dict[str, object]) -> dict[str, object]:
        """Change, in place, the weights in `state` below `prefix` that the model is about to take.

        Touches `Module._load_from_state_dict`. Without it a marked state dict could not be loaded.

        Args:
            state: the state dict, of this model and maybe others.
            prefix: of the model's names in it.
            metadata: torch's metadata of this module.

        Returns:
            The metadata to use.
        """
        return metadata

    @classmethod
    def posswap_conversions(cls, model: PreTrainedModel) -> list[WeightConverter]:
        """Return further weight conversions for loading `model`; saving does not undo them.

        Touches `PreTrainedModel._load_pretrained_model`, `weight_mapping` of its `LoadStateDictConfig`, and
        `_weight_conversions` of the loaded model, which saving undoes. Without it marked weights would not be loaded.
        """
        return []

    @classmethod
    def posswap_loaded(cls, model: PreTrainedModel) -> None:
        """Settle what loading `model` left otherwise than it was: it makes every floating weight trainable.

        Touches `PreTrainedModel._load_pretrained_model`. Without it a formula's table could be trained after loading.
        """

    def _init_weights(self, module: nn.Module) -> None:
        if not self.posswap_fill(module):
            super()._init_weights(module)  # type: ignore[misc]

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, metadata: dict[str, object], *args: object
    ) -> None:
        metadata = self.posswap_read(state_dict, prefix, metadata)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    @classmethod
    def _load_pretrained_model(cls, *args: object, **kwargs: object) -> object:
        load: Callable[..., object] = super()._load_pretrained_model  # type: ignore[misc]
        given = inspect.signature(load).bind(*args, **kwargs)
        model, load_config = given.arguments["model"], given.arguments["load_config"]
        ours = cls.posswap_conversions(model)
        both = [*ours, *(load_config.weight_mapping or [])]  # a quantizer's may match every weight, and the first does
        given.arguments["load_config"] = dataclasses.replace(load_config, weight_mapping=both)
        loaded = load(*given.args, **given.kwargs)
        model._weight_conversions = [conversion for conversion in model._weight_conversions if conversion not in ours]
        cls.posswap_loaded(model)
        return loaded


@contextmanager
def undoing_what_has_an_inverse(model: nn.Module) -> Iterator[None]:
    """Inside the block, `save_pretrained` of `model` undoes the conversions of its loading that have an inverse.

    Touches `_weight_conversions` of a loaded model and `WeightTransform.reverse_transform` (transformers 5.14 to 5.24).
    Without it a model that was loaded from a quantized checkpoint (torchao, bitsandbytes) cannot be saved:
    `NotImplementedError`, without a message. Such weights are saved as they lie in memory, which is how they were.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions:
        yield
        return
    invertible = []
    for conversion in conversions:
        with suppress(NotImplementedError):
            conversion.reverse_transform()
            invertible.append(conversion)
    model._weight_conversions = invertible  # type: ignore[assignment]
    try:
        yield
    finally:
        model._weight_conversions = conversions


def unpack_4_bit_weights(model: nn.Module) -> None:
    """Put weights of bitsandbytes that a forward on a CPU packed in another order back into that of checkpoints.

    Touches `QuantState.packing_format_for_cpu`, `original_nested` and `absmax` (bitsandbytes 0.50), which `state_dict`
    of a layer goes by. Without it a 4-bit model that has run on a CPU with AVX512-BF16 is saved with its scales in the
    wrong order, silently.
    """
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            if not state.original_nested:  # type: ignore[union-attr]
                state.absmax = state.absmax.T.reshape(-1).float()  # type: ignore[union-attr]
            module.state_dict()


def ignored_on_load(model: PreTrainedModel) -> list[str]:
    """Return the patterns of weights that `model` silently ignores in a checkpoint.

    Touches `PreTrainedModel._keys_to_ignore_on_load_unexpected`. Without it vLLM ignores weights whose names only
    look similar.
    """
    return sorted(model._keys_to_ignore_on_load_unexpected or ())


def ignore_on_load(model: PreTrainedModel, patterns: list[str]) -> None:
    """Make `model`, and no other of its class, ignore weights by `patterns` instead of its own.

    Touches `PreTrainedModel._keys_to_ignore_on_load_unexpected`, as `ignored_on_load` does.
    """
    model._keys_to_ignore_on_load_unexpected = patterns
