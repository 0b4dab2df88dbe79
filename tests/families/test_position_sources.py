"""What each stock class counts where it is given no position ids: its table, rotary module or ALiBi is listened to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posswap.families.locating import REFUSED, locate
from hf_posswap.families.sites import Stack
from hf_posswap.testing.contract.pairs import given
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.contract.models import PADDING
from tests.contract.others import ALL
from tests.contract.pairs import gap, logits, words
from tests.stock import TOKENS_ARE_NOT_ENOUGH, UNBUILT

SHOWN = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], [1] * 12, [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]])
"""Padding on the left, inside and on the right of three rows."""
IDS = words(3, 12)
OWN = ("house",)
"""Models that are not a class of transformers."""
FALCON_ALIBI = {"alibi": True}


class Listener:
    """Hears what positions the position modules of one stack are given, of the first forward after it was made."""

    def __init__(self, model: Any, stack: Stack) -> None:
        self.heard: list[Tensor] = []
        self.table_offset = stack.table_offset
        table = _module(model, stack.table_path)
        if table is not None:
            table.register_forward_hook(self._table)
        for path in stack.rotary[:1]:
            model.get_submodule(path).register_forward_pre_hook(self._rotary, with_kwargs=True)
        if stack.inside is not None:
            model.get_submodule(stack.attention[0]).register_forward_pre_hook(self._attention, with_kwargs=True)

    def _table(self, module: Any, args: Any, out: Any) -> None:
        """Find in the table the rows that it gave, whatever it was asked by."""
        rows = getattr(module, "weight", None)
        rows = module.weights if rows is None else rows
        found = (out.detach()[..., None, :] - rows.detach()).abs().sum(-1).argmin(-1)
        self.heard.append((found if found.dim() == 2 else found[None]) - self.table_offset)

    def _rotary(self, module: Any, args: Any, kwargs: Any) -> None:
        at = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        self.heard.append(at if at.dim() == 2 else at[0])

    def _attention(self, module: Any, args: Any, kwargs: Any) -> None:
        """Hear a bias for each key, [B * H, 1, K], [H, 1, K] or [B, H, 1, K], or the position ids of a rotation."""
        bias = next((kwargs[name] for name in ("alibi", "position_bias") if _is(kwargs.get(name))), None)
        if bias is None:
            self.heard += [kwargs["position_ids"]] if _is(kwargs.get("position_ids")) else []
        elif bias.shape[-2] == 1:
            rows = len(SHOWN) if len(bias) % len(SHOWN) == 0 else 1
            first = bias.reshape(rows, -1, bias.shape[-1])[:, 0, -SHOWN.shape[1] :]  # of the first head
            whole = first[min(1, rows - 1)]  # the row without padding
            self.heard.append((first / (whole[1] - whole[0])).round().long())


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _module(model: Any, path: str | None) -> Any:
    held = model
    for name in path.split(".") if path else ():
        held = getattr(held, name)
    return held if path and isinstance(held, nn.Module) else None


def counted(source: str) -> Tensor:
    """Return where the tokens stand in all rows, by what is counted."""
    return SHOWN.cumsum(1) - 1 if source in ("mask", "input_ids") else torch.arange(12).expand(3, -1)


def told_apart(source: str, mask: Tensor) -> dict[str, Tensor]:
    """Return an input from which one learns whether ids or the mask are counted: padding ids are in the one alone."""
    padded, hidden = IDS.masked_fill(SHOWN == 0, PADDING), IDS
    return {"input_ids": padded if source == "input_ids" else hidden, "attention_mask": mask}


def relation(heard: Tensor) -> Tensor:
    """Return `heard` positions from the first token of the row that has no padding."""
    rows = heard[:, :12].expand(3, -1)
    return rows - rows[1, 0]


def cases() -> list[tuple[str, dict[str, Any]]]:
    return [(name, {}) for name in ALL if name not in OWN] + [("falcon", FALCON_ALIBI)]


@pytest.mark.parametrize(("name", "changes"), cases(), ids=lambda value: str(value))
def test_a_stock_class_counts_what_its_family_says(name: str, changes: dict[str, Any]) -> None:
    model: Any = ALL[name].build(**changes)
    proved = 0
    for stack in locate(model).stacks:
        listener, source = Listener(model, stack), stack.position_source
        mask = torch.ones_like(SHOWN) if source == "input_ids" else SHOWN
        with torch.no_grad():
            uncached = {"use_cache": False} if ALL[name].takes("use_cache") else {}
            model(**given(ALL[name], stack.name, told_apart(source, mask)), **uncached)
        for heard in listener.heard:
            assert torch.equal(relation(heard)[SHOWN.bool()], counted(source)[SHOWN.bool()]), (stack.name, source)
        proved += len(listener.heard)
    assert proved or name in UNHEARD


UNHEARD = ("t5", "umt5", "longt5", "roformer", "ctrl")
"""Classes whose position modules take lengths, not positions: they count every token."""


@pytest.mark.parametrize("name", ["mpt", "roformer"])
def test_a_stock_class_of_distances_does_not_see_padding_on_the_left(name: str) -> None:
    model: Any = ALL[name].build()
    assert locate(model).main.position_source == "relative"
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :4] = 0
    found = logits(model, IDS[:1], attention_mask=mask)[:, 4:]
    assert gap(found, logits(model, IDS[:1, 4:])) < 1e-4
    mask[:], mask[:, 4:8] = 1, 0
    found = logits(model, IDS[:1], attention_mask=mask)[:, 8:]
    kept = torch.cat([IDS[:1, :4], IDS[:1, 8:]], dim=1)
    assert gap(found, logits(model, kept)[:, 4:]) > 1e-2  # what lies inside is counted


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(language_models()))
def test_every_class_counts_what_its_family_says(name: str) -> None:
    if name in UNBUILT or REFUSED.keys() & set(language_models()[name]):
        pytest.skip("it is refused by its name, or transformers builds no tiny one")
    model: Any = tiny_model(name, meta=False)
    stacks = locate(model).stacks
    paired = bool(getattr(model.config, "is_encoder_decoder", False))
    for stack in stacks:
        if stack.inputs == "images":
            continue
        listener, source = Listener(model, stack), stack.position_source
        ids = IDS % (model.config.get_text_config().vocab_size - 8) + 8
        ids = ids.masked_fill(SHOWN == 0, stack.padding_id) if source == "input_ids" else ids
        read = {"input_ids": ids, "attention_mask": torch.ones_like(SHOWN) if source == "input_ids" else SHOWN}
        if paired and stack.name == "decoder":
            read = {f"decoder_{key}": value for key, value in read.items()} | {"input_ids": ids}
        elif paired:
            read["decoder_input_ids"] = ids
        try:
            with torch.no_grad():
                model(**read)
        except Exception as error:
            if TOKENS_ARE_NOT_ENOUGH.get(name, "?") not in str(error):
                raise
            pytest.skip(f"the stock class itself does not run on padded tokens: {error}")
        for heard in listener.heard:
            assert torch.equal(relation(heard)[SHOWN.bool()], counted(source)[SHOWN.bool()]), (stack.name, source)
