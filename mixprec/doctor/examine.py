"""The whole report on this machine."""

from . import advice
from .machine import describe, describe_build


def examine() -> advice.Report:
    """Everything that the screen shows and ``--json`` prints."""
    machine, build = describe(), describe_build()
    on_gpu = machine["gpu"] and "CUDA" in build["backends"]
    device = "cuda" if on_gpu else "cpu"
    report: advice.Report = {"machine": machine, "build": build, "device": device}
    report |= {"ops": [], "speed": None, "speed_error": None}
    if not build["error"]:
        from . import ops, speed  # they import mixprec

        report["ops"] = ops.check(device)
        try:
            report["speed"] = speed.measure(device)
        except Exception as error:
            report["speed_error"] = str(error).partition("\n")[0]
    report["findings"] = advice.findings(report)
    report["advice"] = advice.advice(report)
    report["troubles"] = advice.troubles(report)
    return report
