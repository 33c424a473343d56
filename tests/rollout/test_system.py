"""The interface of a system."""

from types import SimpleNamespace

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.system import check_members


def test_members_that_a_system_lacks_are_named():
    system = SimpleNamespace(roles={}, start=0, next_effects=0)
    with pytest.raises(UserError, match="SimpleNamespace has no style, advance: a system needs"):
        check_members(system)
