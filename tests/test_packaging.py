"""What the package index is told, and what the pages tell to type."""

from __future__ import annotations

import configparser
import json
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .launch import ROOT, clean_environment

pytestmark = pytest.mark.once

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def told_by_setup(monkeypatch: pytest.MonkeyPatch, cythonize: Any) -> dict[str, Any]:
    """Return what setup.py tells setuptools with that Cython; None: there is none."""
    setuptools = pytest.importorskip("setuptools")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    for name in ("Cython", "Cython.Build"):
        monkeypatch.setitem(sys.modules, name, cythonize and SimpleNamespace(cythonize=cythonize))  # type: ignore[arg-type]
    runpy.run_path(str(ROOT / "setup.py"))
    return told


def test_without_cython_or_with_an_old_one_nothing_is_compiled_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def old(extensions: Any, **options: Any) -> Any:
        raise ValueError("no such syntax")

    assert told_by_setup(monkeypatch, None)["ext_modules"] == []
    assert told_by_setup(monkeypatch, old)["ext_modules"] == []
    assert capsys.readouterr().err.endswith("hpccomm: no compiled extension: no such syntax\n")


def test_what_type_checkers_read_is_in_a_wheel() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packed = config["options.package_data"]
    stubs = {file.parent.relative_to(ROOT) for file in (ROOT / "hpccomm").rglob("*.pyi")}
    assert len(stubs) >= 2
    assert not [folder for folder in stubs if "*.pyi" not in packed.get(".".join(folder.parts), "")]


def test_without_a_compiler_nothing_is_compiled_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_cython(extensions: Any, **options: Any) -> Any:  # it makes its own Extensions, and does not copy `optional`
        return [type(each)(each.name, each.sources) for each in extensions]

    extensions = told_by_setup(monkeypatch, as_cython)["ext_modules"]
    assert [each.name.removeprefix("hpccomm.native.") for each in extensions] == [
        "_fastpath",
        "_pieces",
        "_sums",
        "_gil_held",
    ]
    assert all(each.optional for each in extensions)


@pytest.fixture
def copied_native(tmp_path: Path) -> Path:
    """Return a folder with a hpccomm that has nothing but an uncompiled hpccomm.native."""
    package = tmp_path / "hpccomm"
    (package / "native").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "hpccomm" / "native" / "__init__.py", package / "native")
    return tmp_path


def reason(folder: Path) -> str:
    """Return why the hpccomm in a folder has no compiled extension."""
    environment = {**clean_environment(), "PYTHONPATH": str(folder), "HPCCOMM_NATIVE": "1"}
    program = "from hpccomm.native import fastpath, reason; assert fastpath is None; print(reason)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def test_the_reason_for_no_compiled_extension_says_what_to_type_where_hpccomm_is(copied_native: Path) -> None:
    installed = "pip install --force-reinstall --no-deps --no-cache-dir hpccomm (or what it was installed from)"
    assert reason(copied_native) == f"it has not been compiled; install a C compiler, then: {installed}"
    (copied_native / "setup.py").touch()  # a checkout, or an editable installation
    in_place = f"pip install --no-deps -e {copied_native}"
    assert reason(copied_native) == f"it has not been compiled; install a C compiler, then: {in_place}"


def test_the_reason_for_a_compiled_extension_that_fails_is_its_error(copied_native: Path) -> None:
    broken = copied_native / "hpccomm" / "native" / "_fastpath.py"
    broken.write_text("raise ImportError('version GLIBC_2.99 not found')")
    assert reason(copied_native).startswith("version GLIBC_2.99 not found; install a C compiler, then: ")
    broken.write_text("import missing_module")
    assert reason(copied_native).startswith("No module named 'missing_module'; ")


def shared_library(machine: int, *dynamic: tuple[int, int], glibc: str = "2.17") -> bytes:
    """Return the beginning of a 64-bit ELF file: its header, one program header, a dynamic section, a string."""
    section = b"".join(struct.pack("<qQ", *entry) for entry in dynamic)
    header = b"\x7fELF\x02\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 2, 6, 120, 0, 0, len(section), len(section), 8)
    return header + segment + section + f"\0GLIBC_{glibc}\0".encode()


X86_64, AARCH64, TEXTREL = 62, 183, (22, 0)


