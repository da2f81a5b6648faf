"""Slurm's short form of host lists."""

from __future__ import annotations

import pytest

from hpccomm.process.host_list import MOST, expand, fold, repeated

pytestmark = pytest.mark.serial


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("node[1,10,3]", ["node1", "node10", "node3"]),  # the order is Slurm's, not ours
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("n[1-2]-ib,login", ["n1-ib", "n2-ib", "login"]),
        ("[1-2]", ["1", "2"]),
        ("tux-a-1.example.org", ["tux-a-1.example.org"]),
        ("", []),
    ],
)
def test_what_a_list_stands_for(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    "text", ["node[1-3", "node1-3]", "node[3-1]", "node[a-b]", "node[]", "node[1,]", "node[1-]", "n[1[2]]", "n[-1]"]
)
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no list of hosts|without its other half"):
        expand(text)


def test_a_list_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=f"more than {MOST} hosts"):
        expand("node[0-99999999999]")


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["node1"], "node1"),
        (["node1", "node2", "node3"], "node[1-3]"),
        (["node08", "node09", "node10", "node12"], "node[08-10,12]"),
        (["node8", "node9", "node10"], "node[8-10]"),
        (["node9", "node010"], "node[9,010]"),
        (["n099", "n100", "n0101"], "n[099-100,0101]"),
        (["a1", "b1", "a2"], "a1,b1,a2"),
        (["login", "node2", "node1"], "login,node[2,1]"),
        (["vm", "vm"], "vm,vm"),
        (["n", "n1", "n2"], "n,n[1-2]"),
        ([], ""),
    ],
)
def test_hosts_are_folded_and_come_back(hosts: list[str], text: str) -> None:
    assert fold(hosts) == text
    assert list(expand(text)) == hosts


def test_counts_along_the_list() -> None:
    assert repeated("2(x3),1") == (2, 2, 2, 1)
    assert repeated("4") == (4,)
    for text in ("", "2(x)", "2x3", "2(x3", "1(x99999999999)"):
        with pytest.raises(ValueError, match="not of the form"):
            repeated(text)
