"""The pytest plugin: one test item for each check of each environment.

``pytest --pyargs sandboxgym.conformance --sandboxgym-env my_package:MyEnv-v0`` certifies an environment from anywhere.
To certify one with hooks in a test module of one's own, override the fixture ``snapshot_subject``:

    from sandboxgym.conformance.test_conformance import test_conformance  # noqa: F401

    @pytest.fixture(scope="session")
    def snapshot_subject():
        return Subject(make_env, actions=my_policy)

Every pytest run of everybody who has the package installed loads this module. It stands beside `sandboxgym`, for to
import a part of that is to import it, and imports nothing of it until an option or a fixture asks for it.
"""

from __future__ import annotations

from typing import Any

import pytest

_NONE = "no --sandboxgym-env"
_RESULTS = pytest.StashKey[dict[int, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("sandboxgym", "conformance of environments with snapshots")
    group.addoption(
        "--sandboxgym-env",
        action="append",
        default=[],
        metavar="ENV_ID",
        help="certify this environment: a Gymnasium id (ALFWorld-v0, package.module:Name-v0) or module:function; "
        "repeatable",
    )
    group.addoption(
        "--sandboxgym-env-kwargs",
        "--sandboxgym-kwargs",
        "--sandboxgym-make-kwargs",
        dest="sandboxgym_make_kwargs",
        action="append",
        default=[],
        metavar="JSON|NAME=VALUE",
        help="arguments of the environment; repeatable",
    )
    group.addoption(
        "--sandboxgym-reset-options",
        action="append",
        default=[],
        metavar="JSON",
        help="options of every reset, as a JSON object; repeated: one per control run, in turn",
    )
    group.addoption(
        "--sandboxgym-hook",
        action="append",
        default=[],
        metavar="NAME=module:function",
        help="hooks of the environment: actions, observe_state, normalize, shell, lossy or limits; repeatable",
    )
    group.addoption(
        "--sandboxgym-level", action="append", metavar="LEVELS", help="levels to run, such as 1, 0-2 or exact"
    )
    group.addoption("--sandboxgym-budget", choices=("quick", "full"), default="quick", help="effort of the checks")
    group.addoption("--sandboxgym-seed", type=int, default=0, help="seed of everything that the suite draws")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An item for each environment and check."""
    if "sandboxgym_target" in metafunc.fixturenames:  # not where snapshot_subject is overridden
        targets = metafunc.config.getoption("--sandboxgym-env") or [_NONE]
        metafunc.parametrize("sandboxgym_target", targets, indirect=True, scope="session")
        if targets == [_NONE]:
            if "snapshot_check" in metafunc.fixturenames:
                metafunc.parametrize("snapshot_check", [_NONE])
            return
    if "snapshot_check" in metafunc.fixturenames:
        from sandboxgym.conformance.__main__ import parse_levels
        from sandboxgym.conformance.runner import all_checks

        try:
            levels = parse_levels(metafunc.config.getoption("--sandboxgym-level"))
        except ValueError as error:
            raise pytest.UsageError(f"--sandboxgym-level: {error}") from None
        metafunc.parametrize("snapshot_check", [check.id for check in all_checks(levels=levels)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without an environment there is nothing to show, not even a skipped test."""
    items[:] = [item for item in items if not _empty(item)]


def _empty(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("sandboxgym_target") == _NONE


@pytest.fixture(scope="session")
def sandboxgym_target(request: pytest.FixtureRequest) -> str:
    """The environment named by ``--sandboxgym-env``."""
    return str(request.param)


@pytest.fixture(scope="session")
def snapshot_subject(request: pytest.FixtureRequest, sandboxgym_target: str) -> Any:
    """Subject that is certified: override the fixture to certify a `Subject` of your own."""
    from sandboxgym.arguments import parse_arguments
    from sandboxgym.conformance.__main__ import parse_hooks, parse_reset_options
    from sandboxgym.conformance.subject import Subject

    try:
        kwargs = parse_arguments(request.config.getoption("sandboxgym_make_kwargs"))
        hooks = parse_hooks(request.config.getoption("--sandboxgym-hook"))
        hooks["reset_options"] = parse_reset_options(request.config.getoption("--sandboxgym-reset-options"))
        return Subject.named(sandboxgym_target, kwargs, **hooks)
    except Exception as error:  # modules of the user's are imported, which may raise anything
        raise pytest.UsageError(f"--sandboxgym-env {sandboxgym_target}: {type(error).__name__}: {error}") from error


@pytest.fixture
def snapshot_result(request: pytest.FixtureRequest, snapshot_subject: Any, snapshot_check: str) -> Any:
    """The result of one check on the subject."""
    from sandboxgym.conformance.check import Budget
    from sandboxgym.conformance.runner import all_checks, pace, run_check, shortened

    config = request.config
    known = config.stash.setdefault(_RESULTS, {}).setdefault(id(snapshot_subject), {})
    seed = config.getoption("--sandboxgym-seed")
    snapshot_subject.reseed(seed)
    budget = Budget.named(config.getoption("--sandboxgym-budget")).paced(pace(snapshot_subject))
    (check,) = all_checks(only=[snapshot_check])
    known[snapshot_check] = result = run_check(check, snapshot_subject, budget, seed, known)
    return shortened(snapshot_subject, result, budget)
