"""The doctor's report on a GPU machine, for tests without one."""

import copy

from mixprec.doctor import advice, ops

MODES = ("fp32", "torch AMP", "mixprec graphed", "the same, channels_last")
H200 = {
    "machine": {
        "gpu": {
            "name": "NVIDIA H200",
            "capability": "9.0",
            "tensor_cores": ["float16", "bfloat16", "TF32", "float8"],
            "memory_gib": 139.8,
            "free_gib": 139.1,
        },
        "gpu_count": 8,
        "gpu_problem": None,
        "gpu_of_driver": "NVIDIA H200",
        "driver": "580.65.06",
        "cuda": "13.0",
        "torch": "2.11.0+cu130",
        "python": "3.12.3",
        "cpu": "AVX512",
        "threads": 16,
    },
    "build": {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "architectures": "7.5;8.0;8.6;9.0;10.0;12.0+PTX",
        "backends": ["CPU", "CUDA"],
        "error": None,
    },
    "device": "cuda",
    "ops": [{"name": name, "ok": True, "detail": ""} for name in ops.OPS],
    "speed": {
        "device": "cuda",
        "network": "8 convolutions of 128 channels, 32x32",
        "batch_size": 128,
        "modes": [
            {"mode": mode, "ms": 4.0, "gpu_ms": 1.0, "launches": 200, "speed_against_fp32": 1.0}
            for mode in MODES
        ],
        "busy": 0.25,
        "bound": "host",
    },
    "speed_error": None,
}


def changed(**changes):
    """The report of an H200; machine__cuda="12.8" replaces report["machine"]["cuda"]."""
    report = copy.deepcopy(H200)
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = report
        for folder in folders:
            place = place[folder]
        place[name] = value
    report["findings"] = advice.findings(report)
    report["advice"] = advice.advice(report)
    report["troubles"] = advice.troubles(report)
    return report
