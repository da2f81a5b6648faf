"""Checkpoints: what comes back, on how many ranks, and what happens when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.checkpoint import destination, files, loading

from .arrays import ALL_DTYPES, LAYOUTS, assert_same, dtype_name, values
from .checkpoints import base, contents, first_rank_warns, first_ranks, flip, folder, full_disk, on_first, part
from .hooks import Noted

__all__ = ["base", "folder"]  # fixtures
pytestmark = pytest.mark.usefixtures("process_group", "the_group_goes_on")
several = pytest.mark.mpi(min_size=2)
Group = hc.ProcessGroup


def data_folder(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"step-{step:010}-*")
    return found


# -- what comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*ALL_DTYPES, np.dtype(">f8")], ids=dtype_name)
def test_every_dtype_and_layout_comes_back_bit_for_bit(folder: Path, dtype: Any) -> None:
    rank = hc.get_rank()
    arrays, replicated = {}, {"0-d": np.asarray(values(dtype, (), 0)), "empty": np.zeros((2, 0), dtype)}
    for layout in LAYOUTS:
        for shape in ((3, 4), (1,), (0, 3), (5,)):
            arrays[f"{layout.__name__} {shape}"] = layout(values(dtype, shape, rank))
        replicated[layout.__name__] = layout(values(dtype, (2, 3), 0))
    checkpoint.save(folder, arrays, 1, replicated=replicated)
    found = checkpoint.load(folder)
    assert found.step == 1
    assert found.ranks == hc.get_world_size()
    for expected, actual in ((arrays, found.arrays), (replicated, found.replicated)):
        assert list(actual) == list(expected)
        for name, array in expected.items():
            assert_same(actual[name], array, name)
            assert type(actual[name]) is np.ndarray
            assert actual[name].flags.c_contiguous
            assert actual[name].flags.writeable


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async], ids=["save", "save_async"])
def test_the_global_array_is_the_parts_one_after_the_other_and_any_number_of_ranks_reads_it(
    folder: Path, axis: int, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", 64)  # many blocks, so that parts begin and end within them
    size = hc.get_world_size()
    x = np.random.default_rng(3).integers(0, 1 << 60, (11, 7, 13))
    y = np.arange(5.0)
    for writers in range(1, size + 1):
        group = first_ranks(writers)
        if isinstance(group, Group):
            arrays = {"x": part(x, group.rank, writers, axis).copy(), "y": part(y, group.rank, writers)}
            save(folder, arrays, writers, axis={"x": axis}, replicated={"all": x}, group=group)
            arrays["x"][:] = 0
            checkpoint.finish(group)
        hc.barrier()
        for readers in range(1, size + 1):
            group = first_ranks(readers)
            if isinstance(group, Group):
                found = checkpoint.load(folder, writers, group=group)
                assert found.ranks == writers
                assert_same(found.arrays["x"], part(x, group.rank, readers, axis), writers, readers)
                assert_same(found.arrays["y"], part(y, group.rank, readers), writers, readers)
                assert_same(found.replicated["all"], x)
        hc.barrier()


def test_parts_of_different_lengths_come_back_as_they_were_on_as_many_ranks(folder: Path) -> None:
    rank, size = hc.get_rank(), hc.get_world_size()
    mine = np.full((rank, 2), rank)  # none on rank 0
    checkpoint.save(folder, {"x": mine}, 0)
    assert_same(checkpoint.load(folder).arrays["x"], mine)
    alone = hc.new_group([size - 1])
    if isinstance(alone, Group):
        whole = np.concatenate([np.full((each, 2), each) for each in range(size)])
        assert_same(checkpoint.load(folder, group=alone).arrays["x"], whole)


def test_more_ranks_than_rows(folder: Path) -> None:
    alone = first_ranks(1)
    if isinstance(alone, Group):
        checkpoint.save(folder, {"x": np.array([[1, 2]]), "none": np.ones((0, 3))}, 0, group=alone)
    hc.barrier()
    found = checkpoint.load(folder).arrays
    assert_same(found["x"], np.array([[1, 2]])[: 1 if hc.get_rank() == 0 else 0])
    assert_same(found["none"], np.ones((0, 3)))


def test_each_rank_may_choose_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 64)
    rank, size = hc.get_rank(), hc.get_world_size()
    x = np.arange(600).reshape(100, 6)
    checkpoint.save(folder, {"x": part(x, rank, size), "y": np.array([rank])}, 0)
    for chosen in (slice(None), slice(10 * rank, 10 * rank + 5), slice(-3, None), slice(7, 3), slice(99, 1000)):
        found = checkpoint.load(folder, parts={"x": chosen}).arrays
        assert_same(found["x"], x[chosen], chosen)
        assert_same(found["y"], np.array([rank]))


def test_metadata_may_have_numbers_of_numpy(folder: Path) -> None:
    numbers = [np.float32(0.25), np.float64(0.5), np.float16(2), np.int64(7), np.uint8(3), np.bool_(True), np.str_("a")]
    metadata = {"list": numbers, "dict": {"inside": tuple(numbers)}, "one": numbers[3], np.int64(4): "key"}
    for save in (checkpoint.save, checkpoint.save_async):
        work = save(folder, {}, 0, metadata=metadata, keep=np.int64(1), overwrite=True)
        if work is not None:
            work.wait()
        plain = [0.25, 0.5, 2.0, 7, 3, True, "a"]
        assert checkpoint.load(folder).metadata == {"list": plain, "dict": {"inside": plain}, "one": 7, "4": "key"}
        hc.barrier()


def test_metadata_comes_back_as_json_has_it_from_the_first_rank(folder: Path) -> None:
    metadata = {"rate": 0.1, "tuple": (1, 2), 3: None, "text": "é\n", "rank": hc.get_rank(), "nan": float("nan")}
    checkpoint.save(folder, {}, 0, metadata=metadata)
    found = checkpoint.load(folder).metadata
    assert np.isnan(found.pop("nan"))
    assert found == {"rate": 0.1, "tuple": [1, 2], "3": None, "text": "é\n", "rank": 0}


def test_a_name_is_any_text(folder: Path) -> None:
    names = ["layer/0/weight", "..", "", "é" * 300, "a\nb", "x.npy", "X.npy"]
    checkpoint.save(folder, {name: np.array([i]) for i, name in enumerate(names)}, 0)
    assert {name: int(x[0]) for name, x in checkpoint.load(folder).arrays.items()} == {
        n: i for i, n in enumerate(names)
    }


def test_what_is_not_a_numpy_array_but_can_be_viewed_as_one(folder: Path) -> None:
    checkpoint.save(folder, {"bytes": bytearray(b"abc"), "view": memoryview(np.arange(3.0))}, 0)
    found = checkpoint.load(folder).arrays
    assert_same(found["bytes"], np.frombuffer(b"abc", np.uint8))
    assert_same(found["view"], np.arange(3.0))


def test_ranks_may_have_the_names_in_another_order(folder: Path) -> None:
    names = ["a", "b", "c"] if hc.get_rank() % 2 == 0 else ["c", "a", "b"]
    checkpoint.save(
        folder, {name: np.array([name]) for name in names}, 0, replicated={n * 2: np.array(n) for n in names}
    )
    found = checkpoint.load(folder)
    assert {name: x[0] for name, x in found.arrays.items()} == {"a": "a", "b": "b", "c": "c"}
    assert {name: x[()] for name, x in found.replicated.items()} == {"aa": "a", "bb": "b", "cc": "c"}


def test_numpy_alone_reads_a_file(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.arange(3), "y": np.ones((2, 2), np.float32)}, 0)
    with open(data_folder(folder, 0) / f"rank-{hc.get_rank()}.npy", "rb") as file:
        assert_same(np.load(file, allow_pickle=False), np.arange(3))
        assert_same(np.load(file, allow_pickle=False), np.ones((2, 2), np.float32))


# -- which checkpoints there are ---------------------------------------------------------------------


def test_the_last_ones_are_kept(folder: Path) -> None:
    assert checkpoint.latest(folder) is None
    assert checkpoint.steps(folder) == []
    x = np.ones(3)
    for step in (1, 5, 20, 100):
        checkpoint.save(folder, {"x": x * step}, step)
    hc.barrier()
    assert checkpoint.steps(folder) == [20, 100]
    assert checkpoint.latest(folder) == 100
    for step, expected in ((None, 100), (20, 20), (100, 100)):
        assert_same(checkpoint.load(folder, step).arrays["x"], x * expected)
    checkpoint.save(folder, {"x": x}, 101, keep=None)
    checkpoint.save(folder, {"x": x}, 102, keep=None)
    hc.barrier()
    assert checkpoint.steps(folder) == [20, 100, 101, 102]
    checkpoint.save(folder, {"x": x}, 103, keep=1)
    hc.barrier()
    assert checkpoint.steps(folder) == [103]
    assert len(os.listdir(folder)) == 2


def test_a_step_can_be_saved_again(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.array([1])}, 7)
    checkpoint.save(folder, {"x": np.array([2])}, 7)
    assert_same(checkpoint.load(folder).arrays["x"], np.array([2]))
    hc.barrier()
    assert len(os.listdir(folder)) == 2


def test_going_back_has_to_be_said(folder: Path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(folder, {"x": np.array([step])}, step, keep=None)
    with pytest.raises(
        ValueError,
        match=r"step is 15, but .* has step 30 already, saved by process \d+ on .*; use another folder, or overwrite",
    ):
        checkpoint.save(folder, {"x": np.array([15])}, 15)
    assert checkpoint.steps(folder) == [10, 20, 30]
    checkpoint.save(folder, {"x": np.array([15])}, 15, overwrite=True)
    hc.barrier()
    assert checkpoint.steps(folder) == [10, 15]
    assert_same(checkpoint.load(folder).arrays["x"], np.array([15]))


def test_files_of_others_and_litter(folder: Path) -> None:
    def leave() -> None:
        folder.mkdir(parents=True)
        for name in ("step-0000000001-0123abcd", "step-1-notours", "mine"):
            (folder / name).mkdir()
            (folder / name / "rank-0.npy.tmp").write_text("half")
        for name in ("step-0000000003.json.0123abcd.tmp", *others):
            (folder / name).write_text("half")

    # not the names of steps as they are written here: with few digits, with too many, with Arabic ones
    others = "notes.txt", "other.tmp", "step-7.json", "step-00000000012.json", "step-000000000\u0663.json"

    on_first(leave)
    with pytest.raises(checkpoint.NoCheckpointError):
        checkpoint.load(folder)
    checkpoint.save(folder, {"x": np.ones(1)}, 2)
    hc.barrier()
    data = data_folder(folder, 2).name
    assert set(os.listdir(folder)) == {"step-0000000002.json", data, "step-1-notours", "mine", *others}
    assert checkpoint.steps(folder) == [2]


# -- what is refused, on every rank alike ------------------------------------------------------------


REFUSED = [
    (lambda: {"step": -1}, ValueError, "step is -1; expected 0 or more"),
    (lambda: {"folder": {"x": np.ones(1)}, "arrays": "ck"}, TypeError, "folder is a dict; expected a path"),
    (lambda: {"step": 1.5}, TypeError, "step is 1.5; expected an integer"),
    (lambda: {"keep": 0}, ValueError, "keep is 0; expected 1 or more, or None for all"),
    (lambda: {"arrays": {"x": [1, 2]}}, TypeError, r"arrays\['x'\] is a list; expected a NumPy or CuPy array"),
    (lambda: {"arrays": np.ones(2)}, TypeError, r"arrays is a ndarray; expected a dict, such as {'x': x}"),
    (lambda: {"replicated": np.ones(2)}, TypeError, "replicated is a ndarray; expected a dict"),
    (lambda: {"metadata": 1.5}, TypeError, "metadata is a float; expected a dict"),
    (lambda: {"arrays": {1: np.ones(1)}}, TypeError, "a name in arrays is 1; expected a str"),
    (lambda: {"arrays": {"x": np.array(1)}}, ValueError, r"arrays\['x'\] is 0-d, .*; pass it in replicated"),
    (lambda: {"arrays": {"x": np.array([None])}}, TypeError, r"arrays\['x'\] has dtype object; Python objects are not"),
    (lambda: {"replicated": {"x": np.ma.masked_array([1])}}, TypeError, r"replicated\['x'\] is a masked array"),
    (lambda: {"replicated": {"w": np.ones(1)}}, ValueError, "'w' is both in arrays and in replicated"),
    (lambda: {"axis": 1}, ValueError, r"axis is 1, but arrays\['w'\] has 1 dimension"),
    (lambda: {"axis": {"v": 0}}, ValueError, "axis has 'v', which is not in arrays"),
    (lambda: {"axis": "x"}, TypeError, "axis is 'x'; expected an integer"),
    (lambda: {"metadata": {"x": {1}}}, TypeError, r"metadata\['x'\] is a set, which JSON can't hold; expected text"),
    (lambda: {"metadata": {1: "x", "1": "y"}}, TypeError, r"metadata has two keys that are the same text in JSON"),
    (lambda: {"metadata": {"x": [{"y": np.ones(2)}]}}, TypeError, r"metadata\['x'\]\[0\]\['y'\] is a ndarray"),
    (lambda: {"metadata": {"x": np.complex64(1)}}, TypeError, r"metadata\['x'\] is a complex"),
    (
        lambda: {"metadata": {"x": {(1, 2): 3}}},
        TypeError,
        r"metadata\['x'\] has the key \(1, 2\); expected text or a n",
    ),
    (
        lambda: {"arrays": {"x": np.zeros(2, [("b", ml_dtypes.bfloat16)])}},
        TypeError,
        r"arrays\['x'\] has dtype .*which \.npy files can't hold",
    ),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_arguments_that_make_no_sense(folder: Path, given: Any, kind: Any, message: str) -> None:
    options = {"folder": folder, "arrays": {"w": np.ones(2)}, "step": 0, **given()}
    with pytest.raises(kind, match=f"^checkpoint.save: {message}"):
        checkpoint.save(options.pop("folder"), options.pop("arrays"), options.pop("step"), **options)
    assert not folder.exists()


@several
@pytest.mark.parametrize(
    ("on_last", "message"),
    [
        ({"step": 2}, "step is 2 on rank 1, and 1 on rank 0"),
        ({"keep": 3}, "keep is 3 on rank 1, and 2 on rank 0"),
        ({"overwrite": True}, "overwrite is True on rank 1, and False on rank 0"),
        ({"arrays": {"v": np.ones((2, 3))}}, "the list of names in arrays is ['v'] on rank 1, and ['w'] on rank 0"),
        (
            {"arrays": {"w": np.ones((2, 4))}},
            "the shape of arrays['w'] is (any length, 4) on rank 1, and (any length, 3)",
        ),
        ({"arrays": {"w": np.ones((2, 3), "i4")}}, "the dtype of arrays['w'] is <i4 on rank 1, and <f8 on rank 0"),
        ({"axis": 1}, "the axis of arrays['w'] is 1 on rank 1, and 0 on rank 0"),
        ({"replicated": {}}, "the list of names in replicated is [] on rank 1, and ['r'] on rank 0"),
        ({"replicated": {"r": np.ones(3)}}, "the shape of replicated['r'] is (3) on rank 1, and (2) on rank 0"),
        ({"step": -1}, "step is -1; expected 0 or more (on rank 1)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_ranks_that_differ_are_told_on_every_rank(folder: Path, on_last: dict[str, Any], message: str) -> None:
    pair = first_ranks(2)
    if isinstance(pair, Group):
        options: dict[str, Any] = {"arrays": {"w": np.ones((2, 3))}, "step": 1, "replicated": {"r": np.ones(2)}}
        options |= on_last if pair.rank == 1 else {}
        with pytest.raises(ValueError) as caught:
            checkpoint.save(folder, options.pop("arrays"), options.pop("step"), **options, group=pair)
        assert f"checkpoint.save: {message}" in str(caught.value)
    assert not folder.exists()


@several
def test_bytes_that_belong_to_no_value_may_differ(folder: Path) -> None:
    struct = np.dtype([("kind", "i1"), ("value", "f8")], align=True)
    given: dict[str, Any] = {"struct": np.ones(2, struct)}
    gaps = {"struct": slice(1, 8)}
    if np.finfo(np.longdouble).nmant == 63:  # the 10 bytes of the x87, in 12 or 16
        given |= {"long": np.ones((3, 2), np.longdouble), "complex": np.ones(2, np.clongdouble)}
        gaps |= {name: slice(10, np.dtype(np.longdouble).itemsize) for name in ("long", "complex")}
    for name, gap in gaps.items():
        period = struct.itemsize if name == "struct" else np.dtype(np.longdouble).itemsize
        before = given[name].copy()
        given[name].reshape(-1).view(np.uint8).reshape(-1, period)[:, gap] = hc.get_rank()
        assert (given[name] == before).all()
    checkpoint.save(folder, {"x": np.ones(1)}, 1, replicated=given)
    found = checkpoint.load(folder).replicated
    for name, array in given.items():
        assert (found[name] == array).all()


@several
def test_replicated_arrays_that_differ_are_refused_and_nothing_is_left(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.ones(2)}, 1)
    hc.barrier()
    before = contents(folder)
    last = hc.get_world_size() - 1
    same, other = np.zeros(1000), np.zeros(1000)
    other[999] = hc.get_rank() == last
    for arrays in ({}, {"x": np.ones(2)}):
        with pytest.raises(ValueError, match=rf"replicated\['other'\] is not the same on rank {last} as on rank 0"):
            checkpoint.save(folder, arrays, 2, replicated={"same": same, "other": other})
    hc.barrier()
    assert contents(folder) == before
    assert len(os.listdir(folder)) == 2


def test_a_rank_outside_the_group(folder: Path) -> None:
    outside = hc.NonMember()
    with pytest.warns(hc.NonMemberWarning, match=r"checkpoint\.save: this rank is not in .* nothing is done"):
        checkpoint.save(folder, {"x": np.ones(1)}, 0, group=outside)
    with pytest.raises(ValueError, match=r"checkpoint\.load: this process is not a member"):
        checkpoint.load(folder, group=outside)
    assert not folder.exists()


def test_a_destroyed_group_is_refused(folder: Path) -> None:
    group = hc.new_group()
    hc.destroy_process_group(group)
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(hc.DistError, match="destroyed"):
            save(folder, {"x": np.ones(1)}, 0, group=group)
    with pytest.raises(hc.DistError, match="destroyed"):
        checkpoint.load(folder, group=group)
    assert not folder.exists()


def test_parts_that_make_no_sense(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.ones(2)}, 0, replicated={"r": np.ones(1)})
    bad: list[tuple[Any, Any, str]] = [
        ({"r": slice(1)}, ValueError, r"parts has 'r'; the sharded arrays are \['x'\]"),
        ({"x": 3}, TypeError, r"parts\['x'\] is 3; expected a slice"),
        ({"x": slice(0, 2, 2)}, ValueError, r"parts\['x'\] is slice\(0, 2, 2\); expected a slice without a step"),
    ]
    for parts, kind, message in bad:
        with pytest.raises(kind, match=f"checkpoint.load: {message}"):  # on one rank, and so on all
            checkpoint.load(folder, parts=parts if hc.get_rank() == hc.get_world_size() - 1 else None)


@several
def test_ranks_that_load_differently_are_told(folder: Path) -> None:
    two_steps(folder)
    last = hc.get_rank() == hc.get_world_size() - 1
    for options in ({"step": 1 if last else None}, {"fall_back": last}):
        with pytest.raises(ValueError, match=r"checkpoint\.load: ranks ask for different things"):
            checkpoint.load(folder, **options)
    with pytest.raises(TypeError, match=r"checkpoint\.load: step is '1'; expected an integer"):
        checkpoint.load(folder, "1" if last else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "kind"), [(MemoryError, MemoryError), (ZeroDivisionError, RuntimeError)])
def test_what_is_not_damage_is_not_fallen_back_from(
    folder: Path, error: type[Exception], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("too little")

    two_steps(folder)
    if hc.get_rank() == 0:
        monkeypatch.setattr(files, "read_bytes", fail)
    with pytest.raises(kind, match=rf"checkpoint\.load: {error.__name__}: too little") as caught:
        checkpoint.load(folder, fall_back=True)
    assert not isinstance(caught.value, checkpoint.CheckpointError)


# -- damage ------------------------------------------------------------------------------------------


def two_steps(folder: Path) -> Any:
    """Save steps 1 and 2, and return the array of step 1 on this rank."""
    x = np.arange(100.0) + hc.get_rank()
    for step in (1, 2):
        checkpoint.save(folder, {"x": x * step}, step, metadata={"step": step})
    return x


MANIFEST = "step-0000000002.json"
WRONG_CHECKSUM = "{} is damaged: a checksum is wrong"
WRONG_MANIFEST = "the manifest {} is damaged: its checksum is wrong"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "last byte": ("rank-{last}.npy", flip, WRONG_CHECKSUM),
    "first byte of data": ("rank-0.npy", lambda path: flip(path, 128), WRONG_CHECKSUM),
    "truncated": ("rank-0.npy", lambda path: os.truncate(path, 500), "{} is damaged: it ends after 500 bytes, too e"),
    "removed": ("rank-{last}.npy", Path.unlink, "{} is missing, or the folder is not on a file system that all ranks"),
    "manifest": (MANIFEST, lambda path: flip(path, path.read_bytes().index(b'"step": 2') + 8), WRONG_MANIFEST),
    "manifest cut": (MANIFEST, lambda path: os.truncate(path, 30), WRONG_MANIFEST),
    "manifest empty": (MANIFEST, lambda path: os.truncate(path, 0), WRONG_MANIFEST),
}


def damage(folder: Path, how: str) -> str:
    """Damage step 2; return the pattern of what is said of it."""
    name, act, said = DAMAGES[how]
    path = folder / name if name == MANIFEST else data_folder(folder, 2) / name.format(last=hc.get_world_size() - 1)
    on_first(lambda: act(path))
    return said.format(path)


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_an_error_on_every_rank_that_says_what_to_do(folder: Path, how: str) -> None:
    x = two_steps(folder)
    message = damage(folder, how)
    with pytest.raises(checkpoint.CheckpointError, match=message) as caught:
        checkpoint.load(folder)
    assert f"to load the step before it: checkpoint.load({str(folder)!r}, step=1), or fall_back" in str(caught.value)
    assert_same(checkpoint.load(folder, step=1).arrays["x"], x)
    with first_rank_warns("loaded step 1 instead") as said:
        found = checkpoint.load(folder, fall_back=True)
    assert found.step == 1
    assert found.metadata == {"step": 1}
    assert_same(found.arrays["x"], x)
    assert {each.filename for each in said} <= {__file__}
    # the damaged step is not one to go on from: saving it again mends it
    checkpoint.save(folder, {"x": x * 3}, 2)
    assert_same(checkpoint.load(folder).arrays["x"], x * 3)
    hc.barrier()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("how", ["last byte", "manifest"])
def test_a_step_that_a_load_has_skipped_does_not_count(folder: Path, how: str) -> None:
    x = two_steps(folder)
    damage(folder, how)
    with pytest.raises(ValueError, match="has step 2 already"):
        checkpoint.save(folder, {"x": x}, 1)
    with first_rank_warns("loaded step 1 instead"):
        checkpoint.load(folder, fall_back=True)
    checkpoint.save(folder, {"x": x * 5}, 1)  # where the program is again
    hc.barrier()
    assert checkpoint.steps(folder) == [1]
    assert len(os.listdir(folder)) == 2
    assert_same(checkpoint.load(folder).arrays["x"], x * 5)


def test_a_step_that_a_load_has_skipped_is_none_of_those_to_keep(folder: Path) -> None:
    two_steps(folder)
    damage(folder, "last byte")
    with first_rank_warns("loaded step 1 instead"):
        checkpoint.load(folder, fall_back=True)
    checkpoint.save(folder, {"x": np.ones(3)}, 3, keep=2)
    hc.barrier()
    assert checkpoint.steps(folder) == [1, 3]


def test_a_step_that_was_skipped_counts_when_it_has_been_saved_again(folder: Path) -> None:
    two_steps(folder)
    damage(folder, "last byte")
    with first_rank_warns("loaded step 1 instead"):
        checkpoint.load(folder, fall_back=True)
    checkpoint.save(folder, {"x": np.ones(3)}, 2)
    with pytest.raises(ValueError, match="has step 2 already"):
        checkpoint.save(folder, {"x": np.ones(3)}, 1)


def test_bfloat16_in_the_other_byte_order(folder: Path) -> None:
    numbers = np.array([1, 2, 3], ml_dtypes.bfloat16)
    swapped = numbers.byteswap().view(numbers.dtype.newbyteorder())
    checkpoint.save(folder, {"x": swapped}, 1)
    assert_same(checkpoint.load(folder).arrays["x"], numbers)


@pytest.mark.parametrize(("failures", "why"), [(3, errno.EIO), (99, errno.EIO), (99, errno.EMFILE)])
def test_a_file_that_can_not_be_read(folder: Path, failures: int, why: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, wrapped, tried = two_steps(folder), files.open_unbuffered, []

    def fail(path: Path) -> Any:
        if "step-0000000002" in str(path) and len(tried) < failures:
            tried.append(path)
            raise OSError(why, os.strerror(why), str(path))
        return wrapped(path)

    monkeypatch.setattr(files, "PAUSES", (0, 0, 0))
    if hc.get_rank() == hc.get_world_size() - 1:
        monkeypatch.setattr(files, "open_unbuffered", fail)
    with first_rank_warns("loaded step 1 instead", times=int(failures != 3)):
        found = checkpoint.load(folder, fall_back=True)
    assert_same(found.arrays["x"], x * found.step)
    assert found.step == (2 if failures == 3 else 1)
    monkeypatch.undo()
    is_removed = failures == 99 and why == errno.EIO  # by the next save; others are not damaged
    with nullcontext() if is_removed else pytest.raises(ValueError, match="has step 2 already"):
        checkpoint.save(folder, {"x": x}, 1)
    hc.barrier()
    assert checkpoint.steps(folder) == ([1] if is_removed else [1, 2])


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another file": lambda body: body["arrays"]["x"]["shards"][0].update(file="../../secret"),
    "another folder": lambda body: body.update(folder="/etc"),
    "a folder of another step": lambda body: body.update(folder="step-0000000002-00000000"),
    "objects": lambda body: body["arrays"]["x"].update(dtype="|O"),
    "objects in a field": lambda body: body["arrays"]["x"].update(dtype="[('a', '|O')]"),
    "no dtype": lambda body: body["arrays"]["x"].update(dtype="finfo"),
    "no list": lambda body: body["arrays"]["x"].update(dtype="[" * 10_000),
    "too many rows": lambda body: (
        body["arrays"]["x"].update(shape=[10**15]),
        body["arrays"]["x"]["shards"][0].update(length=10**15),
    ),
    "fewer than none": lambda body: body["arrays"]["x"]["shards"][0].update(length=-5),
    "no such axis": lambda body: body["arrays"]["x"].update(axis=1),
    "no shards": lambda body: body["arrays"]["x"].pop("shards"),
    "no bytes in a block": lambda body: body.update(block=0),
    "half a rank": lambda body: body.update(ranks=0.5),
    "a list": lambda body: body.update(arrays=[]),
    "another step": lambda body: body.update(step=2),
}


@pytest.mark.serial
@pytest.mark.parametrize("forge", FORGED)
def test_a_manifest_that_makes_no_sense_is_damage(folder: Path, forge: str) -> None:
    checkpoint.save(folder, {"x": np.ones(3)}, 1)

    def act() -> None:
        body = files.read_manifest(folder, 1)
        FORGED[forge](body)
        files.manifest_path(folder, 1).write_bytes(files.sealed(body))

    on_first(act)
    with pytest.raises(checkpoint.CheckpointError, match=r"the manifest .*step-0000000001\.json is damaged: "):
        checkpoint.load(folder)


@pytest.mark.serial
def test_every_byte_of_the_arrays_counts(folder: Path) -> None:
    x = np.arange(5.0)
    checkpoint.save(folder, {"x": x}, 1)
    path = data_folder(folder, 1) / "rank-0.npy"
    for position in range(path.stat().st_size):
        flip(path, position)
        if position < path.stat().st_size - x.nbytes:
            assert_same(checkpoint.load(folder).arrays["x"], x)  # NumPy's header is not what is read
        else:
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.load(folder)
        flip(path, position)


@pytest.mark.serial
def test_every_byte_of_the_manifest_counts(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.arange(5.0)}, 1)
    path = folder / "step-0000000001.json"
    for position in range(path.stat().st_size - 1):  # the last one is the end of the line
        flip(path, position)
        with pytest.raises(checkpoint.CheckpointError, match=r"the manifest .* is damaged"):
            checkpoint.load(folder)
        flip(path, position)
    assert checkpoint.load(folder).step == 1


def test_nothing_is_left_to_fall_back_to(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.arange(5.0)}, 1)
    path = data_folder(folder, 1) / "rank-0.npy"
    on_first(lambda: flip(path, -1))
    for fall_back in (False, True):
        with pytest.raises(checkpoint.CheckpointError, match="there is no step before it"):
            checkpoint.load(folder, fall_back=fall_back)


def test_there_is_no_checkpoint(folder: Path) -> None:
    for step, message in (
        (None, "there is no checkpoint in"),
        (4, "there is no checkpoint of step 4 in .*; it has none"),
    ):
        with pytest.raises(checkpoint.NoCheckpointError, match=f"checkpoint.load: {message}"):
            checkpoint.load(folder, step)
    two_steps(folder)
    with pytest.raises(checkpoint.NoCheckpointError, match=r"there is no checkpoint of step 4 in .*; it has 1, 2"):
        checkpoint.load(folder, 4)


def test_a_manifest_of_a_later_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FORMAT", "hpccomm checkpoint 99")
    checkpoint.save(folder, {}, 0)
    monkeypatch.undo()
    with pytest.raises(checkpoint.CheckpointError, match="has the format 'hpccomm checkpoint 99'; this version reads"):
        checkpoint.load(folder)


def test_the_manifest_is_json(folder: Path) -> None:
    checkpoint.save(folder, {"x": np.ones((2, 3))}, 0)
    body = json.loads((folder / "step-0000000000.json").read_text())
    assert body["arrays"]["x"]["shape"] == [2 * hc.get_world_size(), 3]


# -- errors of the file system, on one rank ----------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3], ids=["again", "next"])
@pytest.mark.parametrize("failing", ["mkdir", "fsync", "replace", "open"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_error_on_one_rank_is_one_on_all_and_changes_nothing(
    folder: Path, step: int, failing: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(folder)
    hc.barrier()
    before = contents(folder)
    culprit = 0 if where == "first" else hc.get_world_size() - 1
    if failing == "mkdir":  # whichever rank makes the folder
        monkeypatch.setattr(files.os, "mkdir", full_disk)
    elif hc.get_rank() == culprit:
        monkeypatch.setattr(files.os, failing, full_disk)
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError, match="No space left on device: '/the/file'"):
            checkpoint.save(folder, {"x": np.ones(3)}, step)
    monkeypatch.undo()
    hc.barrier()
    assert contents(folder) == before
    assert len(os.listdir(folder)) == 4
    hc.barrier()
    checkpoint.save(folder, {"x": np.ones(3)}, step)
    assert_same(checkpoint.load(folder).arrays["x"], np.ones(3))


@pytest.mark.parametrize("step", [2, 3], ids=["again", "next"])
@pytest.mark.parametrize("failing", ["fsync", "replace", "open"])
def test_an_error_in_the_manifest_changes_nothing(
    folder: Path, step: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(folder)
    hc.barrier()
    before = contents(folder)
    wrapped = files.write_durably

    def break_manifest(path: Path, *more: Any) -> int:
        if path.suffix == ".json":
            monkeypatch.setattr(files.os, failing, full_disk)
        return wrapped(path, *more)

    monkeypatch.setattr(files, "write_durably", break_manifest)
    with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
        checkpoint.save(folder, {"x": np.ones(3)}, step)
    monkeypatch.undo()
    hc.barrier()
    if failing == "open":  # the folder could not be brought to the disk: the checkpoint is there, whole
        assert_same(checkpoint.load(folder).arrays["x"], np.ones(3))
    else:
        assert contents(folder) == before


@pytest.mark.parametrize("step", [2, 3], ids=["again", "next"])
@pytest.mark.parametrize("failing", ["the rename", "the folder"])
def test_arrays_that_may_be_published_stay(
    folder: Path, step: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    def replace(old: Any, new: Any) -> None:
        os.rename(old, new)
        if str(new).endswith(".json"):
            monkeypatch.setattr(files, "read_manifest", away)
            monkeypatch.setattr(files, "fsync_folder", away)
            if failing == "the rename":  # the server has done it, and its answer is lost
                away()

    two_steps(folder)
    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(checkpoint.CheckpointError, match="Stale file handle"):
        checkpoint.save(folder, {"x": np.full(3, 7.0)}, step, keep=1)
    monkeypatch.undo()
    hc.barrier()
    assert_same(checkpoint.load(folder).arrays["x"], np.full(3, 7.0))
    hc.barrier()
    checkpoint.save(folder, {"x": np.ones(3)}, 4, keep=1)
    hc.barrier()
    assert len(os.listdir(folder)) == 2


def test_a_file_is_never_written_through_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = folder.with_name("victim")

    def lay_a_trap() -> None:
        folder.mkdir(parents=True)
        victim.write_text("mine")
        for name in ("step-0000000001.json.00000000.tmp", ".saving"):
            (folder / name).symlink_to(victim)

    on_first(lay_a_trap)
    monkeypatch.setattr(files.os, "urandom", bytes)  # a stranger can't know the name, but may be lucky
    with pytest.raises(checkpoint.CheckpointError, match="File exists"):
        checkpoint.save(folder, {"x": np.ones(3)}, 1)
    monkeypatch.undo()
    checkpoint.save(folder, {"x": np.ones(3)}, 1)
    assert victim.read_text() == "mine"
    assert_same(checkpoint.load(folder).arrays["x"], np.ones(3))


def test_folders_that_need_or_allow_no_fsync(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, open_it = os.fsync, os.open

    def of_files_alone(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(number)

    def may_not_list(path: Any, flags: int, *more: Any) -> int:
        if Path(path) == folder.parent and flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_it(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", of_files_alone)
        checkpoint.save(folder, {"x": np.ones(3)}, 1)
    on_first(lambda: shutil.rmtree(folder))
    monkeypatch.setattr(files.os, "open", may_not_list)
    with first_rank_warns("can't be brought to the disk"):
        checkpoint.save(folder, {"x": np.ones(3)}, 1)
        checkpoint.save(folder, {"x": np.ones(3)}, 2)


@several
def test_a_file_that_others_cannot_see(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = hc.get_world_size() - 1
    mine = folder if hc.get_rank() < last else folder.with_name("local")  # what a folder in /tmp is on another node
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"rank 0 can't see .*rank-{last}\.npy, which rank {last} has written"
    ):
        checkpoint.save(mine, {"x": np.ones(3)}, 1)
    hc.barrier()
    assert contents(folder.parent) == {}
    checkpoint.save(folder, {"x": np.ones(3)}, 1)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"is missing, or .* not on a file system that all ranks share"
    ):
        checkpoint.load(mine)


def test_what_cannot_be_removed_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(folder)
    monkeypatch.setattr(destination.shutil, "rmtree", full_disk)
    with first_rank_warns("older files"):
        checkpoint.save(folder, {"x": np.ones(3)}, 3)
    monkeypatch.undo()
    hc.barrier()
    checkpoint.save(folder, {"x": np.ones(3)}, 4)
    hc.barrier()
    assert len(os.listdir(folder)) == 4


def test_one_thing_that_cannot_be_removed_keeps_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(folder)
    stuck, rmtree = data_folder(folder, 1), destination.shutil.rmtree

    def fail(path: Any, *more: Any, **options: Any) -> None:
        if path == stuck and not options:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        if path != stuck:
            rmtree(path, *more, **options)

    monkeypatch.setattr(destination.shutil, "rmtree", fail)
    with first_rank_warns(rf"can't be removed: \[Errno 16\] Device or resource busy: '{stuck}'", times=5):
        for step in range(3, 8):
            checkpoint.save(folder, {"x": np.ones(3)}, step)
    hc.barrier()
    assert len(os.listdir(folder)) == 5


# -- a reader while another job writes ---------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(folder)
    wrapped = loading.Loading._read
    chosen: list[int] = []

    def read(self: Any, step: int) -> Any:
        chosen.append(step)
        if len(chosen) < 3:  # the writer is quicker
            checkpoint.save(folder, {"x": np.full(2, step + 1)}, step + 1, keep=1)
            hc.barrier()
        return wrapped(self, step)

    monkeypatch.setattr(loading.Loading, "_read", read)
    found = checkpoint.load(folder)
    assert chosen == [2, 3, 4]
    assert found.step == 4
    assert_same(found.arrays["x"], np.full(2, 4))


def test_a_step_that_is_saved_again_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(folder)
    wrapped = loading.read_part
    reads: list[Path] = []

    def read_part(path_of: Callable[[str], Path], *arguments: Any) -> Any:
        reads.append(path_of("rank-0.npy"))
        if len(reads) == 1:  # its manifest has been read, its arrays have not
            checkpoint.save(folder, {"x": np.full(2, 7)}, 2)
            hc.barrier()
        return wrapped(path_of, *arguments)

    monkeypatch.setattr(loading, "read_part", read_part)
    assert_same(checkpoint.load(folder).arrays["x"], np.full(2, 7))
    assert len(set(reads)) == 2


def test_hooks_see_what_is_collective(folder: Path) -> None:
    group, noted = hc.new_group(), Noted()
    with group.register_hook(noted):
        checkpoint.save(folder, {"x": np.ones(1)}, 1, group=group)
        checkpoint.load(folder, group=group)
    assert noted.names == ["all_gather_object"] * 9
    assert [each.error for each in noted.ended] == [None] * 9
