"""What the quality benchmark measures, and in which groups."""

from typing import Any

import pytest

from veloxquant.benchmarks.contenders import Contender, Size, contenders
from veloxquant.benchmarks.planned import quantising
from veloxquant.benchmarks.quality import GROUP, grouped
from veloxquant.quantizers.sizes import LayerShape

SIZE = Size(prompt=300, steps=12, budget=64)


class Plan:
    """A plan of which only the shapes are asked."""

    model = None

    def shapes(self) -> list[LayerShape]:
        return [LayerShape(4, 2, 64, 64)]


def field(methods: tuple[str, ...] = (), **kwargs: Any) -> list[Contender]:
    options = {"quick": False, "evicting": True} | kwargs
    return list(contenders(Plan(), SIZE, methods, **options))  # type: ignore[arg-type]


def test_every_quantising_method_is_measured_once_at_its_defaults() -> None:
    found = field()
    assert found[0].kind == "exact"
    defaults = [c.method for c in found if c.default]
    assert defaults == [row.name for row in quantising()]
    names = [c.name for c in found]
    assert len(set(names)) == len(names)
    assert {c.kind for c in found} == {"exact", "ours", "stock", "evicting", "random"}


def test_a_selection_keeps_the_rivals() -> None:
    found = field(("kvquant", "amc"), evicting=False)
    assert [c.name for c in found if c.kind == "ours"] == [
        "kvquant 2 bit", "kvquant 3 bit", "kvquant 4 bit", "amc"
    ]  # fmt: skip
    assert [c.name for c in found if c.default] == ["kvquant 3 bit", "amc"]
    assert {c.kind for c in found} == {"exact", "ours", "stock"}
    with pytest.raises(ValueError, match="h2o"):
        field(("h2o",))


@pytest.mark.parametrize("others", [0, 1, GROUP - 1, GROUP, 3 * GROUP])
def test_every_group_begins_with_the_exact_cache(others: int) -> None:
    made = [Contender(str(i), "ours", lambda: ([], lambda: None)) for i in range(1 + others)]
    groups = grouped(made)
    assert all(group[0] is made[0] and len(group) <= GROUP for group in groups)
    assert [c for group in groups for c in group[1:]] == made[1:]
