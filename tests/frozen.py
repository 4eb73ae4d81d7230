"""What must not change while the house is rebuilt: `python tests/frozen.py` compares with frozen.json.

Losses and gradient norms of small versions of published configs on their meshes, bit for bit over 20 steps, the fields
of their config.json and the names in their checkpoints; and the collectives of every config. `--write` freezes anew,
`--only NAME …` some. Bits are those of one kind of CPU and one JAX: elsewhere look at the largest difference.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "frozen.json"
SMALL = "--model.layers 4 --model.hidden 32 --model.heads 4 --model.sequence 32 --model.vocabulary 96"
RUNS = {
    "gpt_345m": "--model.attention-dropout 0.1",
    "gpt_8b": "--mesh.model 2 --mesh.data 2 --train.unroll off",
    "gpt_22b_sp": "--mesh.model 4 --mesh.data 1 --mesh.pipe 1 --train.unroll off",
    "gpt_1t_sp": "--mesh.model 2 --mesh.pipe 2 --mesh.data 1 --mesh.chunks 2 --train.recompute full",
    "gpt_145b": "--mesh.model 1 --mesh.pipe 2 --mesh.data 2 --mesh.chunks 1 --mesh.schedule zb-h1",
    "bloom_560m": "--mesh.data 2 --mesh.zero 1 --train.unroll off",
    "bert_336m": "--mesh.model 2 --mesh.data 2 --train.unroll off",
    "llama3_8b": "--mesh.data 4 --mesh.zero 3 --mesh.model 1 --model.kv-heads 2 --model.feed-forward 64",
    "llama3_8b_128k": "--mesh.context 2 --mesh.data 1 --mesh.zero 1 --mesh.model 2 --model.kv-heads 2 "
    "--model.feed-forward 64 --train.recompute selective",
    "qwen3_8b": "--mesh.data 2 --mesh.zero 1 --mesh.model 1 --model.kv-heads 2 --model.feed-forward 64 "
    "--model.head-dim 16 --model.window 8 --model.full-attention-every 2 --train.unroll off",
    "mixtral_8x7b": "--mesh.data 4 --mesh.expert 2 --mesh.model 1 --mesh.zero 1 --model.kv-heads 2 "
    "--model.feed-forward 64 --train.unroll off",
    "olmoe_1b_7b": "--mesh.data 1 --mesh.model 2 --mesh.expert 1 --model.kv-heads 4 --model.feed-forward 32 "
    "--model.experts 8 --model.expert-interval 2 --train.unroll off",
    "olmo2_1b": "--mesh.data 2 --model.feed-forward 64 --precision.compute fp8 --optimizer.name muon",
    "gpt_demo": "--mesh.data 2 --mesh.model 2 --train.loss-chunks 4 --precision.compute fp16",
}


def run(name: str, changes: str, folder: Path) -> dict:
    """What a run of the config leaves."""
    shared = "--train.steps 20 --train.global-batch 8 --train.micro-batch 2 --train.batch-rampup None "
    shared += "--train.eval-interval 10 --train.eval-batches 1 --checkpoint.interval 0 --log.sample-tokens 0 "
    shared += f"--data.path --data.mock --name {name} --runs {folder}"
    mesh = dict(pair.split() for pair in changes.split("--mesh.")[1:] for pair in [" ".join(pair.split()[:2])])
    devices = 1
    for axis in ("model", "data", "pipe", "context"):
        devices *= int(mesh.get(axis, 1))
    flags = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    alone = " ".join(f"--mesh.{axis} 1" for axis in ("model", "data", "pipe", "chunks", "context", "expert"))
    words = f"train.py --config {name} --simulate {devices} {SMALL} {shared} {alone} {changes}".split()
    if not name.startswith("gpt_demo"):
        words += ["--optimizer.warmup-steps", "2"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        print(f"{name}: {done.stderr or done.stdout}", file=sys.stderr)
        return {"fails": done.stderr[-300:]}
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (folder / name / "checkpoints").iterdir()
    config = json.loads((folder / name / "config.json").read_text())
    manifest = (
        json.loads(next(checkpoint.glob("manifest.json")).read_text()) if list(checkpoint.glob("manifest.json")) else {}
    )
    return {
        "losses": [[row[key] for key in ("loss", "grad_norm", "val_loss") if row.get(key) is not None] for row in rows],
        "config": {section: sorted(values) for section, values in config.items()},
        "checkpoint": sorted(map(str, {file.relative_to(checkpoint).parts[0] for file in checkpoint.rglob("*")})),
        "arrays": sorted(manifest.get("arrays", manifest)) if manifest else [],
    }


def ledgers(names: list[str]) -> dict:
    """For each config a digest of its collectives, their number and their bytes."""
    found = {}
    for name in names:
        print(f"ledger {name}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "mjax", "plan", "--config", name, "--json"], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        values = json.loads(done.stdout)
        records = json.dumps(values["communication"]["records"], sort_keys=True)
        found[name] = {
            "bytes": values["communication"]["bytes"],
            "calls": values["communication"]["collectives"],
            "records": hashlib.sha256(records.encode()).hexdigest()[:16],
            "parameters": values["run"]["parameters"],
        }
    return found


def compare(then, now, where: str = "") -> list[str]:
    """Where two trees differ, in words."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        return [line for key in keys for line in compare(then.get(key), now.get(key), f"{where}/{key}")]
    if where.endswith("/losses") and then and now and len(then) == len(now):
        pairs = [(a, b) for one, other in zip(then, now, strict=True) for a, b in zip(one, other, strict=True)]
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        return [f"{where}: relative difference up to {worst:.1e}"] if worst else []
    if then is None:
        return [f"{where}: was not frozen"]
    if isinstance(then, list) and isinstance(now, list):
        then, now = [each for each in then if each not in now], [each for each in now if each not in then]
    return [] if then == now else [f"{where}: {then} → {now}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--no-ledgers", action="store_true")
    given = parser.parse_args()
    frozen = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}, "ledgers": {}}
    now = {"runs": {}, "ledgers": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only or RUNS:
            if name in RUNS:
                print(f"run {name}", file=sys.stderr)
                now["runs"][name] = run(name, RUNS[name], Path(folder))
    configs = sorted(file.stem for file in (ROOT / "configs").glob("*.py") if file.stem != "__init__")
    if not given.no_ledgers:
        now["ledgers"] = ledgers([name for name in configs if given.only is None or name in given.only])
    lines = []
    for part in now:
        for name, values in now[part].items():
            if not given.write:
                lines += compare(frozen[part].get(name), values, f"{part}/{name}")
            frozen[part][name] = values
    if given.write:
        FILE.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")
    print("\n".join(lines) or "nothing has changed")
    sys.exit(bool(lines))
