"""The edits inside attention: the scheme's module on the base model, and each attention module that it acts in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.families.base import PositionSource
from hf_posswap.families.modules import entry_signature, owner_of
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.continuous_batching import (
    allow_continuous_batching,
    needs_key_positions,
    refuse_continuous_batching,
)
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.offload import device_of
from hf_posswap.patching.edits.restore import keep_hooks, remove_hooks
from hf_posswap.patching.sites.attention.config_view import ConfigView
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemos
from hf_posswap.patching.sites.attention.hooks import PositionHook, StartHook
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.mechanism import Mechanism


@dataclass(frozen=True, kw_only=True)
class AddMechanism(Edit):
    """Registers the scheme's module at `path`, and hooks that keep forwards apart.

    Attributes:
        entry: path of the module that takes the stack's input.
        scheme: resolved.
        geometry: of the stack.
        native_bias: whether the stock class has a bias on its scores, which goes by the index of tokens.
        drops_bias: whether what is left of the bias that the model itself makes is zeros.
        position_source: what the stock class counts where it is given no position ids.
        padding_id: the token id that is not counted, where it counts input ids.
    """

    entry: str
    scheme: Scheme
    geometry: Geometry
    native_bias: bool
    drops_bias: bool
    position_source: PositionSource
    padding_id: int | None

    def apply(self, model: Any, saved: Saved) -> None:
        mechanism, device = self.scheme.mechanism(self.geometry), device_of(model)
        if device.type != "meta":
            mechanism.to(device)
        owner, leaf = owner_of(model, self.path)
        saved["added"] = True
        model.set_submodule(self.path, mechanism)
        if needs_key_positions(mechanism):
            refuse_continuous_batching(model)
        entry = model.get_submodule(self.entry)
        memos = ForwardMemos(drops_bias=self.drops_bias, source=self.position_source, padding_id=self.padding_id)
        signature = entry_signature(entry)
        goes_by_ids = "position_ids" in signature and not self.native_bias
        masks_by_index = self.geometry.causal and not goes_by_ids
        start = StartHook(owner, leaf, memos, signature, masks_by_index=masks_by_index)
        keep_hooks(saved, entry.register_forward_pre_hook(start, with_kwargs=True))
        keep_hooks(saved, entry.register_forward_hook(start.stop, always_call=True))

    def undo(self, model: Any, saved: Saved) -> None:
        remove_hooks(saved)
        owner, leaf = owner_of(model, self.path)
        if saved.pop("added", False) and hasattr(owner, leaf):
            delattr(owner, leaf)
        allow_continuous_batching(model)

    def check(self, model: Any) -> str | None:
        carried: Any = model.get_submodule(self.path)
        mechanism = original_of(carried)
        fresh = self.scheme.mechanism(self.geometry)
        if type(mechanism) is not type(fresh):
            return f"a {type(mechanism).__name__} is in the place of a {type(fresh).__name__}"
        actual, expected = _constants(mechanism), _constants(fresh)
        wrong = [n for n in expected if n not in actual or not _equal(actual[n], expected[n])]
        if wrong:
            return f"{', '.join(wrong)} of the mechanism changed"
        started = start_hook(model, self.entry) is not None
        return None if started else "the hook that separates forwards is missing"

    def reload(self, model: Any) -> None:
        """Nothing: no stock class loads a scheme inside attention."""

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.path}.",)

    def with_scheme(self, scheme: Scheme) -> Self:
        return replace(self, scheme=scheme)


@dataclass(frozen=True, kw_only=True)
class PatchAttention(Edit):
    """Puts the scheme between one attention module's projections and its attention implementation.

    Attributes:
        carried: path of the mechanism, which is there already.
        entry: path of the module that takes the stack's input.
        first: what the model's `position_ids` call position 0.
        layer: which of the model's attention layers it is, counted from 0.
    """

    hook: ClassVar[type[PositionHook]] = PositionHook
    carried: str
    entry: str
    first: int
    layer: int

    def apply(self, model: Any, saved: Saved) -> None:
        module, start = model.get_submodule(self.path), start_hook(model, self.entry)
        assert start is not None
        module.config = ConfigView(module.config)
        owner, leaf = owner_of(model, self.carried)
        hook = self.hook(owner, leaf, start.memos, entry_signature(module)[0], self.first, self.layer)
        keep_hooks(saved, module.register_forward_pre_hook(hook, with_kwargs=True))
        keep_hooks(saved, module.register_forward_hook(hook.check_used, with_kwargs=True))
        start.carriers.append(self.path.removeprefix(f"{self.entry}.") if self.entry else self.path)

    def undo(self, model: Any, saved: Saved) -> None:
        """Give the attention module the model's config again, whatever that is by now."""
        remove_hooks(saved)
        module = model.get_submodule(self.path)
        if isinstance(module.config, ConfigView):
            module.config = module.config.native

    def check(self, model: Any) -> str | None:
        module = model.get_submodule(self.path)
        hooked = any(isinstance(hook, PositionHook) for hook in pre_hooks(module))
        good = hooked and isinstance(module.config, ConfigView)
        return None if good else "the attention module does not carry the scheme"

    def reload(self, model: Any) -> None:
        """Nothing: no stock class loads a scheme inside attention."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


def start_hook(model: Any, entry: str) -> StartHook | None:
    """Return the hook by which `AddMechanism` keeps the forwards of the stack that begins at `entry` apart, or None."""
    hooks = pre_hooks(model.get_submodule(entry))
    return next((hook for hook in hooks if isinstance(hook, StartHook)), None)


def _constants(mechanism: Mechanism) -> dict[str, Tensor]:
    """Return the constant tensors of a mechanism: angles, slopes."""
    constants: dict[str, Tensor] = {}
    for path, module in mechanism.named_modules():
        for name, value in vars(module).items():
            if value is getattr(module, "number", None):
                continue  # each copy has its own
            values = value if isinstance(value, tuple) else (value,)
            tensors = {f"{path}.{name}[{i}]": tensor for i, tensor in enumerate(values) if isinstance(tensor, Tensor)}
            constants |= {name.lstrip("."): tensor for name, tensor in tensors.items()}
    return constants


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return bool(actual.cpu().equal(expected.cpu()))
