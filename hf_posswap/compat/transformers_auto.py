"""What transformers' Auto classes know: which model class goes with which config.

All are alike in transformers 5.14 to 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def auto_mapping(auto: Any) -> Any:
    """Return the mapping of an Auto class from config classes to model classes; None: `auto` is no Auto class.

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
        if hasattr(mapping, "register"):
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
}


def auto_class_name(architecture: str) -> str:
    """Return the name of the Auto class that gives the model class `architecture`; "AutoModel" for a bare model.

    Touches `models.auto.modeling_auto.MODEL_FOR_<task>_MAPPING_NAMES`. Without it cards and commands name an Auto class
    that does not load the checkpoint.

    Example:
        >>> auto_class_name("GPT2LMHeadModel"), auto_class_name("BertModel")
        ('AutoModelForCausalLM', 'AutoModel')
    """
    names = (auto for task, auto in _AUTO_CLASSES.items() if architecture in class_names(task).values())
    return next(names, "AutoModel")


def language_classes(model_type: str) -> dict[str, tuple[Any, Any]]:
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
    found = {}
    for task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        mapping = auto_mapping(getattr(transformers, _AUTO_CLASSES[task]))
        if config in mapping:
            found[task] = config, mapping[config]
    return found


def build_model(cls: Any, config: Any, **kwargs: Any) -> Any:
    """Return a new model of the class `cls`, which the Auto classes would make for its `config`.

    Touches `PreTrainedModel._from_config`; the public `from_config` is that of the Auto classes, which choose the class
    themselves. Without it the dtype and the attention implementation of a new model are not what a load would give.

    Args:
        cls: of transformers.
        config: for it.
        kwargs: for `_from_config`: dtype, attn_implementation, and arguments of the constructor.
    """
    return cls._from_config(config, **kwargs)
