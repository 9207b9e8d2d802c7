"""A training script as rules.py sees it.

Nothing is executed. What a helper of another file does cannot be seen, so the rules have to give
the script the benefit of the doubt.
"""

import ast
import re

from .events import Event, Walk
from .syntax import FUNCTIONS, imports, is_constant, keyword, names_assigned

_OPTIMIZER = re.compile(r"(^|_)opt(im)?(_|\d|$)|optimi[sz]er")
_SCHEDULERS = "torch.optim.lr_scheduler."


class Script:
    """Raises SyntaxError or ValueError where `source` is not Python."""

    def __init__(self, source: bytes) -> None:
        self.tree = ast.parse(source)
        self.text = source.decode(errors="replace")
        self.nodes = list(ast.walk(self.tree))
        self.imports = dict(imports(self.nodes))
        self.made: dict[str, set[str]] = {}  # name: what was called to make it
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                value = node.value.body if isinstance(node.value, ast.IfExp) else node.value
                if isinstance(value, ast.Call):
                    # a scaler that never scales is none
                    is_off = is_constant(keyword(value, "enabled"), False)
                    maker = "" if is_off else self.resolve(value.func)
                    for target in names_assigned(node):
                        self.made.setdefault(target, set()).add(maker)
        definitions = (*FUNCTIONS, ast.ClassDef)
        self.defined = {n.name for n in self.nodes if isinstance(n, definitions)}
        self.bodies = [self.tree.body, *(n.body for n in self.nodes if isinstance(n, FUNCTIONS))]
        self.scopes = [Walk(self, body).events for body in self.bodies]

    def events(self, *kinds: str) -> list[Event]:
        return [event for scope in self.scopes for event in scope if event.kind in kinds]

    def resolve(self, node: ast.expr) -> str:
        """The dotted name as it was imported: torch.nn.functional.relu of F.relu."""
        first, dot, rest = ast.unparse(node).partition(".")
        return self.imports.get(first, first) + dot + rest

    def is_scaler(self, name: str) -> bool:
        made = self.made.get(name)
        if made:
            return any(maker.endswith("GradScaler") for maker in made)
        return "scaler" in name.rpartition(".")[2].lower()

    def is_optimizer(self, name: str) -> bool:
        is_called_so = bool(_OPTIMIZER.search(name.rpartition(".")[2].lower()))
        return is_called_so or any(map(is_optimizer_class, self.made.get(name, ())))

    def is_scheduler(self, name: str) -> bool:
        return any(maker.startswith(_SCHEDULERS) for maker in self.made.get(name, ()))

    def is_float16(self, autocast: ast.expr) -> bool:
        """Whether an autocast computes in float16 for certain, at least on a GPU."""
        assert isinstance(autocast, ast.Call)
        name, args = self.resolve(autocast.func), autocast.args
        is_torchs = name in ("torch.autocast", "torch.amp.autocast")
        if not (is_torchs or name in ("torch.cuda.amp.autocast", "mixprec.autocast")):
            return False
        dtype = keyword(autocast, "dtype")
        if dtype is None and len(args) > 1 and name != "torch.cuda.amp.autocast":
            dtype = args[1]
        if dtype is not None:
            return ast.unparse(dtype) in ("torch.float16", "torch.half")
        device = keyword(autocast, "device_type") or (args[0] if args else None)
        return not is_torchs or is_constant(device, "cuda")


def is_optimizer_class(name: str) -> bool:
    is_torchs = name.startswith("torch.optim.") and not name.startswith(_SCHEDULERS)
    return is_torchs or name == "mixprec.SGD"
