from __future__ import annotations

import copy
import pickle

import pytest

import hpccomm as hc

pytestmark = pytest.mark.serial

NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_are_the_operation_itself(name: str) -> None:
    op = getattr(hc.ReduceOp, name)
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.deepcopy(op) is op
    assert repr(op) == f"ReduceOp.{name}"


def test_premul_sum_keeps_its_factor() -> None:
    op = pickle.loads(pickle.dumps(hc.ReduceOp.PREMUL_SUM(0.5)))
    assert repr(op) == "ReduceOp.PREMUL_SUM(0.5)"


@pytest.mark.parametrize("given", ["sum", "SUM", " add ", hc.ReduceOp.SUM])
def test_the_class_takes_every_name(given: object) -> None:
    assert hc.ReduceOp(given) is hc.ReduceOp.SUM
    assert repr(hc.ReduceOp("prod")) == "ReduceOp.PRODUCT"
    with pytest.raises(ValueError, match="no reduction is called 'summ'; the names are sum"):
        hc.ReduceOp("summ")


def test_mpi_operations_get_our_meaning() -> None:
    from mpi4py import MPI

    from hpccomm.core.reduce_op import as_reduce_op

    assert as_reduce_op("test", MPI.SUM) is hc.ReduceOp.SUM
    assert as_reduce_op("test", MPI.BXOR) is hc.ReduceOp.BXOR
    assert as_reduce_op("test", MPI.LAND).mpi_op == MPI.LAND
