"""Which parameters training may change, and at which rates.

They are found by their part in the model: what the swap added, norms, embeddings, projections, layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from hf_posswap.checkpoints.adapters import add_adapter, import_peft, without_peft_warning
from hf_posswap.compat.peft_wrappers import name_without_adapter
from hf_posswap.compat.torch_modules import compiled_original, name_without_wrappers
from hf_posswap.errors import ConfigError, TrainingError
from hf_posswap.families.locating import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable, rows_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NEW_ROWS = " (new rows)"
_KEEP_ROWS = ("tile", "hierarchical", "random")  # rules that leave the old rows as they were
# transformers' names for query and key projections, separate and fused.
_QUERY_KEY = {
    "q_proj", "k_proj", "query", "key", "q", "k", "q_lin", "k_lin", "q_norm", "k_norm", "query_layernorm",
    "key_layernorm", "query_proj", "key_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv", "in_proj",
}  # fmt: skip
What = Literal["full", "positions", "norms_qk", "new_rows"]
_KNOWN_TIED = ("embed_tokens", "lm_head")  # peft.utils.constants.EMBEDDING_LAYER_NAMES


def position_names(base: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that the swap of `base` added, or whose rows it rewrote."""
    patch = getattr(base, "_posswap", None)
    if patch is None:
        return []
    tables = [edit for edit in patch.plan.edits if isinstance(edit, ReplaceTable)]
    rewritten = {_rows_of(base, table) for table in tables if table.scheme.trainable}
    added = {
        name.removesuffix(_NEW_ROWS) for name in patch.plan.added if not name.endswith(".old")
    }  # the old table fades out
    return [name for name, _ in base.named_parameters() if base_name(name) in added | rewritten]


def _rows_of(base: PreTrainedModel, table: ReplaceTable) -> str:
    """Return the name of the parameter with the rows of a `table`: inside a blend it has another name."""
    return f"{table.path}.{rows_name(base.get_submodule(table.path))}"


def grown_tables(base: PreTrainedModel) -> dict[str, int]:
    """Return the names of the tables to which the swap of `base` added rows, and how many rows they had before.

    Raises:
        ConfigError: there is none, or its rule changed the old rows.
    """
    patch = getattr(base, "_posswap", None)
    kept_rows: dict[str, int] = {}
    for table in patch.plan.edits if patch is not None else ():
        if not isinstance(table, ReplaceTable) or not table.scheme.trainable:
            continue
        rule, old = getattr(table.scheme, "extend", None), table.geometry.original_length
        if rule not in _KEEP_ROWS:
            raise ConfigError(
                f"trainable.what is new_rows, and {table.scheme} also changed the old rows: swap with "
                f"extend one of {', '.join(_KEEP_ROWS)}, or train 'positions', the whole table."
            )
        if table.rows > old:
            kept_rows[_rows_of(base, table)] = old + table.offset
    if not kept_rows:
        swap_state = "carries no swap" if patch is None else f"was swapped to {patch.plan.scheme}"
        raise ConfigError(
            f"trainable.what is new_rows, and {type(base).__name__} {swap_state}: no table has new rows. Swap to "
            "'learned' with a larger max_length, or train something else."
        )
    return kept_rows


def norm_paths(base: nn.Module) -> list[str]:
    """Return the paths of the norms: modules without children, with a weight, whose parameters are all vectors."""
    paths = []
    for path, module in base.named_modules():
        parameters = list(module.parameters(recurse=False))
        is_norm = parameters and all(p.ndim == 1 for p in parameters) and getattr(module, "weight", None) is not None
        if is_norm and not list(module.children()):
            paths.append(path)
    return paths


def embedding_path(base: PreTrainedModel) -> str:
    """Return the path of the token embeddings."""
    table = base.get_input_embeddings()
    return next(path for path, module in base.named_modules() if module is table)


def is_tied(base: PreTrainedModel) -> bool:
    """Return whether the token embeddings and the head share their weight."""
    head = base.get_output_embeddings()
    return head is not None and head.weight is base.get_input_embeddings().weight


