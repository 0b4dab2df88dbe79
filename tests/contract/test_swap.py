"""What a swap is: the mechanism changes, nothing else does, and all of it comes back."""

from __future__ import annotations

from hf_posswap.families import FAMILIES, family_of
from hf_posswap.testing.contract.points import swapping
from tests.contract.others import ALL
from tests.contract.points import as_tests
from tests.families import vision_models
from tests.toys.registration import registered

globals().update(as_tests(swapping))  # a test for each point


def test_a_model_stands_for_every_family() -> None:
    """A family that sees images stands among models of its own, which are asked nothing about words."""
    with registered():
        reading = {family_of(tiny.config()).name for tiny in ALL.values()}
        seeing = {family_of(vision_models.config_of(name)).name for name in vision_models.OF_EACH_FAMILY}
        assert reading | seeing == set(FAMILIES)
        assert seeing == {name for name, family in FAMILIES.items() if any(part.image for part in family.parts)}
