"""A state dict of a swapped model says so itself, in memory and in files of torch: stock classes refuse it."""

from __future__ import annotations

from collections import OrderedDict
from types import ModuleType
from typing import Any, NoReturn


class RefusedElsewhere(dict[str, Any]):
    """torch's metadata of one module in a state dict, which only the swapped class of that module accepts.

    The weights in memory have the shapes of the stock class, which accelerate and exporters count on. It goes with
    `torch.save`; `torch.load` takes it where hf_posswap is imported, and elsewhere names this class as what it lacks.

    Args:
        values: that torch has there.
        name: of the stock class.
    """

    def __init__(self, values: dict[str, object], name: str) -> None:
        super().__init__(values)
        self.name = name

    def get(self, *_: object) -> NoReturn:
        """Refuse to be read, as torch does where it loads.

        Raises:
            CheckpointError: always.
        """
        from hf_posswap.errors import CheckpointError  # not before: `import hf_posswap` loads its hooks alone

        raise CheckpointError(
            f"this state dict belongs to a {self.name} that hf_posswap swapped; an unswapped model would give silently "
            "wrong outputs with it. Load it into a swapped model, such as type(model)(model.config); or, if that is "
            "what you want, into this one as dict(state_dict)."
        )

    def __deepcopy__(self, memo: dict[int, object]) -> RefusedElsewhere:
        return RefusedElsewhere(dict(self), self.name)

    def __reduce__(self) -> tuple[object, ...]:
        if not __name__.startswith("hf_posswap."):  # code that came with a checkpoint: no other process finds it
            return OrderedDict, (list(map(list, self.items())),)
        return RefusedElsewhere, (OrderedDict(self), self.name)


def let_torch_load(serialization: ModuleType) -> None:
    """Have `torch.load(..., weights_only=True)` take state dicts of swapped models.

    Args:
        serialization: the module torch.serialization, which may be all of torch that is imported yet.
    """
    serialization.add_safe_globals([RefusedElsewhere])
