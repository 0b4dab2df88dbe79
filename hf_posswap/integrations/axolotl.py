"""A plugin of axolotl: swaps the model that a YAML file names, before adapters, and proves it in the Trainer.

```yaml
plugins:
  - hf_posswap.integrations.axolotl.PosswapPlugin
posswap:
  scheme: "yarn:factor=8"
  max_length: 65536
sequence_len: 65536
```
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from hf_posswap.errors import ConfigError, DataError, PosswapError, SwapVerificationError
from hf_posswap.patching.apply.patch_model import patch_model, swap_plan
from hf_posswap.patching.plan.plan_swap import plan_swap, unwrap
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.text.documents import GIVE, file_documents, files_below
from hf_posswap.text.tokens import load_tokenizer, token_stream
from hf_posswap.training.engine.fitting import fitted_length
from hf_posswap.training.search import check_fit, fit_bias, fit_rotation
from hf_posswap.training.trainer_callback import PosswapCallback
from hf_posswap.training.trainer_proof import check_scheme
from hf_posswap.utils.printable import brief_repr

if TYPE_CHECKING:
    import numpy as np
    from axolotl.utils.dict import DictDefault
    from transformers import PreTrainedModel

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:  # the settings can be checked without axolotl
    BasePlugin = object

_KEY = "posswap"
_ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
_OVERRIDES = ("overrides_of_model_config", "model_config", "overrides_of_model_kwargs")


class PosswapSettings(BaseModel):
    """What `posswap:` in the YAML file holds.

    Attributes:
        scheme: as for `patch_model`, such as "yarn:factor=8"; or a mapping with name and fields.
        max_length: positions that the swapped model is meant for; None: as `patch_model` chooses.
        fit: texts on which alibi, kerple or t5 is fitted to the model's own positions, or a partial rotation to its
            learned table; 0: no fit.
        fit_text: texts for `fit`: a file, or a folder of files.
        max_first_loss: as for `PosswapCallback`.
        digests: as for `PosswapCallback`.
    """

    model_config = ConfigDict(extra="forbid")

    scheme: str | dict[str, object]
    max_length: PositiveInt | None = None
    fit: int = Field(default=0, ge=0)
    fit_text: str | None = None
    max_first_loss: float | None = Field(default=None, gt=0)
    digests: bool = True

    @field_validator("scheme")
    @classmethod
    def _check_scheme(cls, value: str | dict[str, Any]) -> str | dict[str, object]:
        try:
            make_scheme(value)
        except PosswapError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _check_fit(self) -> PosswapSettings:
        if bool(self.fit) != (self.fit_text is not None):
            raise ValueError("posswap.fit (a number of texts) and posswap.fit_text (where they are) go together")
        return self


class PosswapArgs(BaseModel):
    """What the plugin adds to axolotl's config.

    Attributes:
        posswap: the swap.
    """

    posswap: PosswapSettings | None = None


class PosswapPlugin(BasePlugin):
    """Swaps the position mechanism of the model that axolotl trains, and adds `PosswapCallback` to its Trainer.

    The model is swapped in `post_model_build`: after its weights are loaded, before adapters are put on it. A base that
    carries the swap already, a saved one, is left as it is; one that carries another swap, or is to be fitted though it
    is swapped, is refused. The reference model of preference training is swapped too.
    """

    def get_input_args(self) -> str:
        """Return the name of the class that checks `posswap:`."""
        return f"{__name__}.{PosswapArgs.__name__}"

    def register(self, cfg: DictDefault) -> None:
        """Check what needs no model, before data are prepared.

        Raises:
            ConfigError: `posswap:` is missing or wrong, or the file scales RoPE a second time.
        """
        settings_of(cfg)

    def post_model_build(self, cfg: DictDefault, model: PreTrainedModel) -> None:
        """Swap `model` in place.

        Raises:
            ConfigError: the settings do not fit the model or one another, or the base carries another swap.
            PosswapError: as `patch_model` and the fits raise.
        """
        settings, base, name = settings_of(cfg), unwrap(model), cfg.get("base_model")
        if getattr(base, "_posswap", None) is None:
            swap(base, settings, cfg)
        elif settings.fit:
            raise ConfigError(
                f"posswap.fit is {settings.fit}, and {name} already carries {swap_plan(base).named}: a fit is to the "
                "positions of an unswapped model. Take fit and fit_text out to train it as it is, or set base_model to "
                "the model before its swap."
            )
        else:
            try:
                check_scheme(base, make_scheme(settings.scheme))
            except SwapVerificationError as error:
                raise ConfigError(
                    f"posswap.scheme is {settings.scheme!r}, and {name} already carries {swap_plan(base).named}: set "
                    "posswap.scheme to what it carries, to train it as it is, or base_model to the model before its "
                    "swap."
                ) from error
        plan = swap_plan(base)
        if (cfg.get("sequence_len") or 0) > plan.max_length:
            raise ConfigError(
                f"sequence_len is {cfg.get('sequence_len')}, and the swap to {plan.named} is for {plan.max_length}: "
                f"set posswap.max_length (and the scheme's factor) to reach it, or sequence_len to {plan.max_length}."
            )

    def add_callbacks_pre_trainer(self, cfg: DictDefault, model: PreTrainedModel) -> list[object]:
        """Return the callback that proves, gates and records the swap, for the constructor of the Trainer."""
        settings = settings_of(cfg)
        scheme = None if settings.fit else settings.scheme  # a fit gives each layer a scheme of its own
        return [PosswapCallback(scheme, max_first_loss=settings.max_first_loss, digests=settings.digests)]


def settings_of(cfg: DictDefault) -> PosswapSettings:
    """Return what `posswap:` in axolotl's config holds.

    Args:
        cfg: axolotl's config, or any mapping.

    Raises:
        ConfigError: it is missing or wrong, or the file scales RoPE as well.

    Example:
        >>> settings_of({"posswap": {"scheme": "yarn:factor=8", "max_length": 65536}}).max_length
        65536
    """
    given = cfg.get(_KEY)
    if given is None:
        raise ConfigError(
            "plugins: names PosswapPlugin, and posswap: is missing: give at least its scheme, as in "
            'posswap: {scheme: "yarn:factor=8"}, or take the plugin out.'
        )
    for name in _OVERRIDES:
        twice = sorted(set(cfg.get(name) or {}) & set(_ROPE_KEYS))
        if twice:
            raise ConfigError(
                f"{name} sets {', '.join(twice)}, and posswap: swaps the positions of the result: the model would be "
                "scaled twice. Leave one of them out."
            )
    try:
        return PosswapSettings.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(" ".join(map(_problem, error.errors()))) from error


def _problem(error: Any) -> str:
    """Return one of pydantic's errors as a sentence with its key."""
    key = ".".join([_KEY, *map(str, error["loc"])])
    shown = "" if error["type"] == "missing" else f", got {brief_repr(error['input'])}"
    return f"{key}: {error['msg'].removeprefix('Value error, ').rstrip('.')}{shown}."


