"""Stand-ins for sbatch, srun and scontrol: jobs run at once. `install(folder)` returns an environment with them."""

import os
import sys
from pathlib import Path

SBATCH = """#!{python}
import os, re, subprocess, sys
state, script, options = {state!r}, open(sys.argv[-1]).read(), " ".join(sys.argv[1:-1])
number = len(os.listdir(state)) + 1
array = re.search(r"^#SBATCH --array=(\\d+)-(\\d+)", script, re.M)
log = re.search(r"^#SBATCH --output=(.*)$", script, re.M).group(1)
assert re.search(r"^#SBATCH --partition=cpu$", script, re.M) and re.search(r"^#SBATCH --account=me$", script, re.M)
good = all(open(state + "/" + job).read() == "ok" for job in re.findall(r"--dependency=afterok:(\\d+)", options))
for task in range(int(array.group(1)), int(array.group(2)) + 1):
    environment = os.environ | dict(SLURM_ARRAY_TASK_ID=str(task), SLURM_NODELIST="localhost", RUN_OFFSET="0")
    with open(log.replace("%A", str(number)).replace("%a", str(task)), "w") as out:
        good = good and not subprocess.run(["bash", "-c", script], env=environment, stdout=out, stderr=out).returncode
open(state + "/" + str(number), "w").write("ok" if good else "failed")
print("Submitted batch job", number)
"""
SRUN = '#!/bin/bash\nexec "${@:4}"  # srun -l -n 1 COMMAND …\n'
SCONTROL = "#!/bin/bash\necho localhost\n"


def install(folder: Path) -> dict[str, str]:
    (folder / "jobs").mkdir(parents=True)
    scripts = {"sbatch": SBATCH.format(python=sys.executable, state=str(folder / "jobs")), "srun": SRUN}
    for name, text in {**scripts, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
