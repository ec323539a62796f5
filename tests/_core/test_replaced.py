"""An attribute that is replaced for a time: afterwards the object is as it was, whatever happened meanwhile."""

import types

import pytest

from lightning_tricks._core.replaced import replaced


class Owner:
    def call(self):
        return "class"


def test_a_name_from_the_class_is_the_classs_again():
    owner = Owner()
    with replaced(owner, "call", lambda: "ours"):
        assert owner.call() == "ours"
    assert vars(owner) == {}
    assert owner.call() == "class"


@pytest.mark.parametrize("own", [lambda: "own", None], ids=["method", "none"])
def test_what_the_object_itself_had_stands_there_again(own):
    owner = Owner()
    owner.call = own
    with replaced(owner, "call", lambda: "ours"):
        assert owner.call() == "ours"
    assert vars(owner) == {"call": own}


def test_an_exception_goes_its_way_and_leaves_nothing():
    owner = Owner()
    with pytest.raises(KeyError, match="mine"), replaced(owner, "call", None):
        raise KeyError("mine")
    assert vars(owner) == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("own", [True, False])
def test_several_replacements_may_end_in_any_order(order, own):
    owner, other = Owner(), Owner()
    if own:
        owner.call = "own"
    before = dict(vars(owner))
    scopes = [replaced(owner, "call", place) for place in range(3)]
    for scope in scopes:
        scope.__enter__()
    with replaced(other, "call", 1):  # of the same value, but of another object
        for ended, place in enumerate(order):
            scopes[place].__exit__(None, None, None)
            left = [place for place in range(3) if place not in order[: ended + 1]]
            assert vars(owner) == ({"call": left[-1]} if left else before)
    assert vars(other) == {}


def test_what_somebody_else_has_put_in_its_place_stays():
    owner = Owner()
    with replaced(owner, "call", "ours"):
        owner.call = "theirs"
    assert owner.call == "theirs"


def test_a_function_of_a_python_module_is_replaced_too():
    module = types.ModuleType("made_up")
    module.function = len
    with replaced(module, "function", max):
        assert module.function is max
    assert module.function is len