def swap(model: PreTrainedModel, settings: PosswapSettings, cfg: DictDefault) -> None:
    """Swap `model` in place as `settings` say, with a fit if they ask for one.

    Args:
        model: a transformers model without a swap.
        settings: of the file.
        cfg: axolotl's config.
    """
    scheme = make_scheme(settings.scheme)
    if not settings.fit:
        patch_model(model, scheme, max_length=settings.max_length)
        return
    plan = plan_swap(model, scheme, max_length=settings.max_length)
    rotates = isinstance(plan.scheme, RotaryScheme)
    if rotates and cfg.get("adapter"):
        raise ConfigError(
            f"posswap.fit changes queries and keys of the base for {plan.scheme.name}, which an adapter does not hold: "
            "set posswap.fit to 0, or train without adapter."
        )
    check_fit(model, plan.scheme if rotates else scheme)
    rows = fitting_rows(settings, cfg, fitted_length(plan.sites.geometry))
    fitted: Scheme = scheme if rotates else fit_bias(model, scheme, rows)
    patch_model(model, fitted, max_length=settings.max_length)
    if rotates:
        fit_rotation(model, rows)


def fitting_rows(settings: PosswapSettings, cfg: DictDefault, length: int) -> list[np.ndarray]:
    """Return the beginnings of the texts of a fit as token ids, each of at most `length`.

    `revision_of_model` is that of the tokenizer, too, as in axolotl.

    Raises:
        DataError: there are none, or fewer than asked for.
    """
    source = cfg.get("tokenizer_config") or cfg.get("base_model")
    hub = {"revision": cfg["revision_of_model"]} if cfg.get("revision_of_model") else {}
    trusted = bool(cfg.get("trust_remote_code"))
    tokenizer = load_tokenizer(source, instead="set tokenizer_config", trust_remote_code=trusted, **hub)
    rows: list[np.ndarray] = []
    for path in files_below(Path(str(settings.fit_text))):
        for document in file_documents(path, "text"):
            row = token_stream([document], tokenizer)[:length]
            rows += [row] if len(row) > 1 else []
            if len(rows) == settings.fit:
                return rows
    raise DataError(
        f"posswap.fit asks for {settings.fit} texts, and {settings.fit_text} has {len(rows)}: {GIVE}, or lower fit."
    )
