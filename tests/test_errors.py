"""Errors say what is wrong, where, and what to do; and they survive the way from one process to another."""

from __future__ import annotations

import pickle

import pytest

from nemo_optim_bridge.errors import (
    BridgeError,
    CheckpointError,
    ColdOptimizerError,
    ContradictionError,
    CorruptFileError,
    unreadable,
)


def kinds(base: type[BridgeError]) -> list[type[BridgeError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize("kind", kinds(CheckpointError)[1:])
def test_every_error_about_a_file_says_what_to_do(kind: type[BridgeError]) -> None:
    if kind is ColdOptimizerError:
        return  # raised in one place, with a hint of its own
    error = kind("is damaged", path="optimizer/file.pt")
    assert error.hint
    assert str(error).startswith("is damaged [file optimizer/file.pt]. ")
    assert kind("is damaged", path="file", hint="try again").hint == "try again"
    assert kind("is damaged").hint is None


def test_an_error_gets_the_file_that_its_finder_did_not_know() -> None:
    error = ContradictionError("steps disagree", key="a|step")
    assert str(error.at("common.pt")) == (
        "steps disagree [file common.pt, tensor a|step]. " + str(ContradictionError.usual_hint).capitalize()
    )
    known = CorruptFileError("is damaged", path="one")
    assert known.at("two") is known


def test_what_the_system_refuses() -> None:
    error = unreadable("file", PermissionError(13, "Permission denied"))
    assert str(error).startswith("cannot be read: Permission denied [file file]. See that this user may read it")


def test_errors_travel_whole() -> None:
    error = CorruptFileError("is damaged", path="file", key="a|b", rank=3)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again), vars(again)) == (CorruptFileError, str(error), vars(error))
