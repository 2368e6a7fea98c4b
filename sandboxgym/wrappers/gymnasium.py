"""Every wrapper that Gymnasium 1.4 exports, classified: captured, stateless, or refused.

The rule (item 5 of the contract): state that can change a later observation, reward or flag is restored, so running
statistics are. Pure records are not rewound: the queues and the episode count of `RecordEpisodeStatistics` continue.
Times are kept as durations, for clock readings mean nothing in another process.

Functions given to the ``Transform…`` wrappers are taken to be pure; their own state is not captured. Wrappers that
Gymnasium imports on demand (they need other array libraries) are known by name and not imported here.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import wrappers as gymnasium
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers.utils import RunningMeanStd, create_zero_array

from sandboxgym.core import copied
from sandboxgym.wrappers.codecs import BY_NAME, Adapter, WrapperCodec, observation_of, register_wrapper

Output = tuple[Any, dict[str, Any]]

_NUMBER = (int, float, np.number, np.ndarray)
_INTEGER = (int, np.integer)
_MOST = 2**30
"""Largest step count, far below the overflow of a wrapper's 32 bits."""
_SETTINGS = ("_saved_kwargs",)  # the constructor's arguments, which every wrapper of Gymnasium records


# How attributes that are not plain data are captured.


def _is_like(present: Any, value: Any) -> bool:
    return isinstance(value, np.ndarray) and (value.dtype, value.shape) == (present.dtype, present.shape)


def _is_statistics(present: RunningMeanStd, value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, _NUMBER) for v in value):
        return False
    numeric = all(np.asarray(v).dtype.kind in "fiu" for v in value)
    shapes = [np.shape(v) for v in value] == [np.shape(present.mean), np.shape(present.var), ()]
    return bool(numeric and shapes and 0 < value[2] < 2.0**53)


def _statistics(present: RunningMeanStd, value: list[Any]) -> RunningMeanStd:
    restored = copy.copy(present)
    restored.mean, restored.var, restored.count = copied(value)
    return restored


