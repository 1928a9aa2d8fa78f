#!/usr/bin/env python3
"""Peak memory of a training step over activation_memory_budget, method by method.

    python scripts/budget_curve.py --predict --model llama --layers 12 \
        --budgets 0,0.02,0.05,0.1,0.2,0.5,1 --methods stock,light,all,ac1 \
        --out out/curve.json
    python scripts/budget_curve.py --measure --device cuda --out out/curve.json

--predict compiles no kernel: Inductor lowers each graph up to its own memory estimate,
with --device cuda for a pretend CUDA device.  --measure trains on a real one.  Rows are
written after every job, as a JSON list; --resume keeps the good ones of an earlier run.
The plot goes beside the rows as PNG.
Exit code 0, 1 if some job failed (its row carries the error), 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TYPE_CHECKING


sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = (
    *("model", "layers", "seq", "batch", "dtype", "device", "backend", "method"),
    *("rng", "rand4x", "optimizer"),
)
MODELS = (
    *("llama", "bert", "gpt2", "vit", "mlp", "moe", "unet"),
    *("lm", "tied", "twice", "values", "encdec", "resnet"),
)
POINT = ("method", "budget", "target_bytes")
RNG_POLICIES = ("off", "replay", "save")
SIZE_OPTIONS = ("layers", "seq", "batch", "hidden", "inter", "heads", "kv_heads")
FIELDS = (
    *KEY,
    "budget",
    "target_bytes",
    "saved_bytes",
    "model_peak_bytes",
    "lowest_peak_bytes",
    "predicted_peak_bytes",
    "estimated_peak_bytes",
    "liveness_peak_bytes",
    "measured_peak_bytes",
    "total_peak_bytes",
    "step_ms",
    "step_ms_min",
    "recompute_flops",
    "recompute_seconds",
    "plan_seconds",
    "compile_seconds",
    "grad_rel_err",
    "torch",
    "triton",
    "machine",
    "command",
    "error",
)


def parse_budgets(text: str) -> list[float]:
    """Budgets of ``START:STOP:STEP`` (both ends in) or of a comma list, sorted."""
    try:
        if ":" in text:
            start, stop, step = map(float, text.split(":"))
            if step <= 0 or stop < start:
                raise ValueError
            count = round((stop - start) / step)
            budgets = [round(start + i * step, 10) for i in range(count + 1)]
        else:
            budgets = [float(part) for part in text.split(",")]
    except ValueError:
        budgets = []
    if not budgets or not all(0 <= b <= 1 for b in budgets):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected numbers from 0 to 1, as 0:1:0.05 or as 0,0.1,1"
        )
    return sorted(set(budgets))


def parse_targets(text: str) -> list[int]:
    """Bytes of a comma list of targets, as 24GB,22.5GiB,1000000."""
    from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
        target_bytes,
    )

    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        found = [target_bytes(int(p) if p.isdigit() else p, None) for p in parts]
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return sorted(set(found))


def parse_names(text: str, accepted: Sequence[str], what: str) -> list[str]:
    """The names of a comma list, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in accepted]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown {what} {', '.join(unknown) or repr(text)}; "
            f"accepted are {', '.join(accepted)}"
        )
    return list(dict.fromkeys(names))


def parse_methods(text: str) -> list[str]:
    from curve.methods import METHODS

    return parse_names(text, METHODS, "method")


