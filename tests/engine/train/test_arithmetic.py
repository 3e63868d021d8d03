"""The switches under which a run's numbers come out the same each time."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_run import tiny_run

from trainledger.engine.train.device import arithmetic, refuse_workspace
from trainledger.spec.problem import InvalidInput

CPU = torch.device("cpu")


@pytest.mark.parametrize(("fields", "switched"), [({"compile": True}, True), ({"deterministic": True}, False)])
def test_a_cpu_needs_the_switch_for_compiled_kernels_alone(fields: dict[str, bool], switched: bool) -> None:
    with arithmetic(tiny_run(**fields).recipe, CPU, keeps=True):
        assert torch.are_deterministic_algorithms_enabled() == switched
        assert torch.utils.deterministic.fill_uninitialized_memory != switched  # type: ignore[attr-defined]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_an_operation_without_such_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "histc_cuda with floating point input does not have a deterministic implementation, but you set ..."
    rule = r"recipe\.deterministic = true: has no such kernel on cpu here: histc_cuda with floating point input"
    with pytest.raises(InvalidInput, match=rule), arithmetic(tiny_run(compile=True).recipe, CPU, keeps=True):
        raise RuntimeError(said)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="another"), arithmetic(tiny_run(compile=True).recipe, CPU, keeps=True):
        raise RuntimeError("another")


def test_workspaces_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(deterministic=True).recipe
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    refuse_workspace(recipe, "cuda:0")
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":16:8")
    refuse_workspace(recipe, "cuda:0")
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":0:0")
    refuse_workspace(recipe, "cpu")
    with pytest.raises(InvalidInput, match="needs CUBLAS_WORKSPACE_CONFIG=:4096:8, or none, in the environment"):
        refuse_workspace(recipe, "cuda:0")
