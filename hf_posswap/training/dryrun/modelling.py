"""Builds the model of a recipe from its config with fake weights: swapped, its trainable parameters chosen.

Its windows are of synthetic tokens, cut as the recipe cuts text: a dry run needs neither text nor tokenizer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_posswap.compat.torch_tensors import fake_mode, keep_in_place, made_fake, make_fake_as
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import ConfigError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import get
from hf_posswap.patching.apply.patch_model import patch_model, swap_plan
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.text.stdlib import PYTHON
from hf_posswap.training.config import SENTENCES, Recipe
from hf_posswap.training.data import DataSettings, TokenData
from hf_posswap.training.data.build import cut_data
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.store import TokenStore
from hf_posswap.training.data.windows import Masking
from hf_posswap.training.engine.gates import check_reads_text
from hf_posswap.training.engine.objectives import Objective, make_objective
from hf_posswap.training.engine.parallel import Launch, refuse_silent_errors
from hf_posswap.training.engine.preparing import check_carried, chosen_scheme, swap_arguments
from hf_posswap.training.trainable import prepare_trainable
from hf_posswap.utils.auto_classes import TRUST

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_posswap.families import Sites

_PACKED = 4
"""Documents in a window with packing."""
_DOCUMENTS = 8


def synthetic_windows(
    settings: DataSettings,
    config: PreTrainedConfig,
    *,
    causal: bool,
    scheme_length: int,
    first_position: int,
    dtype: torch.dtype,
) -> TokenData:
    """Return full windows: of one long document each, or of four packed documents.

    Args:
        settings: of the recipe.
        config: the model's text config.
        causal: whether it predicts the next token; otherwise it predicts masked ones.
        scheme_length: positions that the swapped model is meant for.
        first_position: value of position 0 in its `position_ids`.
        dtype: of its weights.
    """
    packed = settings.packing == "documents"
    longest = settings.length // _PACKED if packed else max(settings.length, scheme_length) + 1
    reserved_ids = {config.pad_token_id, 0}  # some classes derive positions from padding tokens
    token_ids = np.array(
        [token_id for token_id in range(min(config.vocab_size, 64)) if token_id not in reserved_ids], dtype=np.int32
    )
    documents = _DOCUMENTS * (_PACKED if packed else 1)
    tokens = np.resize(token_ids, documents * longest)
    store = TokenStore(tokens, np.arange(documents + 1, dtype=np.int64) * longest, digest="")
    empty_store = TokenStore(tokens[:0], np.zeros(1, dtype=np.int64), digest="")
    special = (int(token_ids[0]),)
    return cut_data(
        dataclasses.replace(settings, sources=(Source(PYTHON),)),
        [store],
        [empty_store],
        masking=None if causal else Masking(settings.mask_share, int(token_ids[0]), token_ids, special, special),
        filler=int(token_ids[0]),
        scheme_length=scheme_length,
        first_position=first_position,
        dtype=dtype,
    )


@dataclass(frozen=True)
class FakeModel:
    """The model of a recipe with fake weights.

    Attributes:
        model: swapped, wrapped in adapters if the recipe has them.
        mode: fake-tensor mode of its weights.
        teacher: the unswapped model; None: the objective needs none.
        plan: of the swap; None: there is none.
        sites: position sites of the unswapped model.
    """

    model: PreTrainedModel
    mode: Any
    teacher: Any
    plan: SwapPlan | None
    sites: Sites


def fake_model(recipe: Recipe, launch: Launch) -> FakeModel:
    """Return the model of `recipe`, reading only config.json of its folder.

    Args:
        recipe: without stages.
        launch: how processes share the training.

    Raises:
        PosswapError: the recipe, or its swap of this model, is refused.
    """
    mode = fake_mode()
    model = _build_model(recipe, mode)
    check_reads_text(model, recipe.objective.kind)
    sites = locate(model)
    check_carried(recipe, model)
    scheme = chosen_scheme(recipe)
    plan = None
    if scheme is not None:
        options = swap_arguments(recipe, scheme, has_table=sites.geometry.base is None)
        # A new table may take its scale from the old table's values, and values change no size.
        path = sites.table_path
        table = None if path is None else get(model, path)
        if isinstance(table, nn.Embedding):
            table.weight = nn.Parameter(torch.ones(table.weight.shape, dtype=table.weight.dtype))
        plan = swap_plan(patch_model(model, scheme, **options))
    refuse_silent_errors(recipe, plan.scheme if plan else None, launch)
    teacher = None
    if recipe.objective.kind == "distill":
        teacher = _build_model(recipe, mode).requires_grad_(False)
    model = prepare_trainable(model, recipe.trainable, recipe.peft)
    make_fake_as(model)
    keep_in_place(model)
    return FakeModel(model, mode, teacher, plan, sites)


def _build_model(recipe: Recipe, mode: Any) -> Any:
    settings = recipe.model
    options: dict[str, Any] = {TRUST: settings.trust_remote_code}
    options |= {} if settings.revision is None else {"revision": settings.revision}
    options |= {} if settings.attention is None else {"attn_implementation": settings.attention}
    config = read_config(settings.source, **options)
    cls = model_class_of(config)
    if getattr(config, "posswap", None) is not None:
        cls = swapped_class(cls)
    config_dtype = getattr(config, "dtype", None) or torch.float32
    dtype = config_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with building_on_meta():
            model = cls(config)
    finally:
        torch.set_default_dtype(default_dtype)
    return made_fake(mode, model).eval()


def objective_of(recipe: Recipe, fake: FakeModel) -> Objective:
    """Return the loss of `recipe`.

    Raises:
        ConfigError: the objective does not fit the model, or cannot be dry-run.
    """
    objective_name = recipe.objective.kind
    if objective_name in SENTENCES:
        raise ConfigError(
            f"objective.kind {objective_name} cannot be dry-run: next-token, longce, masked and distill can."
        )
    geometry = fake.sites.geometry
    return make_objective(
        recipe.objective,
        causal=geometry.causal,
        teacher=fake.teacher,
        window=geometry.original_length,
        chunk=recipe.objective.chunk,
    )
