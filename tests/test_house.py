"""The rules of the house that a machine can check: layers, private names, printing."""

import ast
import re
from pathlib import Path

import attrs
import networkx as nx
import pytest
from budget import BUDGET, counted
from long_tests import LIST, function_of

ROOT = Path(__file__).parent.parent
# A module may import from the lines above its own, and from its own folder; those of one line stand
# side by side.
LAYERS = [
    "_torch version",
    "ir",
    "data factors",
    "frontend lowering compilers passes",
    "runtime",
    "cost",
    "sched report",
    "backend testing",
    "integrations forecasting",
    "commands",
    "__main__",
]
DISTRIBUTED = {
    *{("cost", "network"), ("runtime", "distributed")},
    *{("frontend", "deferred"), ("_torch", "checkpoints"), ("_torch", "fully_sharded")},
}
APART = {"passes", "runtime"}  # what they share lives below them


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT / "pfeife").with_suffix("").parts


MODULES = sorted(path for path in (ROOT / "pfeife").rglob("*.py") if parts(path) != ("__init__",))


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "pfeife"
            yield from (f"pfeife.{alias.name}" for alias in node.names) if whole else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(part: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if part in names.split())


def import_graph() -> nx.DiGraph:
    """Which module imports which; imports in functions, and for types alone, count."""
    names = {".".join(("pfeife", *parts(path))).removesuffix(".__init__"): path for path in MODULES}
    graph = nx.DiGraph()
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for read in imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                aliases = [alias.name for alias in node.names]
                modules = {f"{read}.{alias}" for alias in aliases} & names.keys() or {read}
                graph.add_edges_from((name, module) for module in modules & names.keys() - {name})
    return graph


IMPORTS = import_graph()


def circles(graph: nx.DiGraph) -> list[list[str]]:
    return [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]


def test_no_circle_of_files():
    assert IMPORTS.number_of_edges() > 1000 and not circles(IMPORTS)


def rooms(folder: str) -> nx.DiGraph:
    """The files and folders in a folder, and which imports of which."""
    inside = {name: name.removeprefix(f"{folder}.").split(".")[0] for name in IMPORTS}
    inside = {name: room for name, room in inside.items() if name.startswith(f"{folder}.")}
    edges = {(inside[a], inside[b]) for a, b in IMPORTS.edges if a in inside and b in inside}
    graph = nx.DiGraph((a, b) for a, b in edges if a != b)
    graph.add_nodes_from(inside.values())
    return graph


@pytest.mark.parametrize(
    "folder", sorted({name.rpartition(".")[0] for name in IMPORTS} - {"", "pfeife"})
)
def test_a_folder_has_few_layers(folder):
    """Its files and folders stand in layers, seven at most where there are more than 14 of them.
    Those of the package as a whole are LAYERS."""
    graph = rooms(folder)
    assert not circles(graph)
    assert len(graph) <= 14 or nx.dag_longest_path_length(graph) < 7


def test_no_folder_is_over_its_budget():
    """Lines of code: who needs more raises the number in tests/budget.py, with a reason."""
    lines = counted()
    assert {*lines} == {*BUDGET}
    over = {folder: n - BUDGET[folder] for folder, n in lines.items() if n > BUDGET[folder]}
    assert not over, f"lines too many: {over}"


UNSAFE_BUT_LISTED = {
    ("_torch", "checkpoints"): ["pickle"],  # an Unpickler with an allow list
    ("commands", "models"): ["importlib.import_module"],  # what the user names on the command line
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(parts(path)))
def test_a_module(path):
    text = path.read_text()
    tree = ast.parse(text)
    me = parts(path)[0]
    for name in imported(tree):
        words = name.split(".")
        if words[0] == "pfeife" and words[1] != me:
            assert layer(words[1]) < layer(me), f"{me} imports {name}"
            assert not {me, words[1]} <= APART, f"{me} imports {name}"
        if words[:2] == ["torch", "distributed"]:
            assert parts(path)[:2] in DISTRIBUTED
        if any(word.startswith("_") for word in words[1:]) and words[0] == "torch":
            assert me == "_torch" or name == "torch.utils._pytree", f"private {name}"
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert unsafe(tree) == UNSAFE_BUT_LISTED.get(parts(path), [])
    assert "print" not in calls or me == "__main__"
    assert ast.get_docstring(tree), "a module says what it is for"