def query_key_names(base: PreTrainedModel) -> list[str]:
    """Return the names of the parameters of the query and key projections, fused or not.

    Raises:
        ConfigError: an attention module has no projection of a known name.
    """
    names: list[str] = []
    for path in attention_paths(base):
        attention = base.get_submodule(path)
        projections = [name for name, _ in attention.named_parameters() if _QUERY_KEY & set(name.split("."))]
        if not projections:
            modules = ", ".join(sorted({name.rpartition(".")[0] for name, _ in attention.named_parameters()}))
            raise ConfigError(
                f"trainable.what is norms_qk, and hf_posswap cannot tell which of {modules} in {path} project queries "
                "and keys: train 'full', or adapters (peft) instead."
            )
        names += [f"{path}.{name}" for name in projections]
    return names


def attention_paths(base: PreTrainedModel) -> list[str]:
    """Return the paths of the self-attention modules of every stack, in layer order."""
    return [path for stack in locate(base).stacks for path in stack.attention]


def linear_layers(base: PreTrainedModel) -> list[str]:
    """Return the linear layers inside the self-attention modules, by their names within a block, as PEFT matches them.

    Raises:
        ConfigError: there is none.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> linear_layers(model)
        ['attn.c_attn', 'attn.c_proj']
    """
    from transformers.pytorch_utils import Conv1D

    names: set[str] = set()
    for path in attention_paths(base):
        prefix = path.removeprefix(block_of(path)).strip(".")
        modules = base.get_submodule(path).named_modules()
        names |= {
            ".".join(filter(None, (prefix, name))) for name, module in modules if isinstance(module, nn.Linear | Conv1D)
        }
    if not names:
        raise ConfigError(
            f"peft: the attention of {type(base).__name__} has no linear layer that adapters support: name "
            "peft.target_modules, or train 'full' or 'positions' instead."
        )
    return sorted(names)


def block_of(path: str) -> str:
    """Return the path of the block, "transformer.h.3", that holds the attention module at `path`."""
    match = re.match(r"(.*\.\d+)(\.|$)", path)
    return match[1] if match else path


def base_name(name: str) -> str:
    """Return the name in the transformers model of the parameter that a wrapper calls `name`.

    Example:
        >>> base_name("module.base_model.model.transformer.wte.modules_to_save.default.weight")
        'transformer.wte.weight'
    """
    return name_without_adapter(name_without_wrappers(name))


def only(base: nn.Module, names: set[str]) -> None:
    """Make exactly the parameters in `names` trainable, and freeze the others."""
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in names)


def transformers_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformers model in a PEFT model, or in a wrapper for several processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    original = compiled_original(model)
    return unwrap(model if original is None else original)


@dataclass(eq=False)
class FreezeRowsHook:
    """A gradient hook that zeroes the gradient of the first rows of a table.

    Attributes:
        rows: how many.
    """

    rows: int

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        masked = gradient.clone()
        masked[: self.rows] = 0
        return masked


WHATS: tuple[What, ...] = get_args(What)


@dataclass(frozen=True)
class TrainableSettings:
    """Which parameters training may change, and at which rates.

    Attributes:
        what: "full": all parameters; with adapters, the adapters and all parameters that the swap added. "positions":
            only what the swap added. "norms_qk": norms, query and key projections, and what the swap added.
            "new_rows": the rows that the swap added to a position table; the old rows stay bit-identical.
        embeddings: also train the token embeddings, with adapters, positions or norms_qk
            (https://arxiv.org/abs/2309.12307).
        norms: also train the norms, likewise.
        positions_rate: learning rate of what the swap added, as a multiple of the run's.
        layer_decay: each layer's learning rate as a multiple of the next layer's; 1: the same for all.
    """

    what: What = "full"
    embeddings: bool = False
    norms: bool = False
    positions_rate: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.what not in WHATS:
            problems.append(f"what is one of {', '.join(WHATS)}, got {self.what!r}")
        if not self.positions_rate > 0:
            problems.append(f"positions_rate is a number above 0, got {self.positions_rate!r}")
        if not 0 < self.layer_decay <= 1:
            problems.append(f"layer_decay lies above 0 and is at most 1, got {self.layer_decay!r}")
        if problems:
            raise ConfigError(f"trainable: {'; '.join(problems)}.")


