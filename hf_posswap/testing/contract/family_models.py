"""Tiny models of the classes of a family that another package registers."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import Conv1D

from hf_posswap.compat.transformers_loading import language_classes
from hf_posswap.families import FAMILIES
from hf_posswap.families.locating import locate
from hf_posswap.testing.contract.checks import BrokenPromiseError
from hf_posswap.testing.contract.models import START, Limits, Tiny


def tiny_models_of(family: str) -> dict[str, Tiny]:
    """Return a tiny model of each class for language modelling of a family, by the name of the class.

    Raises:
        BrokenPromiseError: its model types have no such class, or one of them cannot be built.
    """
    models = {}
    types = FAMILIES.get(family).model_types
    for model_type in types:
        for task, (config, model) in language_classes(model_type).items():
            models[model.__name__] = _tiny(task, config, model)
    if not models:
        raise BrokenPromiseError(
            "model types that AutoConfig and AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM know, "
            "from transformers or by their `register`",
            f"none of {', '.join(map(repr, types)) or 'no model types'} is known",
        )
    return models


def _tiny(task: str, config: Any, model: Any) -> Tiny:
    names = {field.name for field in dataclasses.fields(config)}
    causal, paired = task == "CAUSAL_LM", task == "SEQ_TO_SEQ_CAUSAL_LM"
    values: dict[str, Any] = {"num_hidden_layers": 2} if "num_hidden_layers" in names else {}
    if causal and "is_decoder" in names:
        values["is_decoder"] = True
    if paired:
        values |= START
    unknown = Limits(known=False)
    tiny = Tiny(model, config, values, (), generates=task != "MASKED_LM", paired=paired, shrunk=True, limits=unknown)
    return dataclasses.replace(tiny, projections=_projections(tiny))


def _projections(tiny: Tiny) -> tuple[str, ...]:
    """Return the names of the linear layers inside the attention of a model, which LoRA adapts."""
    try:
        model = tiny.build()
    except Exception as error:  # arbitrary code of another package
        raise BrokenPromiseError(
            f"a {tiny.stock.__name__} of a tiny config, {tiny.values}, in which fields of the usual names are shrunk",
            f"{type(error).__name__}: {error}",
        ) from error
    paths = [path for stack in locate(model).stacks for path in stack.attention]
    inside = [each for path in paths for each in model.get_submodule(path).named_modules()]
    names = {name.rpartition(".")[2] for name, module in inside if name and isinstance(module, nn.Linear | Conv1D)}
    return tuple(sorted(names))
