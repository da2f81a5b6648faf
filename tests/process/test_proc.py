from __future__ import annotations

from pathlib import Path

import pytest

from hpccomm.process import proc

from ..launch import run_program

pytestmark = pytest.mark.serial


def test_names_are_taken_away_of_mapped_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"{tmp_path}/"
    monkeypatch.setattr(proc, "FOLDER", folder)
    for name in ("mpich_shm_1", "mpich_shm_2", "sm_segment.3", "other"):
        (tmp_path / name).touch()
    line = "7f00-7f10 rw-s 00000000 00:1a 12                         {}\n"
    maps = tmp_path / "maps"
    files = ["mpich_shm_1", "sm_segment.3", "other", "mpich_shm_2 (deleted)", "mpich_shm_4"]
    maps.write_text("".join(line.format(folder + name) for name in files) + "7f20-7f30 r-xp 00000000 00:00 0\n")
    proc.take_names_away(("mpich_shm_",), str(maps))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["maps", "mpich_shm_2", "other", "sm_segment.3"]
    proc.take_names_away(("sm_segment.",), str(tmp_path / "none"))  # a system without /proc
    assert (tmp_path / "sm_segment.3").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "1 / 0", "time.sleep(600)"])
def test_a_killed_job_leaves_no_file(end: str, tmp_path: Path) -> None:
    program = f"""
        import os, signal, sys, time
        import numpy as np
        import hpccomm as hc
        world = hc.init_process_group(timeout=2)
        hc.all_reduce(np.ones(1 << 20))
        hc.all_reduce(np.ones(4))
        lines = [line for line in open("/proc/self/maps") if "/dev/shm/" in line]
        names = {{line.split(maxsplit=5)[5].split()[0] for line in lines}}
        sys.stdout.write("".join(f"file {{name}}\\n" for name in names))
        sys.stdout.flush()
        hc.barrier()
        time.sleep(0.2)  # mpiexec reads what was printed
        if world.rank == 1:
            {end}
        hc.barrier()
        """
    result = run_program(program, tmp_path, 3, env={"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")})
    assert result.returncode != 0
    files = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("file ")}
    assert files, result
    assert not [each for each in files if Path(each).exists()]
