"""SamplingParams: what is accepted, and that a refusal names option, value and what would be right."""

import dataclasses
import math

import numpy as np
import pytest

from tinyvllm_ref.sampling_params import SamplingParams


def test_defaults_are_vllm_s():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (
        1,
        16,
        1.0,
        1.0,
        0,
    )
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, None, None)
    assert (params.ignore_eos, params.skip_special_tokens) == (False, True)
    assert params.stop_strings == ()
    assert not params.greedy


def test_it_is_frozen_hashable_and_normalised():
    params = SamplingParams(
        temperature=0, stop="\n", stop_token_ids=[3, np.int64(4)], top_k=np.int32(5), seed=-1
    )
    assert params.greedy
    assert (params.stop, params.stop_strings, params.stop_token_ids) == (("\n",), ("\n",), (3, 4))
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1},
        {"max_tokens": None},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-3},
        {"stop": None, "stop_token_ids": None},
        {"stop": (), "stop_token_ids": ()},
    ],
)
def test_the_ends_of_the_ranges_are_accepted(options):
    SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("n", 0, "at least 1"),
        ("max_tokens", 0, "at least 1, or None"),
        ("max_tokens", -5, "at least 1, or None"),
        ("temperature", math.nan, "finite number of at least 0"),
        ("temperature", math.inf, "finite number of at least 0"),
        ("temperature", -0.1, "finite number of at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", -2, "0 or -1 to keep all"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", math.nan, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
        ("seed", 2**64, "64 bits"),
        ("seed", -(2**63) - 1, "64 bits"),
        ("logprobs", -1, "at least 0, or None"),
        ("prompt_logprobs", -1, "at least 0, or None"),
        ("stop", "", "non-empty string"),
        ("stop", ["a", ""], "non-empty string"),
        ("stop_token_ids", [-1], "non-negative"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, rule):
    with pytest.raises(ValueError, match=f"SamplingParams: {name} is ") as caught:
        SamplingParams(**{name: value})
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.0),
        ("n", True),
        ("n", None),
        ("max_tokens", "16"),
        ("temperature", "0.7"),
        ("temperature", None),
        ("temperature", True),
        ("temperature", 1j),
        ("top_p", [0.9]),
        ("top_k", 2.5),
        ("seed", 1.5),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("stop", 5),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", 3),
        ("stop_token_ids", "34"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"SamplingParams: {name} is .* it must be"):
        SamplingParams(**{name: value})


def test_one_completion_with_a_seed_of_its_own():
    given = SamplingParams(n=3, seed=5, temperature=0.5, top_k=7, stop=["a"], max_tokens=4, ignore_eos=True)
    one = given.with_seed(2**64 - 1)
    assert one == dataclasses.replace(given, n=1, seed=2**64 - 1)
    assert (given.n, given.seed) == (3, 5)