def parse_rng(text: str) -> list[str]:
    return parse_names(text, RNG_POLICIES, "policy")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--predict", action="store_true", help="no kernel is compiled")
    what.add_argument("--measure", action="store_true", help="train on a CUDA device")
    what.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--model", choices=MODELS)
    p.add_argument("--model-file", metavar="FILE.py:FUNCTION")
    for name in SIZE_OPTIONS:
        p.add_argument(f"--{name.replace('_', '-')}", type=int)
    p.add_argument("--vocab", type=int)
    p.add_argument("--dropout", type=float)
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    p.add_argument("--budgets", type=parse_budgets, default=parse_budgets("0:1:0.05"))
    p.add_argument(
        "--targets",
        type=parse_targets,
        default=[],
        metavar="BYTES,...",
        help="also plan for these peaks, as 24GB; methods that take a target",
    )
    p.add_argument("--methods", type=parse_methods, default=["stock", "light", "all"])
    p.add_argument(
        "--rng",
        type=parse_rng,
        default=["off"],
        help="policies for random numbers to compare (off is plain torch): "
        + ",".join(RNG_POLICIES),
    )
    p.add_argument(
        "--rand4x", action="store_true", help="with the overlay's random stream"
    )
    p.add_argument(
        "--optimizer", choices=("adamw",), help="measure whole steps, with an update"
    )
    p.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    p.add_argument("--device", choices=("cpu", "cuda"))
    p.add_argument("--jobs", type=int, default=2, help="worker processes at once")
    p.add_argument(
        "--lock", type=Path, help="lock file shared by runs that measure on one device"
    )
    p.add_argument("--out", type=Path, default=Path("out/curve.json"))
    p.add_argument("--resume", action="store_true")
    return p


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a built-in model; None where they say nothing."""
    return {k: getattr(args, k) for k in (*SIZE_OPTIONS, "vocab", "dropout")}


def base_row(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that all rows of a run share."""
    from importlib import metadata

    from curve import models

    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row.update(model=args.model_file or args.model, dtype=args.dtype)
    row.update({k: getattr(args, k) for k in SIZE_OPTIONS})
    if args.model_file is None:
        row.update(dataclasses.asdict(models.sizes_for(args.model, **sizes(args))))
    row.update(device=args.device, backend=args.backend, rand4x=args.rand4x)
    row.update(optimizer=args.optimizer)
    row["torch"] = metadata.version("torch")
    try:
        row["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        row["triton"] = None
    row["machine"] = machine_kind(args.device)
    row["command"] = shlex.join(["python", "scripts/budget_curve.py", *sys.argv[1:]])
    return row


def machine_kind(device: str) -> str:
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, no GPU used"


def plan_jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One job a worker process: predictions share a trace, measurements do not."""
    from curve.methods import BUDGET_METHODS

    swept = [m for m in args.methods if m in BUDGET_METHODS]
    fixed = [m for m in args.methods if m not in BUDGET_METHODS]
    aimed = [m for m in swept if "peak" in BUDGET_METHODS[m]]
    levels = [[b, None] for b in args.budgets]
    if args.measure:
        points = [[[m, *level]] for level in levels for m in swept]
    else:
        share = max(1, min(args.jobs, len(args.budgets)))
        size = -(-len(args.budgets) // share)  # neighbours often save the same
        points = [
            [[m, *level] for level in levels[i * size : (i + 1) * size] for m in swept]
            for i in range(share if swept else 0)
        ]
    points += [[[m, None, t]] for t in args.targets for m in aimed]
    points += [[[m, None, None]] for m in fixed]
    return [{"points": p, "rng": policy} for policy in args.rng for p in points if p]


class Store:
    """Rows in a JSON file, rewritten whole after every change."""

    def __init__(self, path: Path, resume: bool, base: dict[str, Any]) -> None:
        self.path = path
        self.base = base
        self.lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        if resume and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.rows = [r for r in kept if r.get("error") is None]
        elif path.exists() and path.stat().st_size:
            path.replace(path.with_suffix(".previous.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.rows:
            self.write()

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        shape = ("hidden", "inter", "heads", "kv_heads", "vocab", "dropout", "torch")
        off = {"rng": row.get("rng") or "off", "rand4x": bool(row.get("rand4x"))}
        row = {**row, **off}
        return tuple(row.get(k) for k in (*KEY, *shape, "budget", "target_bytes"))

    def has(
        self, method: str, budget: float | None, target: int | None, rng: str = "off"
    ) -> bool:
        point = {"method": method, "budget": budget, "target_bytes": target, "rng": rng}
        wanted = self.key({**self.base, **point})
        return any(self.key(r) == wanted for r in self.rows)

    def add(self, fields: dict[str, Any]) -> None:
        with self.lock:
            row = {**self.base, **fields}
            self.rows = [r for r in self.rows if self.key(r) != self.key(row)]
            self.rows.append(row)
            self.rows.sort(
                key=lambda r: (
                    r["method"],
                    r.get("rng") or "off",
                    r["budget"] or 0.0,
                    r.get("target_bytes") or 0,
                )
            )
            self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")
        temporary.replace(self.path)


def run_worker(
    job: dict[str, Any], forwarded: list[str], store: Store, progress: Any
) -> None:
    """Run one worker process; every point of the job ends as a row."""
    left = [tuple(p) for p in job["points"]]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(job), *forwarded],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        job["process"] = process
        for line in process.stdout:
            if not line.startswith("ROW "):
                continue
            fields = json.loads(line[4:])
            store.add({**fields, "rng": job["rng"]})
            point = tuple(fields[k] for k in POINT)
            if point in left:
                left.remove(point)
                progress.update()
        code = process.wait()
        errors.seek(0)
        tail = errors.read()[-2000:]
    for point in left:
        why = f"worker exited with code {code}: {tail.strip() or 'no output'}"
        named = dict(zip(POINT, point, strict=True))
        store.add({**named, "rng": job["rng"], "error": why})
        progress.update()


def run_jobs(
    jobs: list[dict[str, Any]], count: int, forwarded: list[str], store: Store
) -> None:
    """Run the jobs on ``count`` processes; Ctrl-C ends them and keeps the rows."""
    from tqdm import tqdm

    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    total = sum(len(j["points"]) for j in jobs)
    progress = tqdm(total=total, unit="point", disable=total == 0)

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            run_worker(job, forwarded, store, progress)

    stop = threading.Event()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except KeyboardInterrupt:
        stop.set()
        for job in jobs:
            if "process" in job:
                job["process"].terminate()
        for thread in threads:
            thread.join(10)
        raise
    finally:
        progress.close()


def emit(
    method: str, budget: float | None, target_bytes: int | None, **fields: Any
) -> None:
    row = {"method": method, "budget": budget, "target_bytes": target_bytes, **fields}
    print("ROW " + json.dumps(row), flush=True)


def worker(args: argparse.Namespace) -> int:
    """Body of a worker process: run the points of one job and print their rows."""
    import torch

    torch.set_num_threads(1)
    job = json.loads(args.worker)
    points = [tuple(p) for p in job["points"]]
    dtype = getattr(torch, args.dtype)

    def build() -> Any:
        from curve import models

        if args.model_file:
            return models.build_from_file(args.model_file, dtype)
        wanted = models.sizes_for(args.model, **sizes(args))
        return models.build(args.model, wanted, dtype)

    if job["rng"] != "off":
        import torch_overlay

        torch_overlay.apply(f"rng={job['rng']}")
    if args.rand4x:
        import torch_overlay

        torch_overlay.apply("rand4x")
    if job["measure"]:
        return _measure_points(points, build, args, job)
    return _predict_points(points, build, args)


def _measure_points(points: Any, build: Any, args: Any, job: dict[str, Any]) -> int:
    from curve.measure import measure
    from curve.methods import BUDGET_METHODS, PlanPoint

    import torch_overlay

    for method, budget, target in points:
        try:
            features = BUDGET_METHODS.get(method, ())
            if features:
                torch_overlay.apply(*features)
            model, inputs = build()
            fields = measure(
                model,
                inputs,
                PlanPoint(method, budget, target),
                args.backend,
                job["lock"],
                job["reference"],
                args.optimizer,
            )
        except Exception as error:
            fields = {"error": f"{type(error).__name__}: {error}"}
        emit(method, budget, target, **fields)
    return 0


def _predict_points(points: Any, build: Any, args: Any) -> int:
    from curve.methods import BUDGET_METHODS, PlanPoint, use_checkpointing
    from curve.predict import predict

    import torch_overlay

    fixed = [m for m, _, _ in points if m not in BUDGET_METHODS]
    if fixed == ["eager"]:
        emit(
            "eager",
            None,
            None,
            error="eager has no graph to predict from; use --measure",
        )
        return 0
    if any(BUDGET_METHODS.get(m) for m, _, _ in points):
        torch_overlay.apply("remat", "peak")
    model, inputs = build()
    if fixed:
        use_checkpointing(model, fixed[0])
    wanted = {PlanPoint(m, 1.0 if b is None else b, t): b for m, b, t in points}

    def done(point: PlanPoint, result: Any) -> None:
        fields = {"error": result}
        if not isinstance(result, str):
            fields = dataclasses.asdict(result)
        emit(point.method, wanted[point], point.target_bytes, **fields)

    predict(model, inputs, list(wanted), args.backend, done, args.device)
    return 0


def main(argv: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    p = parser()
    args = p.parse_args(given)
    if (args.model is None) == (args.model_file is None):
        if args.model_file is not None:
            p.error("--model and --model-file exclude each other")
        args.model = "llama"
    if args.device is None:
        args.device = "cuda" if args.measure else "cpu"
    if args.worker is not None:
        return worker(args)
    if args.jobs < 1:
        p.error("--jobs must be at least 1")
    if args.measure and args.device != "cuda":
        p.error("--measure needs --device cuda; use --predict on a CPU-only machine")
    if args.measure:
        import torch

        if not torch.cuda.is_available():
            print("--measure: this torch sees no CUDA device", file=sys.stderr)
            return 2
    return curve(args, given)


def curve(args: argparse.Namespace, given: list[str]) -> int:
    from curve import report

    store = Store(args.out, args.resume, base_row(args))
    jobs = plan_jobs(args)
    for job in jobs:
        job["points"] = [p for p in job["points"] if not store.has(*p, job["rng"])]
    jobs = [j for j in jobs if j["points"]]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            job["measure"] = args.measure
            job["lock"] = str(args.lock or Path(folder, "measure.lock"))
            job["reference"] = str(Path(folder, f"gradients.{job['rng']}"))
        forwarded = [a for a in given if a not in ("--predict", "--measure")]
        interrupted = False
        try:
            run_jobs(jobs, args.jobs, forwarded, store)
        except KeyboardInterrupt:
            interrupted = True
    if not store.rows:
        print("no row was made", file=sys.stderr)
        return 2
    print(report.table(store.rows))
    picture = args.out.with_suffix(".png")
    report.plot(store.rows, picture)
    print(f"rows: {args.out}  plot: {picture}")
    if interrupted:
        print("interrupted; go on with --resume", file=sys.stderr)
        return 130
    return 1 if any(r["error"] for r in store.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