@pytest.mark.parametrize(
    ("image", "defect"),
    [
        (shared_library(AARCH64, (1, 1), (30, 8)), None),
        (shared_library(X86_64, (1, 1)), "is not compiled for aarch64"),
        (shared_library(AARCH64, (1, 1), TEXTREL), "has text relocations"),
        (shared_library(AARCH64, (30, 4 | 8)), "has text relocations"),
        (shared_library(AARCH64, (1, 1), glibc="2.34"), "needs glibc 2.34"),
        (b"", "is not compiled for aarch64"),
        (None, "0 times _fastpath"),
    ],
)
def test_a_wheel_that_is_not_what_its_name_says_is_not_released(
    tmp_path: Path, image: bytes | None, defect: str | None
) -> None:
    wheel = tmp_path / "hpccomm-0.1.0-cp311-cp311-manylinux2014_aarch64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hpccomm/__init__.py", "")
        if image is not None:
            for module in ("_fastpath", "_pieces", "_sums", "_gil_held"):
                archive.writestr(f"hpccomm/native/{module}.cpython-311-aarch64-linux-gnu.so", image)
    command = [sys.executable, str(ROOT / "tools" / "check-wheel"), str(wheel), "aarch64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (defect is not None), done.stderr
    assert (defect or "") in done.stderr


def test_wheels_are_built_for_the_pythons_that_ci_runs() -> None:
    project = PYPROJECT["project"]
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.M)
    assert project["requires-python"] == f">={pythons[0]}"
    minors = [int(python.removeprefix("3.")) for python in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-manylinux_*" for minor in minors]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r"3\.\d+", matrix) == pythons


def test_a_release_needs_the_address_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "check-release", tmp_path / "tools")
    (tmp_path / "hpccomm").mkdir()
    (tmp_path / "hpccomm" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").touch()
    for urls, complaint in [("", "no address of the repository"), ('Source = "https://a.b/c"\n', "CITATION.cff")]:
        (tmp_path / "pyproject.toml").write_text("[project.urls]\n" + urls)
        command = [tmp_path / "tools" / "check-release", "1.2.3"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert complaint in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        ".devcontainer/devcontainer.json",
        "packaging/apptainer/hpccomm.def",
        "packaging/conda-forge/recipe.yaml",
        "packaging/lmod/hpccomm.lua",
        "packaging/spack/package.py",
    ],
)
def test_a_recipe_is_a_valid_file_that_says_which_parts_have_not_been_run(name: str) -> None:
    file = ROOT / name
    text = file.read_text(encoding="utf-8")
    assert "not run: " in "\n".join(text.splitlines()[:5]).lower()
    if file.suffix == ".json":
        assert json.loads(re.sub("^//.*", "", text, flags=re.M))["image"]
    elif file.suffix == ".yaml":
        assert pytest.importorskip("yaml").safe_load(text)["package"]["name"] == "hpccomm"
    elif file.suffix == ".py":
        compile(text, name, "exec")
    elif file.suffix == ".def":
        assert "Bootstrap: docker\nFrom: " in text
        for section in re.split(r"^%(?:post|test|runscript)$", text, flags=re.M)[1:]:
            subprocess.run(["sh", "-n"], input=section, text=True, check=True)
    else:
        compiler = shutil.which("luac") or shutil.which("luac5.3") or pytest.skip("needs luac (lua5.3)")
        subprocess.run([compiler, "-p", str(file)], check=True)


def test_the_recipes_ask_for_the_versions_of_pyproject() -> None:
    conda_forge = (ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text(encoding="utf-8")
    spack = (ROOT / "packaging" / "spack" / "package.py").read_text(encoding="utf-8")
    (mpi4py,) = [each for each in PYPROJECT["project"]["dependencies"] if each.startswith("mpi4py")]
    for requirement in [*PYPROJECT["build-system"]["requires"], mpi4py]:
        name, version = requirement.lower().split(">=")
        assert f"- {name} >={version}" in conda_forge
        assert f'"py-{name}@{version}:"' in spack
    assert f'"python@{PYPROJECT["project"]["requires-python"].removeprefix(">=")}:"' in spack


def test_actions_of_ci_are_pinned_to_commits() -> None:
    workflows = "\n".join(each.read_text(encoding="utf-8") for each in (ROOT / ".github" / "workflows").iterdir())
    actions = re.findall(r"uses: ([^.\s]\S*)", workflows)
    assert actions
    assert [action for action in actions if not re.search("@[0-9a-f]{40}$", action)] == []


def test_the_readme_on_the_package_index_has_no_links_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told_by_setup(monkeypatch, None)["long_description"]
    assert "](docs/" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https?:)|!\[", text)
    assert "Quickstart · from mpi4py ·\nfrom torch.distributed" in text
    assert "$ mpiexec -n 4 python mean.py" in text


def test_what_the_pages_and_ci_make_is_in_the_makefile() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.*"), ROOT / ".ci" / "run"]
    asked = {
        target: page.name
        for page in pages
        if "_build" not in page.parts
        for target in re.findall(r"(?:`|\$ |run: |step )make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))
    }
    assert {"test", "test-all", "lint", "demo"} <= asked.keys()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    there = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {target: page for target, page in asked.items() if target not in there} == {}
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.M)
    assert set(phony.split()) == there  # or a file of that name would stand for it