def _is_elapsed(_: float, value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


def _is_count(_: Any, value: Any) -> bool:
    return isinstance(value, _INTEGER) and not isinstance(value, bool) and bool(0 <= value < _MOST)


def _is_sum(_: Any, value: Any) -> bool:
    return not isinstance(value, bool) and np.asarray(value).dtype.kind in "fiu" and np.size(value) == 1


def _resembles(model: Any, value: Any) -> bool:
    """True if a value has the structure of another: keys, lengths, shapes, numbers or text, but not precisions."""
    if isinstance(model, Mapping):
        return (
            isinstance(value, dict)
            and model.keys() == value.keys()
            and all(_resembles(model[k], value[k]) for k in model)
        )
    if isinstance(model, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(model) == len(value) and all(map(_resembles, model, value))
    if isinstance(model, str):
        return isinstance(value, str)
    if isinstance(model, (bool, int, float, complex, np.number, np.bool_, np.ndarray)):
        kinds = np.asarray(model).dtype.kind, np.asarray(value).dtype.kind
        return all(kind in "biufc" for kind in kinds) and np.shape(model) == np.shape(value)
    return True


def _are_alike(present: Any, value: Any) -> bool:
    """True if all observations in a queue resemble each other, and the present ones."""
    models = [*list(present)[:1], *value[:1]]
    return all(_resembles(model, each) for model in models for each in value)


def _sticks(wrapper: Any, values: Mapping[str, Any]) -> bool:
    """Check that there is an action to repeat, if one is to be repeated."""
    space, action = wrapper.env.action_space, values["last_action"]
    if action is None:
        return not values["is_sticky_actions"]
    if space.contains(action):
        return True
    try:
        return _resembles(create_zero_array(space), action)
    except CustomSpaceError:  # nothing is known of its actions
        return True


ARRAY = Adapter(read=copied, write=lambda _, value: copied(value), fits=_is_like)
ARRAYS = Adapter(
    read=copied,
    write=lambda _, value: copied(value),
    fits=lambda present, value: (
        isinstance(value, list) and len(value) == len(present) and all(map(_is_like, present, value))
    ),
)
LIST = Adapter(read=copied, write=lambda _, value: copied(value), fits=lambda _, value: isinstance(value, list))
QUEUE = Adapter(
    read=lambda queue: copied(list(queue)),
    write=lambda present, value: deque(copied(value), maxlen=present.maxlen),
    fits=lambda present, value: (
        isinstance(value, list) and present.maxlen in (None, len(value)) and _are_alike(present, value)
    ),
)
LIKE = Adapter(read=copied, write=lambda _, value: copied(value), fits=_resembles)
COUNT = Adapter(read=None, write=None, fits=_is_count)
SUM = Adapter(read=copied, write=lambda _, value: copied(value), fits=_is_sum)
STATISTICS = Adapter(
    read=lambda rms: copied([rms.mean, rms.var, rms.count]),
    write=_statistics,
    fits=_is_statistics,
)
ELAPSED = Adapter(  # a reading of time.perf_counter, negative before the first episode
    read=lambda start: None if start < 0 else time.perf_counter() - start,
    write=lambda _, elapsed: -1 if elapsed is None else time.perf_counter() - elapsed,
    fits=_is_elapsed,
)


# What wrappers last returned, where that follows from their state.


def _stacked(wrapper: Any, observation: Any, info: dict[str, Any]) -> Output:
    space = wrapper.env.observation_space
    empty: Any = create_empty_array(space, n=wrapper.stack_size)
    return copy.deepcopy(concatenate(space, wrapper.obs_queue, empty)), info


def _normalized(wrapper: Any, observation: Any, info: dict[str, Any]) -> Output:
    """The observation normalised with the restored statistics, which already include it."""
    rms = wrapper.obs_rms
    return np.float32((observation - rms.mean) / np.sqrt(rms.var + wrapper.epsilon)), info


def _converted(wrapper: Any, observation: Any, info: dict[str, Any]) -> Output:
    convert = sys.modules["gymnasium.wrappers.array_conversion"].array_conversion
    result: Output = convert((observation, info), xp=wrapper._target_xp, device=wrapper._target_device)
    return result


def _compare_with_restored(checker: Any, transition: Output) -> None:
    """Make a restored `PassiveEnvChecker` compare its next transition: it does so only after its own reset."""
    checker._previous_data = None if checker.checked_data_reuse else copied(transition)


# The wrappers.

_CHECKED = ("checked_reset", "checked_step", "checked_render", "checked_data_reuse")
_STICKY = ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken")

CAPTURED: dict[type[Any], WrapperCodec] = {
    gymnasium.TimeLimit: WrapperCodec(
        state=("_elapsed_steps",),
        config=("_max_episode_steps",),
        adapters={"_elapsed_steps": COUNT},
        remember=False,
    ),
    gymnasium.OrderEnforcing: WrapperCodec(
        state=("_has_reset",),
        config=("_disable_render_order_enforcing",),
        types={"_has_reset": bool},
        remember=False,
    ),
    gymnasium.PassiveEnvChecker: WrapperCodec(
        state=_CHECKED,
        types=dict.fromkeys(_CHECKED, bool),
        # Else it compares with a transition that it does not have.
        fits=lambda _, values: values["checked_step"] or not values["checked_data_reuse"],
        remember=False,
        after=_compare_with_restored,
    ),
    gymnasium.Autoreset: WrapperCodec(state=("autoreset",), types={"autoreset": (bool, np.bool_)}, remember=False),
    gymnasium.RecordEpisodeStatistics: WrapperCodec(
        state=("episode_returns", "episode_lengths", "episode_start_time"),
        config=_SETTINGS,
        adapters={"episode_returns": SUM, "episode_lengths": COUNT, "episode_start_time": ELAPSED},
        remember=True,  # it adds to the info at the end of an episode
    ),
    gymnasium.FrameStackObservation: WrapperCodec(
        state=("obs_queue", "padding_value"),
        config=("stack_size", "padding_type"),
        adapters={"obs_queue": QUEUE, "padding_value": LIKE},
        observe=_stacked,
    ),
    gymnasium.DelayObservation: WrapperCodec(
        state=("observation_queue",),
        config=("delay",),
        adapters={"observation_queue": QUEUE},
        fits=lambda wrapper, values: len(values["observation_queue"]) <= wrapper.delay + 1,
        remember=True,  # it forgets what it returns
    ),
    gymnasium.TimeAwareObservation: WrapperCodec(
        state=("timesteps",),
        config=(*_SETTINGS, "max_timesteps"),
        adapters={"timesteps": COUNT},
        observe=observation_of,
    ),
    gymnasium.NormalizeObservation: WrapperCodec(
        state=("obs_rms", "_update_running_mean"),
        config=("epsilon",),
        types={"_update_running_mean": bool},
        adapters={"obs_rms": STATISTICS},
        observe=_normalized,
    ),
    gymnasium.NormalizeReward: WrapperCodec(
        state=("return_rms", "discounted_reward", "_update_running_mean"),
        config=("gamma", "epsilon"),
        types={"_update_running_mean": bool},
        adapters={"return_rms": STATISTICS, "discounted_reward": ARRAY},
        remember=False,
    ),
    gymnasium.StickyAction: WrapperCodec(
        state=_STICKY,
        config=("repeat_action_probability", "repeat_action_duration_range"),
        types={"is_sticky_actions": bool},
        adapters={"num_repeats": COUNT, "repeats_taken": COUNT},
        fits=_sticks,
        remember=False,
    ),
    gymnasium.MaxAndSkipObservation: WrapperCodec(
        state=("_obs_buffer",),
        config=("_skip",),
        adapters={"_obs_buffer": ARRAY},
        remember=True,  # the maximum after a step, the plain observation after a reset
    ),
    gymnasium.RenderCollection: WrapperCodec(
        state=("frame_list",), config=_SETTINGS, adapters={"frame_list": LIST}, remember=False
    ),
    gymnasium.AddRenderObservation: WrapperCodec(config=_SETTINGS, remember=True),  # drawing anew may draw at random
    gymnasium.AtariPreprocessing: WrapperCodec(
        state=("lives", "game_over", "obs_buffer"),
        config=_SETTINGS,
        types={"game_over": (bool, np.bool_)},
        adapters={"lives": COUNT, "obs_buffer": ARRAYS},
        remember=True,  # its reset merges the info of several steps
    ),
}

_OBSERVED = WrapperCodec(config=_SETTINGS, observe=observation_of)
_PASSED_ON = WrapperCodec(config=_SETTINGS, remember=False)
STATELESS: dict[type[Any], WrapperCodec] = {
    **dict.fromkeys(
        (
            gymnasium.TransformObservation,
            gymnasium.DiscretizeObservation,
            gymnasium.DtypeObservation,
            gymnasium.FilterObservation,
            gymnasium.FlattenObservation,
            gymnasium.GrayscaleObservation,
            gymnasium.RescaleObservation,
            gymnasium.ReshapeObservation,
            gymnasium.ResizeObservation,
        ),
        _OBSERVED,
    ),
    **dict.fromkeys(
        (
            gymnasium.TransformAction,
            gymnasium.ClipAction,
            gymnasium.DiscretizeAction,
            gymnasium.RescaleAction,
            gymnasium.RepeatAction,
            gymnasium.TransformReward,
            gymnasium.ClipReward,
            gymnasium.AddWhiteNoise,
            gymnasium.ObstructView,
        ),
        _PASSED_ON,
    ),
}

REFUSED: dict[type[Any], WrapperCodec] = {
    gymnasium.RecordVideo: WrapperCodec(
        refused="forks would write the same video files; snapshot, restore and fork what is inside it "
        "(recorder.env), and the video continues recording"
    ),
    gymnasium.HumanRendering: WrapperCodec(
        refused="forks would draw into the same window; snapshot, restore and fork what is inside it (env.env)"
    ),
}

_CONVERSION = WrapperCodec(observe=_converted)
ON_DEMAND: dict[str, WrapperCodec] = dict.fromkeys(
    (
        "gymnasium.wrappers.array_conversion.ArrayConversion",
        "gymnasium.wrappers.jax_to_numpy.JaxToNumpy",
        "gymnasium.wrappers.jax_to_torch.JaxToTorch",
        "gymnasium.wrappers.numpy_to_torch.NumpyToTorch",
    ),
    _CONVERSION,
)


def register() -> None:
    """Register them all. Idempotent; the few classes that must remember their last output do from then on."""
    for wrapper, codec in {**CAPTURED, **STATELESS, **REFUSED}.items():
        register_wrapper(wrapper, codec)
    BY_NAME.update(ON_DEMAND)