def prepare_trainable(
    model: PreTrainedModel, settings: TrainableSettings, peft: Mapping[str, object] | None = None
) -> PreTrainedModel:
    """Return `model` with exactly the parameters of `settings` trainable; with adapters, wrapped in a PEFT model.

    Tied weights stay tied. What the swap froze permanently, such as a sinusoidal table, stays frozen.

    Args:
        model: a transformers model, swapped or not, without adapters.
        settings: which parameters.
        peft: fields of a PEFT config, including `peft_type`; None: no adapters.

    Raises:
        ConfigError: the model has none of the requested parameters, or PEFT refuses the model or the config.
        MissingDependencyError: adapters need peft.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "kerple")
        >>> model = prepare_trainable(model, TrainableSettings("positions"))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['transformer.posswap.raw_r1', 'transformer.posswap.raw_r2']
    """
    if peft is not None:
        return _with_adapters(model, settings, peft)
    if settings.what == "full":
        return model
    if settings.what == "new_rows":
        tables = grown_tables(model)
        only(model, set(tables))
        for name, rows in tables.items():
            table: Any = model.get_parameter(name)
            table.posswap_rows = table.register_hook(FreezeRowsHook(rows))
        return model
    names = set(position_names(model))
    if settings.what == "norms_qk":
        names |= {*query_key_names(model), *_parameters_in(model, norm_paths(model))}
    elif not names:
        raise ConfigError(
            f"trainable.what is positions, and {type(model).__name__} has no parameters that a swap added: swap to "
            "a scheme with parameters, such as kerple, fire, t5_bias or learned, or train something else."
        )
    names |= set(_parameters_in(model, _extra_paths(model, settings)))
    only(model, names)
    return model


def _with_adapters(model: PreTrainedModel, settings: TrainableSettings, peft: Mapping[str, object]) -> PreTrainedModel:
    import_peft()
    config = peft_config(model, peft)
    extra = {path.rpartition(".")[2] for path in _extra_paths(model, settings)}
    tied = settings.embeddings and is_tied(model)
    if tied:
        extra = extra - {embedding_path(model).rpartition(".")[2]} | {_tied_layer_name(model)}
        config.ensure_weight_tying = True
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *extra}) or None
    try:
        swapped = getattr(model, "_posswap", None) is not None
        if swapped:
            wrapped = add_adapter(model, config)
        else:
            with without_peft_warning():
                wrapped = import_peft().get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"peft: {peft['peft_type']} on {type(model).__name__}: {error}") from error
    if tied:  # PEFT drops the name from its config, and would not tie the weights when it loads
        adapter_config = wrapped.peft_config["default"]
        adapter_config.modules_to_save = sorted({*adapter_config.modules_to_save, *extra})
    return wrapped


