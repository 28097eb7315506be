"""The one error tree: what is drawn is what exists, and errors survive a process boundary."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest

from models import errors
from models.errors import ApplianceError, ModelError, Overloaded, Unavailable, error_from_name

pytestmark = pytest.mark.unit

CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "error_from_name"]


def drawn() -> dict[str, str]:
    """Class -> parent, read off the drawing in the docstring."""
    parents: dict[str, str] = {}
    branch: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*(?:[├└]── )?)([A-Z]\w+)", line)
        if not found:
            continue
        depth, name = len(found[1]), found[2]
        branch = [(at, above) for at, above in branch if at < depth]
        parents[name] = branch[-1][1] if branch else ""
        branch.append((depth, name))
    return parents


def test_the_tree_that_is_drawn_is_the_tree_that_exists() -> None:
    real = {kind.__name__: kind.__mro__[1].__name__ for kind in CLASSES if kind is not ApplianceError}
    assert drawn() == {"ApplianceError": "", **real}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_that_crossed_a_process_boundary_is_the_same_error(kind: type[ApplianceError]) -> None:
    back = error_from_name(kind.__name__, "what happened")
    assert type(back) is kind
    assert str(back) == "what happened"


@pytest.mark.parametrize("name", ["KeyError", "", "Exception", "object"])
def test_a_fault_we_do_not_know_is_the_models_fault(name: str) -> None:
    assert type(error_from_name(name, "what happened")) is ModelError


def test_only_the_appliances_own_state_asks_for_a_retry() -> None:
    assert Overloaded("full").retry_after_s > 0
    asking = [kind for kind in CLASSES if hasattr(kind("what happened"), "retry_after_s")]
    assert asking == [kind for kind in CLASSES if issubclass(kind, Unavailable)]


def test_errors_can_be_pickled() -> None:
    assert str(pickle.loads(pickle.dumps(Overloaded("full")))) == "full"  # noqa: S301 - our own bytes


def test_the_tree_is_the_lowest_file_of_all() -> None:
    probe = "import sys, models.errors; print([m for m in sys.modules if m.startswith('models.') or m == 'numpy'])"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['models.errors']"
