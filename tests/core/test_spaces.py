"""`Unicode`: any string is a member, samples are actions that the environment understands."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxgym import Unicode

EXAMPLES = ("look", "inventory", "go to shelf 1")


@given(st.text())
def test_every_string_is_a_member(text):
    assert text in Unicode()


@pytest.mark.parametrize("other", [None, 3, b"look", ["look"], np.array(["look"])])
def test_nothing_else_is(other):
    assert other not in Unicode()


def test_samples_come_from_the_examples():
    space = Unicode(EXAMPLES, seed=0)
    assert {space.sample() for _ in range(60)} == set(EXAMPLES)
    assert Unicode().sample() == ""


def test_equal_seeds_give_equal_samples():
    def samples(seed):
        space = Unicode(EXAMPLES)
        space.seed(seed)
        return [space.sample() for _ in range(20)]

    assert samples(1) == samples(1) != samples(2)


def test_spaces_with_equal_examples_are_equal():
    assert Unicode(EXAMPLES) == Unicode(list(EXAMPLES))
    assert hash(Unicode(EXAMPLES)) == hash(Unicode(list(EXAMPLES)))
    assert Unicode(EXAMPLES) != Unicode()
    assert Unicode() != gym.spaces.Text(5)


def test_a_pickled_space_goes_on_sampling():
    space = Unicode(EXAMPLES, seed=5)
    space.sample()
    twin = pickle.loads(pickle.dumps(space))
    assert twin == space
    assert [twin.sample() for _ in range(9)] == [space.sample() for _ in range(9)]


@pytest.mark.parametrize("examples", ["look", (), [1], ["look", None]])
def test_examples_must_be_strings(examples):
    with pytest.raises(TypeError, match="expected a non-empty sequence of strings"):
        Unicode(examples)


@pytest.mark.parametrize("keyword", ["mask", "probability"])
def test_masks_are_refused(keyword):
    with pytest.raises(ValueError, match="no mask"):
        Unicode().sample(**{keyword: np.ones(1)})


def test_the_space_cannot_be_flattened():
    assert not Unicode().is_np_flattenable
    with pytest.raises(ValueError, match="cannot be flattened"):
        gym.spaces.flatdim(Unicode())


def test_batches_of_text_are_tuples():
    space = gym.vector.utils.batch_space(Unicode(EXAMPLES), 3)
    assert ("a", "", "b\n") in space
    assert len(space.sample()) == 3


def test_frame_stacks_of_text_are_padded_with_empty_text():
    env = gym.wrappers.FrameStackObservation(gym.make("sandboxgym/ALFWorld-v0"), 3, padding_type="zero")
    observation, _ = env.reset(seed=0)
    assert observation[:2] == ("", "") and observation[2].startswith("You are in")