def peft_config(model: PreTrainedModel, fields: Mapping[str, object]) -> Any:
    """Return the PEFT config of `fields` for `model`; by default it targets the projections of attention.

    Args:
        model: a transformers model.
        fields: of the config, including `peft_type`.

    Raises:
        ConfigError: PEFT refuses the values.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType

    config_cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(fields["peft_type"])]
    values: dict[str, Any] = {name: value for name, value in fields.items() if name != "peft_type"}
    known = {field.name for field in dataclasses.fields(config_cls)}
    if values.get("target_modules") is None and values.get("target_parameters") is None:
        values["target_modules"] = linear_layers(model)
    if "feedforward_modules" in known:  # IA3 must know which modules these are
        values.setdefault("feedforward_modules", [])
    if "fan_in_fan_out" in known:
        values.setdefault("fan_in_fan_out", any(type(module).__name__ == "Conv1D" for module in model.modules()))
    try:
        return config_cls(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"peft: {error}") from error


def _tied_layer_name(model: PreTrainedModel) -> str:
    """Return the name of the tied embeddings or head that PEFT recognizes, and so keeps tied."""
    head = model.get_output_embeddings()
    names = [embedding_path(model), *(path for path, module in model.named_modules() if module is head)]
    for name in (path.rpartition(".")[2] for path in names):
        if name in _KNOWN_TIED:
            return name
    raise ConfigError(
        f"trainable.embeddings: the embeddings {' and '.join(names)} of {type(model).__name__} are tied, and PEFT "
        f"keeps only {' and '.join(_KNOWN_TIED)} tied: leave trainable.embeddings out, or train 'full'."
    )


def _extra_paths(model: PreTrainedModel, settings: TrainableSettings) -> list[str]:
    return [*([embedding_path(model)] if settings.embeddings else []), *(norm_paths(model) if settings.norms else [])]


def _parameters_in(model: PreTrainedModel, paths: list[str]) -> list[str]:
    return [f"{path}.{name}" for path in paths for name, _ in model.get_submodule(path).named_parameters()]


def parameter_groups(
    model: PreTrainedModel, settings: TrainableSettings, *, learning_rate: float, weight_decay: float
) -> list[dict[str, object]]:
    """Return the optimizer's groups: no weight decay on vectors, rates by layer and for what the swap added.

    With `layer_decay` d and n layers, layer i has d^(n - 1 - i) of the rate, the token embeddings and the old position
    table d^n, and the head and the last norm the full rate. What the swap added belongs to no layer.

    Args:
        model: as `prepare_trainable` returned it, possibly wrapped since.
        settings: the same.
        learning_rate: of the run.
        weight_decay: of matrices.

    Raises:
        ConfigError: no parameter is left to train.
        TrainingError: a wrapper replaced a table whose old rows must stay.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> groups = parameter_groups(model, TrainableSettings(), learning_rate=1e-3, weight_decay=0.1)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]
        [(0.001, 0.0), (0.001, 0.1)]
    """
    base = transformers_model(model)
    added = {base_name(name) for name in position_names(base)}
    depth = _LayerDecay(base, settings.layer_decay)
    only_new_rows = settings.what == "new_rows"
    groups: dict[tuple[float, float], list[object]] = {}
    for name, parameter in model.named_parameters():  # each once, tied or not
        if not parameter.requires_grad:
            continue
        if only_new_rows and not hasattr(parameter, "posswap_rows"):
            raise TrainingError(
                f"trainable.what is new_rows, and {name} was replaced when the model was sharded, so its old rows "
                "would be trained too: use a single process or DDP, or train 'positions'."
            )
        parameter_name = base_name(name)
        rate = settings.positions_rate if parameter_name in added else depth.share(parameter_name)
        decay = 0.0 if only_new_rows or parameter.ndim < 2 else weight_decay  # decay would move the old rows
        groups.setdefault((learning_rate * rate, decay), []).append(parameter)
    if not groups:
        raise ConfigError(f"no parameter of {type(base).__name__} is trainable: all are frozen.")
    return [{"params": groups[key], "lr": key[0], "weight_decay": key[1]} for key in sorted(groups)]


class _LayerDecay:
    """Computes the share of the learning rate for a parameter by its layer."""

    def __init__(self, base: PreTrainedModel, decay: float) -> None:
        self.decay = decay
        self.blocks = {f"{block_of(path)}.": n for n, path in enumerate(locate(base).attention)}
        tables = [f"{embedding_path(base)}."] + [
            f"{stack.table_path}." for stack in locate(base).stacks if stack.inputs == "text" and stack.table
        ]
        self.first = tuple(tables)

    def share(self, name: str) -> float:
        if self.decay == 1:
            return 1.0
        if name.startswith(self.first):
            return self.decay ** len(self.blocks)
        layer = next((n for block, n in self.blocks.items() if name.startswith(block)), None)
        return 1.0 if layer is None else self.decay ** (len(self.blocks) - 1 - layer)
