-- Lmod's module file. Copy it to MODULEPATH/hpccomm/VERSION.lua, and set the two names. Install hpccomm with the site's MPI:
--   python3 -m venv /opt/hpccomm/VERSION && /opt/hpccomm/VERSION/bin/pip install CHECKOUT
-- It replaces the user's Python. In an own environment: pip install CHECKOUT, or the wheel that `pip wheel CHECKOUT` builds.
-- Run with Lmod 8.6 and a module that stood for the MPI; not run: on a cluster, with Environment Modules.
local root = pathJoin("/opt/hpccomm", myModuleVersion())
local mpi = "openmpi"

whatis("Name: hpccomm")
whatis("Version: " .. myModuleVersion())
whatis("Description: torch.distributed's model of communication for NumPy and CuPy arrays, on MPI")
help([[
Start a program on several ranks:  srun --mpi=pmix -n 64 python program.py
Check the launch:                  srun --mpi=pmix -n 2 hpccomm info
]])

depends_on(mpi)
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
