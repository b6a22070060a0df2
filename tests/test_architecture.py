"""The shape of the code: dependencies point down, everything public is typed and explained, files stay readable."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "crl_jax").rglob("*.py"))
MAX_LINES = 400

# Layers from the ground up. A module may import modules of its own layer and of lower ones. The longest matching prefix decides.
LAYERS: dict[str, int] = {
    "errors": 0,
    "records": 0,
    "config": 0,
    "seeds": 0,
    "processes": 0,
    "scopes": 0,
    "losses": 1,
    "experience.bank": 1,
    "experience.space": 1,
    "experience.retrieve": 1,
    "experience": 2,
    "models": 2,
    "sharding": 2,
    "learner": 2,
    "serving": 3,
    "rollout": 3,
    "bank_service": 3,
    "checkpoint": 3,
    "telemetry": 3,
    "experience.manager": 3,
    "experience.shell": 3,
    "": 4,  # train, evaluate, cli and what they are built from
}
# Parts of one layer that must not know each other either.
STRANGERS = (("losses", "experience"), ("telemetry", "rollout"), ("checkpoint", "rollout"), ("serving", "learner"), ("models", "learner"))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT / "crl_jax").with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def layer_of(module: str) -> int:
    parts = module.split(".")
    return next(LAYERS[p] for n in range(len(parts), -1, -1) if (p := ".".join(parts[:n])) in LAYERS)


def imports_of(path: pathlib.Path) -> set[str]:
    """Modules of crl_jax that a file imports at run time (imports for type checking only do not count)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")}
            if node.module == "crl_jax":
                found.discard("crl_jax")
    return {name.removeprefix("crl_jax.") for name in found if name.startswith("crl_jax.")}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_dependencies_point_down(path: pathlib.Path) -> None:
    module = module_of(path)
    wrong = {name for name in imports_of(path) if layer_of(name) > layer_of(module)}
    assert not wrong, f"{module} (layer {layer_of(module)}) imports {wrong}, which lie above it"
    for a, b in STRANGERS:
        if module.split(".")[0] == a:
            assert not {n for n in imports_of(path) if n.split(".")[0] == b}, f"{a} must not import {b}"


def test_environments_do_not_import_the_library() -> None:
    for path in (ROOT / "envs").rglob("*.py"):
        assert not imports_of(path), f"{path.relative_to(ROOT)} imports {imports_of(path)}: environments stand alone"


def public_functions(path: pathlib.Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public functions of a module and public methods of its public classes."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            members = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [(f"{node.name}.{m.name}", m) for m in members if not m.name.startswith("_")]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_public_functions_are_explained_and_typed(path: pathlib.Path) -> None:
    problems: list[str] = []
    for name, function in public_functions(path):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if "." in name and not any("staticmethod" in ast.dump(d) for d in function.decorator_list):
            arguments = arguments[1:]  # self or cls
        untyped = [a.arg for a in arguments if a.annotation is None]
        if untyped or function.returns is None:
            problems.append(f"{name}: no type for {', '.join(untyped) or 'the result'}")
        if ast.get_docstring(function) is None and "." not in name:
            problems.append(f"{name}: no docstring")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_modules_say_what_they_own_and_stay_short(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{path.name} has {len(text.splitlines())} lines: split it"
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"
    assert path.stem not in {"utils", "common", "helpers", "misc"}


FORBIDDEN = {
    "os.environ": "take it as an argument",
    "os.getenv": "take it as an argument",
    "time.time": "inject a clock (monotonic for durations)",
    "np.random.seed": "use a Generator made from a seed",
    "random.seed": "use a random.Random made from a seed",
    "pickle.load": "reading a file must not be able to run code",
    "pickle.dump": "write JSON, SQLite or arrays",
}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_library_code_reads_no_environment_and_no_global_randomness_and_swallows_nothing(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in FORBIDDEN:
            pytest.fail(f"{path.name}:{node.lineno} uses {name}: {FORBIDDEN[name]}")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}):
            inside = list(ast.walk(node))
            handed_on = any(isinstance(n, ast.Raise) or (isinstance(n, ast.Name) and n.id == node.name) for n in inside)
            assert handed_on, f"{path.name}:{node.lineno} catches everything and hands it to nobody"
