import pytest

from veloxquant.core.registry import CodebookRegistry, PreconditionerRegistry, QuantizerRegistry


def test_registered_class_is_found_in_its_own_registry_only() -> None:
    @QuantizerRegistry.register("test_one")
    class One:
        pass

    try:
        assert QuantizerRegistry.get("test_one") is One
        assert "test_one" in QuantizerRegistry.names()
        for other in (CodebookRegistry, PreconditionerRegistry):
            with pytest.raises(KeyError, match="test_one"):
                other.get("test_one")
        with pytest.raises(ValueError, match="another name"):
            QuantizerRegistry.register("test_one")(int)
        assert QuantizerRegistry.register("test_one")(One) is One
    finally:
        QuantizerRegistry._classes.pop("test_one")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="known"):
        QuantizerRegistry.get("no such thing")
