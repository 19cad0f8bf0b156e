"""Composed parts call the parts of the engine that they are in, and are left as they were."""

from __future__ import annotations

import pytest

from tinyvllm_ref.course.wiring import wired
from tinyvllm_ref.parts import Parts


def made(source):
    namespace = {}
    exec(source, namespace)
    return namespace


@pytest.fixture
def layer():
    return made(
        "def silu_mul(): return 'first'\n"
        "def decoder_layer(): return silu_mul()\n"
        "def other(): return silu_mul()\n"
    )


def test_a_layer_calls_what_took_the_place_of_a_part(layer):
    parts = Parts().replace(silu_mul=lambda: "second", decoder_layer=layer["decoder_layer"])
    with wired(parts):
        assert layer["decoder_layer"]() == layer["other"]() == "second"
    assert layer["decoder_layer"]() == "first"


def test_it_is_put_back_after_an_error(layer):
    parts = Parts().replace(silu_mul=lambda: "second", decoder_layer=layer["decoder_layer"])
    with pytest.raises(ZeroDivisionError), wired(parts):
        raise ZeroDivisionError
    assert layer["decoder_layer"]() == "first"


def test_a_name_that_it_does_not_use_is_not_added(layer):
    parts = Parts().replace(rope=lambda: None, decoder_layer=layer["decoder_layer"])
    with wired(parts):
        assert "rope" not in layer
    assert layer["decoder_layer"]() == "first"


def test_forward_calls_the_layer_that_took_the_place(layer):
    forward = made("def decoder_layer(): return 'old'\ndef forward(): return decoder_layer()\n")["forward"]
    parts = Parts().replace(silu_mul=lambda: "second", decoder_layer=layer["decoder_layer"], forward=forward)
    with wired(parts):
        assert forward() == "second"
    assert forward() == "old"


def test_parts_that_are_no_functions_are_left_alone():
    with wired(Parts().replace(decoder_layer=str, rope=lambda: None)):
        pass
