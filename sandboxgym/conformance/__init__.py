"""The conformance suite: checks that certify the snapshot fidelity of any environment.

To come: framework-free checks with stable ids, run by ``python -m sandboxgym.conformance ENV_ID``, by
``pytest conformance/`` and by ``check_snapshot(make_env)`` in a third party's tests. Until then the contract is
tested by this repository's own ``tests/``.
"""