FOLDERS = sorted(
    path for path in (ROOT / "pfeife").rglob("__init__.py") if path.parent.parent != ROOT
)


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: "/".join(parts(path)[:-1]))
def test_a_folder_says_what_is_in_it(path):
    """In which order to read it: every module and folder in it is named, and no other."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    files = {p.stem for p in path.parent.glob("*.py")} - {"__init__"}
    folders = {f"{p.parent.name}/" for p in path.parent.glob("*/__init__.py")}
    named = re.findall(r"`(\w+/?)`", text)
    assert files | folders == set(named), files | folders ^ set(named)
    assert re.search("read|first", text, re.IGNORECASE), "in which order"


TESTS = ROOT / "tests"
TESTED = sorted({path.parent.relative_to(ROOT / "pfeife") for path in MODULES} - {Path(".")})
WHOLES = {"edges", "strict", "distributed"}  # for steps as a whole


@pytest.mark.parametrize("folder", TESTED, ids=str)
def test_a_folder_of_tests(folder):
    """Each folder of the package has tests, each file of which is named as a module of it, or as
    the folder; no other folder has any."""
    files = sorted((TESTS / folder).glob("*.py"))
    assert files
    for file in files:
        name = file.stem.removeprefix("test_")
        assert name == folder.name or (ROOT / "pfeife" / folder / f"{name}.py").exists(), file


def test_every_long_test_is_there():
    for test in LIST.read_text().splitlines():
        path, _, name = function_of(test).partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), test


def test_no_other_folder_has_tests():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    assert folders - {Path("."), *map(Path, WHOLES)} == set(TESTED)


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_a_file_of_tests(path):
    """What several files of tests use is in a helper; no program of benchmarks/ is one."""
    known = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for name in imported(ast.parse(path.read_text())):
        first = name.split(".")[0]
        assert not name.split(".")[-1].startswith("test_"), f"{path.name} imports {name}"
        helps = (TESTS / f"{first}.py").exists()
        assert first not in known or helps, f"{path.name} imports {name} of benchmarks/"


# Modules that make objects or run code from bytes, and calls that use them. torch's `..._object`
# and `..._object_list` collectives pickle what they send.
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg"}
OTHER_CODE = {"runpy", "code", "codeop", "imp", "multiprocessing", "xmlrpc", "yaml"}
EVALUATING = {"eval", "exec", "compile", "__import__", "import_module", "system", "popen"}
PICKLED_MESSAGE = re.compile("(gather|broadcast|scatter|send|recv)_object(_list)?$")
STORED = {"torch.load", "torch.save", "torch.jit.load", "torch.package", "numpy.load", "np.load"}


def unsafe(tree: ast.AST) -> list[str]:
    """What a module does that could make an object or run code from a file or a peer."""
    found = [n for n in imported(tree) if n.split(".")[0] in PICKLING | OTHER_CODE]
    found += [n for n in imported(tree) if n in STORED or ".rpc" in n]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if PICKLED_MESSAGE.search(alias.name)]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.split(".")[-1]
        weights = any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        )
        if (
            (name in STORED and not (name == "torch.load" and weights))
            or (last in EVALUATING and name not in ("torch.compile", "re.compile"))
            or PICKLED_MESSAGE.search(last)
        ):
            found.append(name)
    return found


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from marshal import loads", "import torch.distributed.rpc as rpc"),
        *("from torch.distributed import all_gather_object", "import multiprocessing.connection"),
        *("eval(text)", "builtins.exec(text)", "compile(text, '', 'exec')", "os.system(text)"),
        *("torch.load(path)", "torch.load(path, weights_only=False)", "torch.save(x, path)"),
        *("dist.broadcast_object_list(found)", "group.all_gather_object(a, b)", "__import__(name)"),
    ],
)
def test_unsafe_code_is_seen(text):
    assert unsafe(ast.parse(text))


def test_safe_code_is_not_blamed():
    for text in ("torch.compile(step)", "re.compile(x)", "torch.load(f, weights_only=True)"):
        assert not unsafe(ast.parse(text))


def test_the_reference_has_every_public_name():
    """A new name stands in docs/api.md too."""
    listed = ast.parse((ROOT / "pfeife" / "__init__.pyi").read_text()).body
    names = {
        one.asname or one.name for n in listed if isinstance(n, ast.ImportFrom) for one in n.names
    }
    shown = re.findall(
        r"^\.\. auto\w+:: (?:\S+\.)?(\w+)$", (ROOT / "docs/api.md").read_text(), re.M
    )
    assert not names - set(shown)


def test_every_option_has_a_row_with_its_default():
    """In docs/options.md: `| name | default | meaning |`."""
    from pfeife.backend.settings.options import Options

    defaults = {}
    for field in attrs.fields(Options):
        default = field.default
        defaults[field.name] = default.factory() if isinstance(default, attrs.Factory) else default
    text = (ROOT / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.MULTILINE)
    said = {name: f'"{v}"' if isinstance(v, str) else repr(v) for name, v in defaults.items()}
    assert len(rows) == len(set(rows)) and dict(rows) == said


def test_the_page_of_the_options_is_that_of_their_table():
    """`python docs/options_page.py` writes it."""
    from docs.options_page import PAGE, page

    assert PAGE.read_text() == page()


def test_every_example_is_in_the_table():
    """In docs/examples.md."""
    listed = re.findall(
        r"^\| `(\w+\.py)` \|", (ROOT / "docs/examples.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
