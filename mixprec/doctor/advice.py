"""What follows from the report: what is broken, what to do, what helps in known troubles."""

from typing import Any

_REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir . in mixprec's source folder"

Report = dict[str, Any]


def findings(report: Report) -> list[dict[str, str]]:
    """Errors (the exit code is 1 where there is one), warnings and hints, each with its remedy."""
    machine, build, speed = report["machine"], report["build"], report["speed"]
    gpu, found = machine["gpu"], []

    def add(level: str, what: str, remedy: str) -> None:
        found.append({"level": level, "what": what, "remedy": remedy})

    if build["error"]:
        add("error", f"mixprec cannot be imported: {build['error']}", _REINSTALL)
    for op in report["ops"]:
        if not op["ok"]:
            is_missing = gpu and "no kernel image" in op["detail"]
            architecture = f"TORCH_CUDA_ARCH_LIST={gpu['capability']} " if is_missing else ""
            add("error", f"{op['name']} is broken: {op['detail']}", architecture + _REINSTALL)
    if report["speed_error"]:
        add("error", f"training fails: {report['speed_error']}", "free memory first, or see above")
    if gpu and build["backends"] == ["CPU"]:
        add(
            "warning",
            "mixprec was built for the CPU alone: its optimizer and scaler refuse CUDA tensors",
            f"install nvcc of CUDA {machine['cuda']} (CUDA_HOME says where), then {_REINSTALL}",
        )
    if not gpu and (machine["gpu_of_driver"] or machine["gpu_problem"]):
        add(
            "warning",
            f"there is a {machine['gpu_of_driver'] or 'GPU'}, but torch cannot use it"
            + (f": {machine['gpu_problem']}" if machine["gpu_problem"] else ""),
            f"a newer driver than {machine['driver']}, or CUDA_VISIBLE_DEVICES unset"
            if machine["cuda"]
            else "install a torch with CUDA, then mixprec again",
        )
    if gpu and not gpu["tensor_cores"]:
        add(
            "hint",
            "no tensor cores: half precision saves memory here, and little or no time",
            "graphed, and fp32 where memory allows",
        )
    if gpu and gpu["free_gib"] < gpu["memory_gib"] / 10:
        add(
            "hint",
            f"{gpu['free_gib']} of {gpu['memory_gib']} GiB are free",
            "nvidia-smi lists the processes that hold the rest",
        )
    if speed and speed["device"] == "cpu" and speed["modes"][1]["speed_against_fp32"] < 1:
        add("hint", "bfloat16 is slower than fp32 on this CPU", "train in fp32 here")
    return found


def advice(report: Report) -> list[str]:
    """What to do on this machine, the largest gain first."""
    gpu, speed = report["machine"]["gpu"], report["speed"]
    if not speed:
        return []
    if speed["device"] == "cpu":
        best = max(speed["modes"], key=lambda mode: mode["speed_against_fp32"])
        return [
            f"this network is fastest with {best['mode']}; graphed changes nothing on a CPU",
            "torch.compile, and as many threads as there are cores (OMP_NUM_THREADS)",
        ]
    lines = []
    if speed["bound"] != "GPU":
        lines.append("@mixprec.graphed on the training step: one launch instead of all of them")
        if speed["busy"]:
            batch = round(speed["batch_size"] / speed["busy"])
            lines.append(f"without it: batches above about {batch}, until the GPU is busy")
    if gpu["tensor_cores"]:
        lines.append("mixprec.autocast and half_weights; widths and batch in multiples of 8")
        graphed, channels_last = (mode["ms"] for mode in speed["modes"][2:])
        lines.append(
            f"channels_last for convolutions: {graphed / channels_last:.2f}x here; "
            "torch.compile(model) fuses what lies between the matrix products"
        )
    else:
        lines.append("torch.compile(model), which fuses what lies between the matrix products")
    if "TF32" in gpu["tensor_cores"]:
        lines.append('torch.set_float32_matmul_precision("high") for what stays in fp32')
    return lines


def troubles(report: Report) -> dict[str, str]:
    """Remedies for what people come with, AMP's for this machine."""
    gpu, speed = report["machine"]["gpu"], report["speed"]
    if not gpu:
        no_effect = "a CPU gains only where it has instructions for bfloat16"
    elif not gpu["tensor_cores"]:
        no_effect = "expected here: no tensor cores"
    elif speed and speed["bound"] == "host":
        no_effect = "small networks are host-bound here: graphed, or larger batches"
    else:
        no_effect = "is the data loader the limit? (mixprec.prefetch, num_workers)"
    return {
        "loss is NaN": "scaler.report_overflow(), mixprec.find_nonfinite(model, x) name the layer; "
        "a lower lr; softmax, norms, losses in fp32 (autocast does it, .half() does not); bfloat16",
        "does not converge": "scaler.update() missing; clipped while scaled (scaler."
        "clip_grad_norm_); zero_grad missing; data and labels shuffled apart, or left on the CPU",
        "out of memory": "autocast, half_weights and store_param_remainders=True; smaller batches "
        "added up; torch.utils.checkpoint; keep loss.detach(), not loss",
        "AMP has no effect": f"{no_effect}; sizes not in multiples of 8",
    }
